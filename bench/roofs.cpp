// Roofs of this machine: multiply-add peaks and DRAM reads, in the instructions our kernels use.
// A shared library for bench/machine.py, so that roofs are sampled between the contestants:
//   double roof(kind, threads)  one sample, a few tens of milliseconds, operations or bytes per
//                               second; 0 for a kind this CPU or build does not have
// The instructions are written in asm: nothing is optimised away or moved; loops over the chains
// are unrolled, or the accumulators would live in memory and the peak would read as a quarter.
#include <immintrin.h>
#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr long kLoops = 1500000;  // of the chains below: 10 to 30 ms

// Independent accumulators: latency (4 to 6) x throughput (2) are covered; 256-bit code has 16
// registers.
constexpr int kChains512 = 24, kChains256 = 14;

#if defined(__AVX512F__)
#define KT_CHAIN(name, instruction, per_op)                                               \
  double name() {                                                                         \
    __m512i a[kChains512] = {}, b = _mm512_setzero_si512();                               \
    for (long i = 0; i < kLoops; ++i)                                                     \
      _Pragma("GCC unroll 32") for (auto& x : a) asm volatile(instruction " %1, %1, %0" : \
                                                              "+v"(x) : "v"(b));          \
    return double(kLoops) * kChains512 * per_op;                                          \
  }
KT_CHAIN(fp32, "vfmadd231ps", 32)
#if defined(__AVX512BF16__)
KT_CHAIN(bf16, "vdpbf16ps", 64)
#else
double bf16() { return 0; }
#endif
#if defined(__AVX512VNNI__)
KT_CHAIN(int8, "vpdpbusd", 128)
#else
double int8() { return 0; }
#endif
#else
double fp32() { return 0; }
double bf16() { return 0; }
double int8() { return 0; }
#endif

double fp32_avx2() {
  __m256 a[kChains256] = {}, b = _mm256_setzero_ps();
  for (long i = 0; i < kLoops; ++i)
#pragma GCC unroll 32
    for (auto& x : a) asm volatile("vfmadd231ps %1, %1, %0" : "+x"(x) : "x"(b));
  return double(kLoops) * kChains256 * 16;
}

constexpr size_t kBytes = size_t(256) << 20;  // per thread and sample

// Two streams with software prefetch over huge pages: the fastest way to read found on the machines
// at hand; plain loads over small pages reach two thirds of it.
double read_all(const char* p) {
  __m256i s[4] = {};
  for (size_t o = 0; o < kBytes / 2; o += 64)
    for (size_t stream = 0; stream < 2; ++stream) {
      const char* q = p + stream * (kBytes / 2) + o;
      _mm_prefetch(q + 2048, _MM_HINT_T0);
      for (size_t j = 0; j < 2; ++j) {
        auto& sum = s[2 * stream + j];
        sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(q) + j));
      }
    }
  asm volatile("" ::"x"(s[0]), "x"(s[1]), "x"(s[2]), "x"(s[3]));
  return double(kBytes);
}

// Every sample reads the next of kTurns regions, so that no last-level cache still has it.
constexpr size_t kTurns = 4;
struct Memory {
  char* start = nullptr;
  size_t turn = 0;
  Memory() {
    const size_t huge = size_t(2) << 20, bytes = kBytes * kTurns;
    void* p =
        mmap(nullptr, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
    start = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + huge - 1) / huge * huge);
    madvise(start, bytes, MADV_HUGEPAGE);
    std::memset(start, 1, bytes);
  }
  double read() { return start ? read_all(start + turn++ % kTurns * kBytes) : 0; }
};

}  // namespace

extern "C" double roof(const char* kind, int n) {
  const std::string k = kind;
  static std::vector<Memory> memory;
  while (k == "dram" && memory.size() < size_t(n))
    memory.emplace_back();  // before the clock starts
  auto work = [&](int thread) -> double {
    if (k == "dram") return memory[size_t(thread)].read();
    if (k == "fp32") return fp32();
    if (k == "bf16") return bf16();
    if (k == "int8") return int8();
    if (k == "fp32_avx2") return fp32_avx2();
    return 0;
  };
  std::vector<double> done(static_cast<size_t>(n));
  auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 1; i < n; ++i)
    threads.emplace_back([&, i] { done[static_cast<size_t>(i)] = work(i); });
  done[0] = work(0);
  for (auto& t : threads) t.join();
  double sum = 0;
  for (double d : done) sum += d;
  return sum / std::chrono::duration<double>(Clock::now() - start).count();
}
