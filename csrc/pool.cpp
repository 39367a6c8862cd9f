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
  explicit Pool(int n) : ranges_(size_t(n)), used_(size_t(n)), size_(n) {}
  ~Pool() { join(); }
  int size() const { return size_; }

  void run(int64_t tasks, const std::function<void(int64_t, int)>& fn, const OpenMP& torch) {
    if (tasks <= 0) return;
    fn_ = &fn;
    error_ = nullptr;
    for (int i = 0; i < size_; ++i) {
      ranges_[size_t(i)].next = tasks * i / size_;
      ranges_[size_t(i)].end = tasks * (i + 1) / size_;
    }
    // Another number than the calling thread's own would make its runtime start and end threads.
    in_openmp_ = size_ > 1 && tasks > 1 && torch.parallel && torch.max_threads() == size_;
    if (size_ == 1 || tasks == 1)
      work(0);
    else if (in_openmp_)
      with_openmp(torch);
    else
      with_workers();
    if (error_) std::rethrow_exception(error_);
  }

  bool in_openmp() const { return in_openmp_; }
  std::vector<std::atomic<bool>>& used() { return used_; }
  std::atomic<int> delay{0};
  std::atomic<int> failing{-1};

 private:
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
    if (workers_.empty()) start();
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

  void start() {
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

  void work(int me) {
    for (int k = 0; k < size_; ++k) {
      Range& r = ranges_[size_t((me + k) % size_)];
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
  std::vector<Range> ranges_;
  std::vector<std::atomic<bool>> used_;
  const int size_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int64_t> epoch_{0};
  std::atomic<int> busy_{0};
  bool stop_ = false, in_openmp_ = false;
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

Pool& pool() {
  State& s = state();
  int n = threads();
  if (!s.pool || s.pool->size() != n) s.pool = std::make_unique<Pool>(n);
  while (s.buffers.size() < size_t(n) + 1) s.buffers.emplace_back();
  return *s.pool;
}

}  // namespace

void set_threads(int n, bool oversubscribe) {
  if (n < 0)
    throw std::invalid_argument("threads is " + std::to_string(n) +
                                "; give a number >= 1, or none for all allowed CPUs");
  const int allowed = allowed_cpus();
  if (n > allowed && !oversubscribe)
    throw std::invalid_argument(
        "threads is " + std::to_string(n) + " but only " + std::to_string(allowed) +
        " CPUs are allowed here (affinity and cgroup); lower threads or widen the CPU set");
  Entry lock;
  state().wanted = n;
  state().allowed = 0;
  state().oversubscribe = oversubscribe;
}

int threads() {
  State& s = state();
  if (int n = s.wanted) return n;
  int n = s.allowed;
  if (!n) s.allowed = n = allowed_cpus();
  return n;
}

void parallel(int64_t tasks, const std::function<void(int64_t, int)>& fn) {
  Entry lock;
  pool().run(tasks, fn, state().torch);
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

void* scratch(int worker, int slot, int64_t bytes) {
  State& s = state();
  Buffer* b = &s.buffers[size_t(worker + 1)][size_t(slot)];
  return b->grow(bytes);
}

}  // namespace kt
