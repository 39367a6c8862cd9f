// What it costs to get to the work: an indirect call of a kernel, a parallel section, a layer's
// forward with next to nothing to compute. Prints "name value" lines, values in seconds, the least
// of many rounds; bench/dispatch.py makes the table.
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "gemm/registry.h"
#include "machine/parallel.h"
#include "moe/moe.h"

namespace kt {
namespace {

using Clock = std::chrono::steady_clock;

// Seconds per call of f, the least of `rounds` rounds of `calls` each; `rest` before every round.
template <class F>
double least(int rounds, int calls, std::chrono::microseconds rest, F f) {
  double best = 1e9;
  for (int r = 0; r < rounds; ++r) {
    if (rest.count()) std::this_thread::sleep_for(rest);
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) f();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - start).count() / calls);
  }
  return best;
}

void kernel_call() {
  const Kernel& k = *find_kernel("int8").kernel;
  alignas(64) float c[kCols] = {};
  const volatile int64_t none = 0;  // rows: the call and nothing else
  std::printf("kernel_call %.4g\n", least(200, 100'000, {}, [&] { k.add_rows(c, none, c); }));
}

void sections() {
  for (int threads : {1, 2}) {
    set_threads(threads, true);
    auto section = [&] { parallel(2 * threads, [](int64_t, int) {}); };
    section();
    std::printf("parallel_%d %.4g\n", threads, least(50, 2000, {}, section));
    if (threads > 1)  // every round finds the worker asleep
      std::printf("parallel_%d_asleep %.4g\n", threads,
                  least(200, 1, std::chrono::milliseconds(5), section));
  }
}

// One token through two of eight experts of 64 x 64: 50 kFLOP, about a microsecond of work.
void layer() {
  constexpr int64_t E = 8, H = 64, I = 64, K = 2;
  Layer l{E, H, I, 64, "int8", Act::kSilu, nullptr};
  std::vector<uint8_t> memory(size_t(layer_bytes(l) + kAlign));
  l.data = (uint8_t*)round_up(int64_t(memory.data()), kAlign);
  const std::vector<float> ones(H * I, 1.f);
  for (int64_t e = 0; e < E; ++e)
    for (int p = 0; p < 3; ++p) pack_matrix(l, e, p, ones.data(), DType::kF32, 64);
  const std::vector<bf16> x(H, narrow(1.f));
  const int64_t index[K] = {1, 5};
  const float weight[K] = {0.5f, 0.5f};
  std::vector<float> out(H);
  for (int threads : {1, 2}) {
    set_threads(threads, true);
    std::printf("layer_%d %.4g\n", threads, least(50, 1000, {}, [&] {
                  moe_forward(l, {1, K, x.data(), index, weight}, {}, Compute::kBf16, {out.data()},
                              nullptr);
                }));
  }
}

}  // namespace
}  // namespace kt

int main() {
  kt::kernel_call();
  kt::sections();
  kt::layer();
}
