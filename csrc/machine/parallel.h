// Worker pool: the caller works too; static split, then stealing; spin briefly, then sleep.
//
// run() is entered by one thread at a time (others wait). Results may not depend on which worker
// runs a task: tasks own their outputs. Exceptions of tasks reach the caller. After fork() the
// child gets a fresh pool on first use. Exit waits for the call in flight and joins the workers.
//
// Over several NUMA nodes each worker belongs to one of them and is bound to its CPUs (numa.h); the
// caller counts as node 0's and is left where it is. On one node nothing is bound.
#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace kt {

// Sets the number of threads (0: topology.h's allowed_cpus(), or those on the CPUs of set_nodes()'s
// nodes). Throws std::invalid_argument above that unless `oversubscribe`, which only tests use, and
// below the number of nodes.
void set_threads(int n, bool oversubscribe = false);
int threads();

// Spreads the workers over this many NUMA nodes, those with the most CPUs. Above 1 it starts the
// workers at once, so that refusals() is complete. Throws std::invalid_argument for more nodes than
// there are (so does check_nodes()) or than threads.
void set_nodes(int n);
void check_nodes(int n);
int available_nodes();
// Test aid: the machine's nodes count again and again until they are this many (0: once).
void pretend_nodes(int n);
int nodes();
int node_threads(size_t node);

// Slices over the nodes: numa.h's share_slices(), or {0, slices} where one node does the work:
// nodes() is 1, or there are fewer slices than nodes.
std::vector<int64_t> slice_owners(int64_t slices);
// Has pages of [at, at + bytes) come from node `i` of the pool.
void bind_to_node(void* at, int64_t bytes, size_t i);

// fn(task, worker) for task in [0, tasks), worker in [0, threads()).
void parallel(int64_t tasks, const std::function<void(int64_t, int)>& fn);

// fn(node, task, worker) for task in [0, tasks[node]), by workers of that node alone. tasks has one
// element (any worker; node 0) or nodes() of them.
void parallel_on_nodes(std::span<const int64_t> tasks,
                       const std::function<void(int, int64_t, int)>& fn);

// Addresses of GOMP_parallel and omp_get_max_threads in the OpenMP runtime that torch uses (0, 0:
// in none). From then on its threads run the tasks of calls from threads whose
// omp_get_max_threads() is threads(); the pool's own threads do wherever it is not, and after
// fork().
void use_openmp(uintptr_t parallel, uintptr_t max_threads);
bool in_openmp();  // whether the last parallel() with work for two was run by them

// Holds the entry lock: all parallel() calls of one engine call and its scratch belong to one
// caller.
struct CallLock {
  CallLock();
  ~CallLock();
};

// Test aid: every task first sleeps this long, on worker 0 four times: all workers run and must
// steal.
void delay_tasks(int microseconds);
// Test aid: tasks on this worker throw (-1: on none), until the number of threads changes.
void fail_tasks(int worker);
// Test aid: distinct workers that ran a task since the last call.
int workers_seen();
// Test aid: per node of the pool, its id, its workers, and their CPUs as the system says (the
// caller, of node 0, is not asked).
struct NodeWorkers {
  int node, workers;
  std::vector<std::vector<int>> cpus;
};
std::vector<NodeWorkers> node_workers();

// Grow-only scratch, valid while the CallLock is held. `slot` names the use; worker -1 is shared,
// for the caller alone to ask for.
constexpr int kSlots = 40;
void* scratch(int worker, int slot, int64_t bytes);

}  // namespace kt
