// Roofs of this machine, with the threads the benchmark uses: fp32, bf16 and int8 peak, DRAM read.
// Prints one JSON object. Built by bench/machine.py; AVX-512 parts are compiled where the CPU has them.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kChains = 24;  // independent accumulators: enough for any latency x throughput product

double seconds(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Best of `tries` of f on n threads at once; f returns the amount of work it did.
template <class F>
double rate(int n, int tries, F f) {
  double best = 0;
  for (int t = 0; t < tries; ++t) {
    std::vector<double> work(static_cast<size_t>(n));
    auto start = Clock::now();
    std::vector<std::thread> threads;
    for (int i = 1; i < n; ++i)
      threads.emplace_back([&, i] { work[static_cast<size_t>(i)] = f(i); });
    work[0] = f(0);
    for (auto& th : threads) th.join();
    double sum = 0;
    for (double w : work) sum += w;
    best = std::max(best, sum / seconds(start));
  }
  return best;
}

constexpr int kLoops = 3000000;  // tens of milliseconds

#if defined(__AVX512F__)
template <class V, class Op>
double chain(V one, Op op, double per_op) {
  V a[kChains];
  for (auto& x : a) x = one;
  for (int i = 0; i < kLoops; ++i)
    for (auto& x : a) {
      x = op(x, one);
      asm volatile("" : "+v"(x));
    }
  return double(kLoops) * kChains * per_op;
}
double fp32(int) {
  return chain(_mm512_set1_ps(1), [](__m512 x, __m512 y) { return _mm512_fmadd_ps(y, y, x); }, 32);
}
#if defined(__AVX512BF16__)
double bf16(int) {
  return chain(
      _mm512_set1_ps(1),
      [](__m512 x, __m512 y) { return _mm512_dpbf16_ps(x, (__m512bh)y, (__m512bh)y); }, 64);
}
#endif
#if defined(__AVX512VNNI__)
double int8(int) {
  return chain(
      _mm512_set1_epi8(1), [](__m512i x, __m512i y) { return _mm512_dpbusd_epi32(x, y, y); }, 128);
}
#endif
#endif

double fp32_avx2(int) {
  constexpr int chains = 12;  // 16 registers
  __m256 a[chains], one = _mm256_set1_ps(1);
  for (auto& x : a) x = one;
  for (int i = 0; i < kLoops; ++i)
    for (auto& x : a) {
      x = _mm256_fmadd_ps(one, one, x);
      asm volatile("" : "+x"(x));
    }
  return double(kLoops) * chains * 16;
}

double dram(int n) {
  // larger than any last-level cache share a virtual machine reports honestly
  const size_t bytes = size_t(1) << 30;
  std::vector<char*> part(static_cast<size_t>(n));
  for (auto& p : part) {
    p = static_cast<char*>(aligned_alloc(size_t(1) << 21, bytes));
    std::memset(p, 1, bytes);
  }
  double r = rate(n, 6, [&](int i) {
    const char* p = part[static_cast<size_t>(i)];
    __m256i s[4] = {};
    for (size_t o = 0; o < bytes; o += 128)
      for (size_t j = 0; j < 4; ++j)
        s[j] = _mm256_xor_si256(s[j], *reinterpret_cast<const __m256i*>(p + o + 32 * j));
    asm volatile("" ::"x"(s[0]), "x"(s[1]), "x"(s[2]), "x"(s[3]));
    return double(bytes);
  });
  for (char* p : part) free(p);
  return r;
}

}  // namespace

int main(int argc, char** argv) {
  int n = argc > 1 ? atoi(argv[1]) : 1;
  std::printf("{\"threads\": %d, \"fp32_avx2_gflops\": %.1f", n, rate(n, 5, fp32_avx2) * 1e-9);
#if defined(__AVX512F__)
  std::printf(", \"fp32_gflops\": %.1f", rate(n, 5, fp32) * 1e-9);
#if defined(__AVX512BF16__)
  std::printf(", \"bf16_gflops\": %.1f", rate(n, 5, bf16) * 1e-9);
#endif
#if defined(__AVX512VNNI__)
  std::printf(", \"int8_gops\": %.1f", rate(n, 5, int8) * 1e-9);
#endif
#endif
  std::printf(", \"dram_gbps\": %.1f}\n", dram(n) * 1e-9);
}
