// What NUMA binding does on a machine that really has several nodes, without Python: the first
// process of the virtual machines that scripts/numa_system.py boots (or of any machine, run by
// hand). Arguments: the expected nodes that have CPUs and memory, as "id:cpu,cpu,...".
//
// Asks the kernel, not our own records: getcpu() for where a thread runs, move_pages() for where a
// page lies. Prints a line per check and "numa_check: ok" or "numa_check: FAILED" at the end.
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "machine/arena.h"
#include "machine/numa.h"
#include "machine/parallel.h"
#include "machine/topology.h"
#include "moe/moe.h"

namespace kt {
namespace {

bool failed = false;

void check(bool good, const std::string& what) {
  std::printf("%s %s\n", good ? "  ok  " : "  FAIL", what.c_str());
  failed |= !good;
}

std::string text(const std::vector<int>& v) {
  std::string s;
  for (int x : v) s += (s.empty() ? "" : ",") + std::to_string(x);
  return s;
}

// The node of each page of [at, at + bytes) that is there: pages by node; -1 for no answer.
std::map<int, int> pages_by_node(const void* at, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<void*> pages;
  for (auto a = round_up(int64_t(at), page); a + page <= int64_t(at) + bytes; a += page)
    pages.push_back((void*)a);
  std::vector<int> nodes(pages.size(), -1);
  std::map<int, int> out;
  if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0))
    return {{-1, int(pages.size())}};
  for (int n : nodes) ++out[n];
  return out;
}

std::string text(const std::map<int, int>& pages) {
  std::string s;
  for (auto [node, n] : pages) s += std::to_string(n) + " on " + std::to_string(node) + " ";
  return s;
}

bool all_on(const std::map<int, int>& pages, int node) {
  return pages.size() == 1 && pages.begin()->first == node;
}

std::vector<Node> expected(int count, char** words) {
  std::vector<Node> out;
  for (int i = 0; i < count; ++i) {
    const char* at = std::strchr(words[i], ':');
    if (!at) continue;  // the kernel's own arguments
    Node n{std::atoi(words[i]), {}, 0, 0};
    for (; at; at = std::strchr(at + 1, ',')) n.cpus.push_back(std::atoi(at + 1));
    out.push_back(n);
  }
  return out;
}

void check_topology(const std::vector<Node>& want) {
  const Topology t = topology("/", affinity());
  check(t.nodes.size() == want.size(), std::to_string(t.nodes.size()) + " nodes");
  for (size_t i = 0; i < std::min(t.nodes.size(), want.size()); ++i) {
    const Node& n = t.nodes[i];
    check(n.id == want[i].id && n.cpus == want[i].cpus && n.memory > 0,
          "node " + std::to_string(n.id) + " has CPUs " + text(n.cpus) + " and " +
              std::to_string(n.memory >> 20) + " MB");
  }
  check(t.threads == int(affinity().size()), std::to_string(t.threads) + " threads");
}

// The checks can fail: a thread that is bound to a node alone gets its memory from there.
void check_first_touch(const std::vector<Node>& nodes) {
  const std::vector<int> mine = affinity();
  for (const Node& n : nodes) {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    CPU_SET(n.cpus[0], &mask);
    sched_setaffinity(0, sizeof mask, &mask);
    Arena a(1 << 20);
    std::memset(a.data(), 1, 1 << 20);
    const auto pages = pages_by_node(a.data(), 1 << 20);
    check(all_on(pages, n.id), "touched on node " + std::to_string(n.id) + ": " + text(pages));
  }
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int cpu : mine) CPU_SET(cpu, &mask);
  sched_setaffinity(0, sizeof mask, &mask);
}

