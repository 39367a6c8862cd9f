// What this process may use of the machine: CPUs, their NUMA nodes and cores, its CPU quota.
//
// Everything is read below `root`, "/" but in tests: /sys/devices/system/{node,cpu},
// /proc/self/{cgroup,mountinfo,status} and the mounted cgroups. A file that is missing or
// unreadable limits nothing. Nothing is kept: a call opens a handful of files (0.1 ms), and
// topology() one more per CPU and three per node, so callers remember the answer.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace kt {

// A place to compute and to keep memory.
struct Node {
  int id = 0;               // the system's: ids may have gaps
  std::vector<int> cpus{};  // allowed here, never none; the first `cores` are on distinct cores
  int cores = 0;
  int64_t memory = 0;  // bytes in all, free or not; 0: the system does not say
};

struct Topology {
  std::vector<Node> nodes;  // ascending ids
  int threads = 1;          // what allowed_cpus() says
};

// The CPUs of this process's affinity mask, which cpusets and taskset narrow. Ascending.
std::vector<int> affinity();

// A directory of limits on this process.
struct Cgroup {
  std::string directory;
  bool v2;  // of version 2, whose files have other names
};

// Those of `controller` ("cpu", "memory"): this process's own and all above it that are mounted.
std::vector<Cgroup> cgroups(const std::string& controller, const std::string& root = "/");

// CPUs that cgroups let this process use at a time: the least quota of its cgroup and all above it,
// as a number of CPUs (infinity: no quota). Version 1 and 2.
double cpu_quota(const std::string& root = "/");

// Threads that may run at once: the CPUs of the mask, capped by the quota rounded to the nearest
// whole CPU. At least 1.
int allowed_cpus();
int allowed_cpus(const std::string& root, const std::vector<int>& cpus);

// The online nodes that hold any of `cpus` (ascending). CPUs of a node without memory, or with
// memory that the cpuset forbids, go to the nearest node that has some; CPUs of no node to the
// first. Without node directories: node 0 with all CPUs.
Topology topology(const std::string& root, const std::vector<int>& cpus);

}  // namespace kt
