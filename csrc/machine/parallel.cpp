// See parallel.h. State sits behind one pointer, so that a forked child can leave the parent's
// threads and locks behind; the buffers of the parent stay mapped copy-on-write until the child
// replaces them.
#include "machine/parallel.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine/numa.h"
#include "machine/pool.h"
#include "machine/red_zone.h"
#include "machine/topology.h"

namespace kt {
namespace {

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Buffer() { release(); }
  void release() {
    if (!data) return;
    limit_access(data, bytes, bytes);
    munmap(data, size_t(bytes));
    data = nullptr;
  }
  void* grow(int64_t need) {
    if (need > bytes) map(need);
    if (data) limit_access(data, need, bytes);
    return data;
  }
  void map(int64_t need) {
    release();
    bytes = (need + need / 8 + kRedZone + (1 << 16) - 1) >> 16 << 16;
    data = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      data = nullptr, bytes = 0;
      throw std::bad_alloc();
    }
    if (bytes >= (4 << 20)) madvise(data, size_t(bytes), MADV_HUGEPAGE);
  }
};

// All process-wide state, reached through one pointer so that a forked child can drop it whole.
struct State {
  std::recursive_mutex entry;
  std::unique_ptr<Pool> pool;
  std::atomic<int> wanted{0};
  std::atomic<int> allowed{
      0};  // of the last set_threads, or of the first call: asking takes 0.1 ms
  bool oversubscribe = false;
  OpenMP torch;
  std::vector<Node> nodes;  // several, or none: one node, nothing is bound
  std::atomic<int> pretended{0};
  // [worker + 1][slot]; grows between runs only, and a worker touches its own: no lock
  std::deque<std::array<Buffer, kSlots>> buffers{1};
};

State*& state_slot() {
  static State* s = nullptr;
  return s;
}

State& state() {
  State*& s = state_slot();
  if (!s) {
    static std::mutex m;
    std::lock_guard lock(m);
    if (!s) {
      static bool once = [] {
        // The child owns none of the parent's threads and may hold copies of taken locks: start
        // over.
        pthread_atfork(nullptr, nullptr, [] {
          State* old = state_slot();
          if (!old) return;
          auto* fresh = new State;
          fresh->wanted = old->wanted.load();
          fresh->allowed = old->allowed.load();
          fresh->oversubscribe = old->oversubscribe;  // `torch` not: no OpenMP runtime survives it
          fresh->nodes = old->nodes;
          fresh->pretended = old->pretended.load();
          state_slot() = fresh;
        });
        // A thread may be computing: its call ends first, and as the lock is kept, none follows
        // that would start workers while the process takes itself apart.
        atexit([] {
          state().entry.lock();
          state().pool.reset();
        });
        return true;
      }();
      (void)once;
      s = new State;
    }
  }
  return *s;
}

int cpus_of(const std::vector<Node>& nodes) {
  int n = 0;
  for (const Node& node : nodes) n += int(node.cpus.size());
  return n;
}

Pool& pool() {
  State& s = state();
  int n = threads();
  if (!s.pool || s.pool->size() != n)
    s.pool = std::make_unique<Pool>(
        s.nodes.empty() ? std::vector<NodeShare>{{{}, n}} : share_threads(s.nodes, n), n);
  while (s.buffers.size() < size_t(n) + 1) s.buffers.emplace_back();
  return *s.pool;
}

// What the CPUs of these nodes, or all without any, let run at once.
int thread_limit(const std::vector<Node>& nodes) {
  const int allowed = allowed_cpus();
  return nodes.empty() ? allowed : std::min(allowed, cpus_of(nodes));
}

[[noreturn]] void too_few_threads(int threads, size_t nodes) {
  throw std::invalid_argument("numa_nodes is " + std::to_string(nodes) + " but threads is " +
                              std::to_string(threads) +
                              "; every node needs one: raise threads or lower numa_nodes");
}
[[noreturn]] void too_many_threads(int threads, int limit, const std::vector<Node>& nodes) {
  const std::string given = "threads is " + std::to_string(threads) + " but ";
  throw std::invalid_argument(
      nodes.empty()
          ? given + "only " + std::to_string(limit) +
                " CPUs are allowed here (affinity and cgroup); lower threads or widen the CPU set"
          : given + "the " + std::to_string(nodes.size()) + " NUMA nodes in use have " +
                std::to_string(limit) + " allowed CPUs; lower threads or raise numa_nodes");
}

std::vector<Node> usable_nodes() {
  std::vector<Node> nodes = topology("/", affinity()).nodes;
  const size_t real = nodes.size(), want = size_t(state().pretended);
  for (size_t i = 0; nodes.size() < want; ++i) nodes.push_back(nodes[i % real]);
  return nodes;
}

