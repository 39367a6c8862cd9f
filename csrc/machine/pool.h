// The threads of a pool (parallel.h), and how tasks get to them: an equal range per worker, then
// stealing. Used by parallel.cpp alone.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "machine/numa.h"
#include "machine/parallel.h"

namespace kt {
namespace {

constexpr int kSpins = 2000;  // of pause, 20 to 90 us: a second stage usually follows within that

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

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
  Pool(std::vector<NodeShare> shares, int n)
      : shares_(std::move(shares)),
        ranges_(size_t(n)),
        used_(size_t(n)),
        cpus_(size_t(n)),
        size_(n) {
    for (const NodeShare& s : shares_) first_.push_back(first_.back() + s.threads);
    for (size_t i = 0; i < shares_.size(); ++i)
      node_of_.insert(node_of_.end(), size_t(shares_[i].threads), int(i));
  }
  ~Pool() { join(); }
  int size() const { return size_; }
  const std::vector<NodeShare>& shares() const { return shares_; }
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
  const std::vector<NodeShare> shares_;
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

}  // namespace
}  // namespace kt
