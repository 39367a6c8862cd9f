// Compares AMX instructions, emulated or real, with a scalar model written here a second time from
// the manual: element by element, no shared code. Arguments: iterations, and "real" on a CPU that
// has AMX. Prints the number of mismatches of each part; the exit code is 0 if all are 0.
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

struct alignas(64) Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

uint64_t seed = 88172645463325252ull;
uint32_t random32() {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return uint32_t(seed >> 20);
}
int below(int n) { return int(random32() % uint32_t(n)); }

void configure(const Config& c) { asm volatile("ldtilecfg %0" ::"m"(c)); }
void release() { asm volatile("tilerelease"); }
template <int T>
void load(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
void store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}

enum Product { kSS, kSU, kUS, kUU, kBf16, kProducts };
constexpr const char* kNames[kProducts] = {"tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps"};
void multiply(int op) {  // tmm1 += tmm3 x tmm6
  if (op == kSS) asm volatile("tdpbssd %tmm6, %tmm3, %tmm1");
  if (op == kSU) asm volatile("tdpbsud %tmm6, %tmm3, %tmm1");
  if (op == kUS) asm volatile("tdpbusd %tmm6, %tmm3, %tmm1");
  if (op == kUU) asm volatile("tdpbuud %tmm6, %tmm3, %tmm1");
  if (op == kBf16) asm volatile("tdpbf16ps %tmm6, %tmm3, %tmm1");
}

float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
float flush(float f) { return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.f, f) : f; }
float step(float a, float b, float c) { return flush(std::fma(flush(a), flush(b), flush(c))); }

// Finite bf16: mostly of moderate size, sometimes a zero, a denormal, the largest, a power of two.
uint16_t some_bf16() {
  static const uint16_t special[] = {0,      0x8000, 1,      0x8001, 0x007f, 0x0080,
                                     0x8080, 0x7f7f, 0xff7f, 0x3f80, 0xbf80, 0x0100};
  if (below(4) == 0) return special[below(12)];
  return uint16_t((random32() & 0x807f) | uint32_t(107 + below(40)) << 7);
}

// One element of C from its row of A, its column of B (dwords) and its old value.
uint32_t expect(int op, const uint32_t* a, const std::vector<uint32_t>& b, uint32_t old) {
  if (op == kBf16) {
    float even = 0, odd = 0;
    for (size_t k = 0; k < b.size(); ++k) {
      even = step(from_bits(a[k] << 16), from_bits(b[k] << 16), even);
      odd = step(from_bits(a[k] & 0xffff0000u), from_bits(b[k] & 0xffff0000u), odd);
    }
    const float sum = flush(flush(from_bits(old)) + flush(even + odd));
    uint32_t u;
    memcpy(&u, &sum, 4);
    return u;
  }
  int64_t sum = int32_t(old);
  for (size_t k = 0; k < b.size(); ++k)
    for (int j = 0; j < 32; j += 8) {
      const uint8_t x = uint8_t(a[k] >> j), y = uint8_t(b[k] >> j);
      const int64_t p = op == kUS || op == kUU ? x : int8_t(x);
      sum += p * (op == kSU || op == kUU ? y : int8_t(y));
    }
  return uint32_t(sum);
}

int check_product(int op, int m, int k, int n) {
  static uint32_t a[16 * 24], b[16 * 24], c[16 * 24], d[16 * 24];
  const int lda = k + below(8), ldb = n + below(8), ldc = n + below(8);
  for (auto* p : {a, b, c})
    for (int i = 0; i < 16 * 24; ++i)
      p[i] = op == kBf16 ? uint32_t(some_bf16()) << 16 | some_bf16() : random32();
  memset(d, 0x5a, sizeof d);
  load<1>(c, ldc * 4), load<3>(a, lda * 4), load<6>(b, ldb * 4);
  multiply(op);
  store<1>(d, ldc * 4);
  int bad = 0;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < ldc; ++j) {
      uint32_t want = 0x5a5a5a5a;  // not written beyond the tile's shape
      if (i < m && j < n) {
        std::vector<uint32_t> column;
        for (int x = 0; x < k; ++x) column.push_back(b[x * ldb + j]);
        want = expect(op, a + i * lda, column, c[i * ldc + j]);
      }
      bad += i * ldc + j < 16 * 24 && d[i * ldc + j] != want;
    }
  return bad;
}