// Those to use for numa_nodes = n; none for 1, where nothing is bound.
std::vector<Node> choose_nodes(int n) {
  if (n < 1)
    throw std::invalid_argument("numa_nodes is " + std::to_string(n) +
                                "; give a number >= 1, or none for the nodes of this machine");
  if (n == 1) return {};
  const std::vector<Node> nodes = usable_nodes();
  if (nodes.size() < size_t(n))
    throw std::invalid_argument(
        "numa_nodes is " + std::to_string(n) + " but this process has CPUs and memory on " +
        std::to_string(nodes.size()) + "; lower numa_nodes, or remove it to use what there is");
  return largest(nodes, size_t(n));
}

}  // namespace

void set_threads(int n, bool oversubscribe) {
  if (n < 0)
    throw std::invalid_argument("threads is " + std::to_string(n) +
                                "; give a number >= 1, or none for all allowed CPUs");
  CallLock lock;
  State& s = state();
  const int limit = thread_limit(s.nodes);
  if (n > limit && !oversubscribe) too_many_threads(n, limit, s.nodes);
  if (size_t(n ? n : limit) < s.nodes.size()) too_few_threads(n ? n : limit, s.nodes.size());
  s.wanted = n;
  s.allowed = limit;
  s.oversubscribe = oversubscribe;
}

int threads() {
  State& s = state();
  if (int n = s.wanted) return n;
  int n = s.allowed;
  if (!n) s.allowed = n = thread_limit(s.nodes);
  return n;
}

void check_nodes(int n) { choose_nodes(n); }

int available_nodes() { return int(usable_nodes().size()); }

void pretend_nodes(int n) { state().pretended = n; }

void set_nodes(int n) {
  CallLock lock;
  State& s = state();
  std::vector<Node> chosen = choose_nodes(n);
  if (chosen.empty() && s.nodes.empty()) return;
  const int limit = thread_limit(chosen), count = s.wanted ? int(s.wanted) : limit;
  if (count < n) too_few_threads(count, size_t(n));
  if (count > limit && !s.oversubscribe) too_many_threads(count, limit, chosen);
  s.pool.reset();
  s.nodes = std::move(chosen);
  s.allowed = limit;
  if (n == 1) return;
  pool().start();
  pool().wait_until_bound();
}

int nodes() {
  CallLock lock;
  return int(std::max<size_t>(1, state().nodes.size()));
}

int node_threads(size_t node) {
  CallLock lock;
  return pool().shares().at(node).threads;
}

std::vector<int64_t> slice_owners(int64_t slices) {
  CallLock lock;
  if (slices < nodes()) return {0, slices};
  return share_slices(pool().shares(), slices);
}

void bind_to_node(void* at, int64_t bytes, size_t i) {
  CallLock lock;
  bind_memory(at, bytes, pool().shares().at(i).node);
}

void parallel(int64_t tasks, const std::function<void(int64_t, int)>& fn) {
  CallLock lock;
  pool().run(tasks, fn, state().torch);
}

void parallel_on_nodes(std::span<const int64_t> tasks,
                       const std::function<void(int, int64_t, int)>& fn) {
  if (tasks.size() == 1) return parallel(tasks[0], [&](int64_t i, int w) { fn(0, i, w); });
  CallLock lock;
  Pool& p = pool();
  p.run_on_nodes(tasks, [&](int64_t i, int w) { fn(p.node_of(w), i, w); });
}

void use_openmp(uintptr_t parallel, uintptr_t max_threads) {
  CallLock lock;
  state().torch = {reinterpret_cast<decltype(OpenMP::parallel)>(parallel),
                   reinterpret_cast<decltype(OpenMP::max_threads)>(max_threads)};
}

bool in_openmp() {
  CallLock lock;
  return state().pool && state().pool->in_openmp();
}

CallLock::CallLock() { state().entry.lock(); }
CallLock::~CallLock() { state().entry.unlock(); }

void delay_tasks(int us) {
  CallLock lock;
  pool().delay = us;
}

void fail_tasks(int worker) {
  CallLock lock;
  pool().failing = worker;
}

int workers_seen() {
  CallLock lock;
  int n = 0;
  for (auto& u : pool().used()) n += u.exchange(false);
  return n;
}

std::vector<NodeWorkers> node_workers() {
  CallLock lock;
  Pool& p = pool();
  std::vector<NodeWorkers> out;
  for (const NodeShare& s : p.shares()) out.push_back({s.node.id, s.threads, {}});
  const auto cpus = p.worker_cpus();
  for (size_t i = 1; i < cpus.size(); ++i) out[size_t(p.node_of(int(i)))].cpus.push_back(cpus[i]);
  return out;
}

void* scratch(int worker, int slot, int64_t bytes) {
  State& s = state();
  Buffer* b = &s.buffers[size_t(worker + 1)][size_t(slot)];
  return b->grow(bytes);
}

}  // namespace kt
