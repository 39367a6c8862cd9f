// See pool.h. State sits behind one pointer, so that a forked child can leave the parent's threads
// and locks behind; the buffers of the parent stay mapped copy-on-write until the child replaces
// them.
#include "pool.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "numa.h"
#include "red_zone.h"
#include "topology.h"

namespace kt {
namespace {

constexpr int kSpins = 2000;  // of pause, 20 to 90 us: a second stage usually follows within that

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

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

// The OpenMP runtime that torch computes with (use_openmp): its threads wait by spinning after
// every operator of torch, so they are awake where ours would have to be woken, and on their own
// cores.
struct OpenMP {
  void (*parallel)(void (*fn)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*max_threads)() = nullptr;
};

struct alignas(64) Range {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

class Pool {
 public:
  // Workers are numbered node by node.
  Pool(std::vector<Share> shares, int n)
      : shares_(std::move(shares)),
        ranges_(size_t(n)),
        used_(size_t(n)),
        cpus_(size_t(n)),
        size_(n) {
    for (const Share& s : shares_) first_.push_back(first_.back() + s.threads);
    for (size_t i = 0; i < shares_.size(); ++i)
      node_of_.insert(node_of_.end(), size_t(shares_[i].threads), int(i));
  }
  ~Pool() { join(); }
  int size() const { return size_; }
  const std::vector<Share>& shares() const { return shares_; }
  int node_of(int worker) const { return node_of_[size_t(worker)]; }

  void run(int64_t tasks, const std::function<void(int64_t, int)>& fn, const OpenMP& torch) {
    if (tasks <= 0) return;
    stay_ = false;
    split(0, size_, tasks);
    // Another number than the calling thread's own would make its runtime start and end threads.
    // Nobody has bound those threads to nodes.
    in_openmp_ = size_ > 1 && tasks > 1 && shares_.size() == 1 && torch.parallel &&
                 torch.max_threads() == size_;
    run_ranges(tasks > 1, fn, torch);
  }
  void run_on_nodes(std::span<const int64_t> tasks, const std::function<void(int64_t, int)>& fn) {
    stay_ = true;
    for (size_t i = 0; i < tasks.size(); ++i) split(first_[i], first_[i + 1], tasks[i]);
    in_openmp_ = false;
    run_ranges(true, fn, {});
  }

  void start() {
    if (!workers_.empty()) return;
    started_ = 0;
    try {
      for (int i = 1; i < size_; ++i)
        workers_.emplace_back([this, i, seen = epoch_.load()] { loop(i, seen); });
    } catch (const std::system_error&) {
      const size_t refused = workers_.size() + 2;
      join();
      throw std::runtime_error("the system refused thread " + std::to_string(refused) + " of " +
                               std::to_string(size_) +
                               "; lower threads or raise its limits (memory, pids cgroup, ulimit)");
    }
  }
  // The CPUs of every worker that was bound; none of the caller.
  std::vector<std::vector<int>> worker_cpus() {
    wait_until_bound();
    return cpus_;
  }
  void wait_until_bound() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return started_ == int(workers_.size()); });
  }

  bool in_openmp() const { return in_openmp_; }
  std::vector<std::atomic<bool>>& used() { return used_; }
  std::atomic<int> delay{0};
  std::atomic<int> failing{-1};

 private:
  // Gives tasks [0, tasks) to workers [begin, end).
  void split(int begin, int end, int64_t tasks) {
    const int n = end - begin;
    for (int i = 0; i < n; ++i) {
      ranges_[size_t(begin + i)].next = tasks * i / n;
      ranges_[size_t(begin + i)].end = tasks * (i + 1) / n;
    }
  }

  void run_ranges(bool several, const std::function<void(int64_t, int)>& fn, const OpenMP& torch) {
    fn_ = &fn;
    error_ = nullptr;
    if (size_ == 1 || !several)
      work(0);
    else if (in_openmp_)
      with_openmp(torch);
    else
      with_workers();
    if (error_) std::rethrow_exception(error_);
  }

  // However many threads it gives: each steals what the others do not do.
  void with_openmp(const OpenMP& torch) {
    busy_ = 0;
    auto body = [](void* self) {
      auto* pool = static_cast<Pool*>(self);
      pool->work(pool->busy_.fetch_add(1));
    };
    torch.parallel(body, this, unsigned(size_), 0);
  }