int check_addresses() {
  static uint8_t s[4096], out[1024];
  Config c = {};
  c.palette = 1, c.bytes[2] = 64, c.rows[2] = 16;
  configure(c);
  for (auto& v : s) v = uint8_t(random32());
  int bad = 0;
  auto same = [&](int64_t offset, int64_t stride) {
    store<2>(out, 64);
    for (int r = 0; r < 16; ++r) bad += memcmp(out + 64 * r, s + offset + stride * r, 64) != 0;
  };
  asm volatile("tileloadd 0x11(%0,%1,1), %%tmm2" ::"r"(s), "r"(64l) : "memory");
  same(0x11, 64);
  asm volatile("tileloaddt1 0x123(%0,%1,2), %%tmm2" ::"r"(s), "r"(40l) : "memory");
  same(0x123, 80);
  asm volatile("mov %0,%%r13; mov %1,%%r14; tileloadd (%%r13,%%r14,8), %%tmm2" ::"r"(s), "r"(9l)
               : "memory", "r13", "r14");
  same(0, 72);
  asm volatile("mov %0,%%r12; mov %1,%%r9; tileloadd -8(%%r12,%%r9,4), %%tmm2" ::"r"(s + 1600),
               "r"(-25l)
               : "memory", "r12", "r9");
  same(1592, -100);
  asm volatile("tilezero %tmm2");
  store<2>(out, 64);
  for (uint8_t v : out) bad += v != 0;
  Config back;
  memset(&back, 0xee, sizeof back);
  asm volatile("sttilecfg %0" : "=m"(back));
  bad += memcmp(&back, &c, 64) != 0;
  release();
  asm volatile("sttilecfg %0" : "=m"(back));
  const Config none = {};
  return bad + (memcmp(&back, &none, 64) != 0);
}

// Wrong use must end the program with this signal, as on hardware.
template <class F>
int dies(int wanted, F f) {
  fflush(stdout);
  const pid_t child = fork();
  if (!child) {
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFSIGNALED(status) && WTERMSIG(status) == wanted);
}

int check_faults() {
  static uint8_t s[1024];
  int bad = dies(SIGILL, [] { load<0>(s, 64); });  // not configured
  Config c = {};
  c.palette = 1;
  for (int t = 0; t < 7; ++t) c.bytes[t] = 64, c.rows[t] = 16;
  c.rows[3] = 8;
  bad += dies(SIGILL, [&] { configure(c), multiply(kBf16); });            // shapes disagree
  bad += dies(SIGILL, [&] { configure(c), load<7>(s, 64); });             // no such tile
  bad += dies(SIGILL, [&] { configure(c), release(), load<0>(s, 64); });  // released
  return bad;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 500;
  if (argc > 2 && !strcmp(argv[2], "real") && syscall(SYS_arch_prctl, 0x1023, 18)) return 2;
  int total = 0, bad[kProducts] = {};
  for (int i = 0; i < rounds; ++i) {
    const int m = 1 + below(16), k = 1 + below(16), n = 1 + below(16);
    Config c = {};
    c.palette = 1;
    c.rows[1] = c.rows[3] = uint8_t(m), c.rows[6] = uint8_t(k);
    c.bytes[1] = c.bytes[6] = uint16_t(4 * n), c.bytes[3] = uint16_t(4 * k);
    configure(c);
    for (int op = 0; op < kProducts; ++op) bad[op] += check_product(op, m, k, n);
  }
  release();
  auto report = [&](const char* name, int n) {
    printf("%s %d\n", name, n);
    total += n;
  };
  for (int op = 0; op < kProducts; ++op) report(kNames[op], bad[op]);
  report("addresses", check_addresses());
  report("faults", check_faults());
  return total != 0;
}
