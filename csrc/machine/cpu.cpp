// See cpu.h. CPUID and XCR0 decide what may run; build flags never do.
#include "machine/cpu.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kt {
namespace {

constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;  // bits of XCR0

bool bit(uint32_t reg, int n) { return (reg >> n & 1) != 0; }
bool saved(const CpuRegisters& c, uint64_t state) { return (c.xcr0 & state) == state; }
bool tiles_present(const CpuRegisters& c) { return bit(c.leaf7_edx, 24) && saved(c, kTiles); }

CpuRegisters read_cpu() {
  CpuRegisters c;
#if defined(__x86_64__)
  unsigned a, b, cx, d;
  if (__get_cpuid(0, &a, &b, &cx, &d))
    for (unsigned word : {b, d, cx}) c.vendor.append(reinterpret_cast<const char*>(&word), 4);
  if (__get_cpuid(1, &a, &b, &cx, &d)) c.leaf1_ecx = cx;
  if (__get_cpuid_count(7, 0, &a, &b, &cx, &d)) c.leaf7_ebx = b, c.leaf7_ecx = cx, c.leaf7_edx = d;
  if (__get_cpuid_count(7, 1, &a, &b, &cx, &d)) c.leaf71_eax = a;
  if (bit(c.leaf1_ecx, 27)) {  // OSXSAVE: xgetbv may be used
    unsigned lo, hi;
    asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    c.xcr0 = uint64_t(hi) << 32 | lo;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, asm/prctl.h
  c.tiles = tiles_present(c) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
  return c;
}

CpuRegisters& current() {
  static CpuRegisters c = read_cpu();
  return c;
}

bool has(const CpuRegisters& c, const std::string& f) {
  if (f == "fma")  // with f16c
    return saved(c, kYmm) && bit(c.leaf1_ecx, 12) && bit(c.leaf1_ecx, 29);
  if (f == "avx2") return saved(c, kYmm) && bit(c.leaf7_ebx, 5);
  if (f == "avx_vnni") return saved(c, kYmm) && bit(c.leaf71_eax, 4);
  if (f == "avx512f") return saved(c, kZmm) && bit(c.leaf7_ebx, 16);
  if (f == "avx512dq") return saved(c, kZmm) && bit(c.leaf7_ebx, 17);
  if (f == "avx512bw") return saved(c, kZmm) && bit(c.leaf7_ebx, 30);
  if (f == "avx512vl") return saved(c, kZmm) && bit(c.leaf7_ebx, 31);
  if (f == "avx512_vnni") return saved(c, kZmm) && bit(c.leaf7_ecx, 11);
  if (f == "avx512_vbmi") return saved(c, kZmm) && bit(c.leaf7_ecx, 1);
  if (f == "avx512_bf16") return saved(c, kZmm) && bit(c.leaf71_eax, 5);
  if (f == "amx_tile") return tiles_present(c) && c.tiles;
  if (f == "amx_int8") return bit(c.leaf7_edx, 25);
  if (f == "amx_bf16") return bit(c.leaf7_edx, 22);
  throw std::logic_error("unknown CPU feature in an ISA file: " + f);
}

}  // namespace

const CpuRegisters& cpu() { return current(); }

void override_cpu(const std::optional<CpuRegisters>& fake) {
  current() = fake ? *fake : read_cpu();
}

bool tiles_refused() { return tiles_present(current()) && !current().tiles; }

std::string missing_features(const char* needed) {
  std::string out, word;
  for (const char* p = needed;; ++p) {
    if (*p && *p != ' ') {
      word += *p;
    } else {
      if (!word.empty() && !has(current(), word)) out += (out.empty() ? "" : " ") + word;
      word.clear();
      if (!*p) return out;
    }
  }
}

}  // namespace kt
