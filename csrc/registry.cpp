// CPUID and XCR0 decide; build flags never do. Adding a tier needs only its file in isa/: CMake
// writes registry.list (one KT_TIER line per tier, in order of preference).
#include "registry.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kt {

#define KT_TIER(stem) extern const Kernel kt_kernels_##stem[];
#include "registry.list"
#undef KT_TIER

namespace {

constexpr int kFormats = 0
#define KT_FORMAT(stem) +1
#include "formats.list"
#undef KT_FORMAT
    ;

struct Cpu {
  unsigned leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf71_eax = 0;
  bool ymm = false, zmm = false;  // state the operating system saves
};

Cpu read_cpu() {
  Cpu c;
#if defined(__x86_64__)
  unsigned a, b, cx, d;
  if (__get_cpuid(1, &a, &b, &cx, &d)) c.leaf1_ecx = cx;
  if (__get_cpuid_count(7, 0, &a, &b, &cx, &d)) c.leaf7_ebx = b, c.leaf7_ecx = cx, c.leaf7_edx = d;
  if (__get_cpuid_count(7, 1, &a, &b, &cx, &d)) c.leaf71_eax = a;
  if (c.leaf1_ecx >> 27 & 1) {  // OSXSAVE: xgetbv may be used
    unsigned lo, hi;
    asm volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    c.ymm = (lo & 6) == 6;
    c.zmm = (lo & 0xe6) == 0xe6;
  }
#endif
  return c;
}

bool has(const Cpu& c, const std::string& f) {
  auto bit = [](unsigned reg, int n) { return (reg >> n & 1) != 0; };
  if (f == "fma") return c.ymm && bit(c.leaf1_ecx, 12) && bit(c.leaf1_ecx, 29);  // with f16c
  if (f == "avx2") return c.ymm && bit(c.leaf7_ebx, 5);
  if (f == "avx512f") return c.zmm && bit(c.leaf7_ebx, 16);
  if (f == "avx512dq") return c.zmm && bit(c.leaf7_ebx, 17);
  if (f == "avx512bw") return c.zmm && bit(c.leaf7_ebx, 30);
  if (f == "avx512vl") return c.zmm && bit(c.leaf7_ebx, 31);
  if (f == "avx512_vnni") return c.zmm && bit(c.leaf7_ecx, 11);
  if (f == "avx512_vbmi") return c.zmm && bit(c.leaf7_ecx, 1);
  if (f == "avx512_bf16") return c.zmm && bit(c.leaf71_eax, 5);
  if (f == "avx_vnni") return c.ymm && bit(c.leaf71_eax, 4);
  throw std::logic_error("unknown CPU feature in an ISA file: " + f);
}

std::string& forced() {
  static std::string s;
  return s;
}

}  // namespace

std::string missing_features(const char* needed) {
  static const Cpu cpu = read_cpu();
  std::string out, word;
  for (const char* p = needed;; ++p) {
    if (*p && *p != ' ') {
      word += *p;
    } else {
      if (!word.empty() && !has(cpu, word)) out += (out.empty() ? "" : " ") + word;
      word.clear();
      if (!*p) return out;
    }
  }
}

const std::vector<KernelEntry>& registry() {
  static const std::vector<KernelEntry> all = [] {
    std::vector<KernelEntry> v;
    auto add = [&](const Kernel* k) {
      for (int i = 0; i < kFormats; ++i)
        v.push_back({k + i, missing_features(k->cpu).empty(), new std::atomic<uint64_t>(0)});
    };
#define KT_TIER(stem) add(kt_kernels_##stem);
#include "registry.list"
#undef KT_TIER
    return v;
  }();
  return all;
}

std::string current_isa() {
  if (!forced().empty()) return forced();
  std::string best;
  for (auto& e : registry())
    if (e.usable) best = e.kernel->isa;
  return best;
}

void force_isa(const std::string& name) {
  std::string known;
  for (auto& e : registry()) {
    if (name == e.kernel->isa) {
      if (!e.usable)
        throw std::invalid_argument(
            "KT_ISA is " + name + " but this CPU or operating system lacks " +
            missing_features(e.kernel->cpu) + "; unset KT_ISA to use " + current_isa());
      forced() = name;
      return;
    }
    if (known.find(e.kernel->isa) == std::string::npos)
      known += std::string(known.empty() ? "" : ", ") + e.kernel->isa;
  }
  if (!name.empty()) throw std::invalid_argument("KT_ISA is " + name + "; known tiers: " + known);
  forced().clear();
}

const KernelEntry& find_kernel(const std::string& format) {
  std::string isa = current_isa();
  for (auto& e : registry())
    if (isa == e.kernel->isa && format == e.kernel->format) return e;
  std::string known;
  for (auto& e : registry())
    if (isa == e.kernel->isa) known += std::string(known.empty() ? "" : ", ") + e.kernel->format;
  throw std::invalid_argument("weight format '" + format + "' is unknown; known formats: " + known);
}

}  // namespace kt
