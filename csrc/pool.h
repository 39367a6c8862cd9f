// Worker pool: the caller works too; static split, then stealing; spin briefly, then sleep.
//
// run() is entered by one thread at a time (others wait). Results may not depend on which worker
// runs a task: tasks own their outputs. Exceptions of tasks reach the caller. After fork() the
// child gets a fresh pool on first use. Exit waits for the call in flight and joins the workers.
#pragma once
#include <cstdint>
#include <functional>

namespace kt {

// Sets the number of threads (0: topology.h's allowed_cpus()). Throws std::invalid_argument above
// allowed_cpus() unless `oversubscribe`, which only tests use.
void set_threads(int n, bool oversubscribe = false);
int threads();

// fn(task, worker) for task in [0, tasks), worker in [0, threads()).
void parallel(int64_t tasks, const std::function<void(int64_t, int)>& fn);

// Addresses of GOMP_parallel and omp_get_max_threads in the OpenMP runtime that torch uses (0, 0:
// in none). From then on its threads run the tasks of calls from threads whose
// omp_get_max_threads() is threads(); the pool's own threads do wherever it is not, and after
// fork().
void use_openmp(uintptr_t parallel, uintptr_t max_threads);
bool in_openmp();  // whether the last parallel() with work for two was run by them

// Holds the entry lock: all parallel() calls of one engine call and its scratch belong to one
// caller.
struct Entry {
  Entry();
  ~Entry();
};

// Test aid: every task first sleeps this long, on worker 0 four times: all workers run and must
// steal.
void delay_tasks(int microseconds);
// Test aid: tasks on this worker throw (-1: on none), until the number of threads changes.
void fail_tasks(int worker);
// Test aid: distinct workers that ran a task since the last call.
int workers_seen();

// Grow-only scratch, valid while the Entry is held. `slot` names the use; worker -1 is shared, for
// the caller alone to ask for.
constexpr int kSlots = 32;
void* scratch(int worker, int slot, int64_t bytes);

}  // namespace kt