  void with_workers() {
    start();
    busy_ = size_ - 1;
    {
      std::lock_guard lock(mutex_);
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    work(0);
    for (int spin = 0; busy_.load(std::memory_order_acquire); ++spin)
      if (spin < kSpins) {
        relax();
      } else {
        std::unique_lock lock(mutex_);
        done_.wait(lock, [&] { return busy_.load() == 0; });
      }
  }

  void join() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& t : workers_) t.join();
    workers_.clear();
    stop_ = false;
  }

  // Own tasks first, then the others': of all workers, or of this node's where tasks stay.
  void work(int me) {
    const int node = node_of(me), begin = stay_ ? first_[size_t(node)] : 0,
              n = stay_ ? shares_[size_t(node)].threads : size_;
    for (int k = 0; k < n; ++k) {
      Range& r = ranges_[size_t(begin + (me - begin + k) % n)];
      for (;;) {
        if (r.next.load(std::memory_order_relaxed) >= r.end) break;
        int64_t i = r.next.fetch_add(1);
        if (i >= r.end) break;
        if (delay)
          std::this_thread::sleep_for(std::chrono::microseconds(delay.load() * (me ? 1 : 4)));
        used_[size_t(me)].store(true, std::memory_order_relaxed);
        try {
          if (me == failing)
            throw std::runtime_error("task failed on worker " + std::to_string(me));
          (*fn_)(i, me);
        } catch (...) {
          std::lock_guard lock(mutex_);
          if (!error_) error_ = std::current_exception();
        }
      }
    }
  }

  void loop(int me, int64_t seen) {
    if (shares_.size() > 1) {
      bind_thread(shares_[size_t(node_of(me))].node);
      cpus_[size_t(me)] = affinity();
    }
    {
      std::lock_guard lock(mutex_);
      ++started_;
    }
    done_.notify_all();
    for (;;) {
      for (int spin = 0; spin < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spin)
        relax();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load() != seen; });
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_) return;
      work(me);
      std::lock_guard lock(mutex_);
      if (busy_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  std::vector<std::thread> workers_;
  const std::vector<Share> shares_;
  std::vector<int> first_{0}, node_of_;  // first worker of a node; node of a worker
  std::vector<Range> ranges_;
  std::vector<std::atomic<bool>> used_;
  std::vector<std::vector<int>> cpus_;  // of a worker
  const int size_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> epoch_{0};
  std::atomic<int> busy_{0};
  int started_ = 0;  // workers that are bound, or need not be
  bool stop_ = false, in_openmp_ = false;
  bool stay_ = false;  // tasks are done on their nodes
  const std::function<void(int64_t, int)>* fn_ = nullptr;
  std::exception_ptr error_;
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
        s.nodes.empty() ? std::vector<Share>{{{}, n}} : share_threads(s.nodes, n), n);
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
  Entry lock;
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
  Entry lock;
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
  Entry lock;
  return int(std::max<size_t>(1, state().nodes.size()));
}

int node_threads(size_t node) {
  Entry lock;
  return pool().shares().at(node).threads;
}

std::vector<int64_t> slice_owners(int64_t slices) {
  Entry lock;
  if (slices < nodes()) return {0, slices};
  return share_slices(pool().shares(), slices);
}

void bind_to_node(void* at, int64_t bytes, size_t i) {
  Entry lock;
  bind_memory(at, bytes, pool().shares().at(i).node);
}

void parallel(int64_t tasks, const std::function<void(int64_t, int)>& fn) {
  Entry lock;
  pool().run(tasks, fn, state().torch);
}

void parallel_on_nodes(std::span<const int64_t> tasks,
                       const std::function<void(int, int64_t, int)>& fn) {
  if (tasks.size() == 1) return parallel(tasks[0], [&](int64_t i, int w) { fn(0, i, w); });
  Entry lock;
  Pool& p = pool();
  p.run_on_nodes(tasks, [&](int64_t i, int w) { fn(p.node_of(w), i, w); });
}

void use_openmp(uintptr_t parallel, uintptr_t max_threads) {
  Entry lock;
  state().torch = {reinterpret_cast<decltype(OpenMP::parallel)>(parallel),
                   reinterpret_cast<decltype(OpenMP::max_threads)>(max_threads)};
}

bool in_openmp() {
  Entry lock;
  return state().pool && state().pool->in_openmp();
}

Entry::Entry() { state().entry.lock(); }
Entry::~Entry() { state().entry.unlock(); }

void delay_tasks(int us) {
  Entry lock;
  pool().delay = us;
}

void fail_tasks(int worker) {
  Entry lock;
  pool().failing = worker;
}

int workers_seen() {
  Entry lock;
  int n = 0;
  for (auto& u : pool().used()) n += u.exchange(false);
  return n;
}

std::vector<Crew> crews() {
  Entry lock;
  Pool& p = pool();
  std::vector<Crew> out;
  for (const Share& s : p.shares()) out.push_back({s.node.id, s.threads, {}});
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
