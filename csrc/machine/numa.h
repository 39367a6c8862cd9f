// Threads and memory on NUMA nodes: who gets how much, and the system calls that bind them.
//
// Binding is best effort: where the system refuses a call (containers do), computing goes on with
// the same results, and refusals() says so once per kind of call. Nothing is bound on one node.
#pragma once
#include <string>
#include <vector>

#include "machine/topology.h"

namespace kt {

struct NodeShare {  // what one node of the pool works with
  Node node;
  int threads;
};

// The `count` nodes with the most CPUs, ascending ids.
std::vector<Node> largest(std::vector<Node> nodes, size_t count);

// `threads` over the nodes in proportion to their CPUs, each at least one. threads >= nodes.
std::vector<NodeShare> share_threads(const std::vector<Node>& nodes, int threads);

// Slices of the intermediate dimension over the nodes, in proportion to threads, each at least one:
// node i owns [out[i], out[i + 1]). slices >= shares.
std::vector<int64_t> share_slices(const std::vector<NodeShare>& shares, int64_t slices);

// The calling thread runs on the node's CPUs from now on, and memory that it touches first comes
// from there.
void bind_thread(const Node& node);

// Whole pages of [at, at + bytes), which nobody touched yet, come from this node while it has any.
void bind_memory(void* at, int64_t bytes, const Node& node);

// What the system refused since the last call, each kind of call once per process.
std::vector<std::string> refusals();

// Test aid: this call ("mbind", "set_mempolicy", "sched_setaffinity") fails with `error` (0: works
// again), and refusals() starts anew.
void refuse_call(const std::string& call, int error);

}  // namespace kt