void check_workers(const std::vector<Node>& nodes) {
  const std::vector<int> mine = affinity();
  set_threads(0);
  set_nodes(int(nodes.size()));
  check(affinity() == mine, "the caller keeps CPUs " + text(mine));
  check(refusals().empty(), "no call was refused");
  const auto found = node_workers();
  for (size_t i = 0; i < found.size(); ++i) {
    check(found[i].node == nodes[i].id && found[i].workers == int(nodes[i].cpus.size()),
          "node " + std::to_string(found[i].node) + " has " + std::to_string(found[i].workers) +
              " workers");
    for (const auto& cpus : found[i].cpus)
      check(cpus == nodes[i].cpus, "a worker of its may run on CPUs " + text(cpus));
  }
  // where tasks run, and where memory that they touch lies
  std::mutex m;
  std::map<int, std::set<unsigned>> cpus, homes;
  std::vector<int64_t> tasks(nodes.size(), 64);
  delay_tasks(200);
  parallel_on_nodes(tasks, [&](int node, int64_t, int worker) {
    if (worker == 0) return;  // the caller
    constexpr int64_t kBytes = 1 << 16;
    void* p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::memset(p, 1, kBytes);
    const auto pages = pages_by_node(p, kBytes);
    munmap(p, kBytes);
    unsigned cpu = 0;
    getcpu(&cpu, nullptr);
    std::lock_guard lock(m);
    cpus[node].insert(cpu);
    for (auto [home, n] : pages) homes[node].insert(unsigned(home));
  });
  delay_tasks(0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (found[i].cpus.empty()) continue;  // only the caller, who is left where it is
    const auto& own = nodes[i].cpus;
    bool inside = !cpus[int(i)].empty();
    for (unsigned cpu : cpus[int(i)])
      inside &= std::find(own.begin(), own.end(), int(cpu)) != own.end();
    check(inside, "tasks of node " + std::to_string(nodes[i].id) + " ran on its CPUs");
    check(homes[int(i)] == std::set<unsigned>{unsigned(nodes[i].id)}, "and touched memory there");
  }
}

// A layer's slices lie on their nodes, in an arena and in a memfd, whoever packs them.
struct Case {
  static constexpr int64_t E = 4, H = 512, I = 1024, T = 24, K = 2, S = 8;
  Layer l{E, H, I, 0, "bf16", Act::kSilu, nullptr, S};
  std::vector<bf16> x;
  std::vector<int64_t> index;
  std::vector<float> weight;

  explicit Case(void* memory) {
    l.data = (uint8_t*)memory;
    bind_slices(l);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> w(H * I);
    for (int64_t e = 0; e < E; ++e)
      for (int p = 0; p < 3; ++p) {
        for (float& v : w) v = normal(random) / 32;
        pack_matrix(l, e, p, w.data(), DType::kF32, l.cols(p));
      }
    for (int64_t i = 0; i < T * H; ++i) x.push_back(narrow(normal(random)));
    for (int64_t i = 0; i < T * K; ++i) index.push_back((i * 3) % E), weight.push_back(0.5f);
  }
  void check_places(const std::vector<Node>& nodes, const std::string& where) const {
    const std::vector<int64_t> owners = slice_owners(S);
    const std::vector<Slice> slices = slices_of(l);
    for (size_t i = 0; i < nodes.size(); ++i)
      for (int64_t s = owners[i]; s < owners[i + 1]; ++s) {
        const int64_t begin = slices[size_t(s)].offset, end = slices[size_t(s)].matrix(E, 0);
        const auto pages = pages_by_node(l.data + begin, end - begin);
        check(all_on(pages, nodes[i].id), "slice " + std::to_string(s) + " of node " +
                                              std::to_string(nodes[i].id) + " in " + where + ": " +
                                              text(pages));
      }
  }
  std::vector<float> forward() const {
    std::vector<float> out(T * H);
    moe_forward(l, {T, K, x.data(), index.data(), weight.data()}, {}, Compute::kBf16,
                Output{out.data()}, nullptr);
    return out;
  }
};

void check_layer(const std::vector<Node>& nodes) {
  Layer size{Case::E, Case::H, Case::I, 0, "bf16", Act::kSilu, nullptr, Case::S};
  const int64_t bytes = layer_bytes(size);
  Arena arena(bytes);
  const Case in_arena(arena.data());
  in_arena.check_places(nodes, "an arena");
  const int fd = memfd_create("kt", 0);
  check(ftruncate(fd, bytes) == 0, "a memfd");
  void* shared = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const Case in_memfd(shared);
  in_memfd.check_places(nodes, "a memfd");
  check(refusals().empty(), "no call was refused");

  const std::vector<float> many = in_arena.forward();
  check(in_memfd.forward() == many, "the same results from both");
  set_nodes(1);
  check(in_arena.forward() == many, "one node computes the same bits");
}

void become_init() {
  mount("proc", "/proc", "proc", 0, nullptr);
  mount("sys", "/sys", "sysfs", 0, nullptr);
}

int run(int argc, char** argv) {
  const bool init = getpid() == 1;
  if (init) become_init();
  const std::vector<Node> nodes = expected(argc - 1, argv + 1);
  check_topology(nodes);
  if (!failed) {
    check_first_touch(nodes);
    check_workers(nodes);
    check_layer(nodes);
  }
  std::printf("numa_check: %s\n", failed ? "FAILED" : "ok");
  std::fflush(stdout);
  if (init) reboot(RB_POWER_OFF);
  return failed;
}

}  // namespace
}  // namespace kt

int main(int argc, char** argv) { return kt::run(argc, argv); }
