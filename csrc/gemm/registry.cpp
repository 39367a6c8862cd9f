// Adding a tier needs only its file in isa/: CMake writes registry.list (one KT_TIER line per tier,
// in order of preference).
#include "gemm/registry.h"

#include <stdexcept>

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

std::string& forced() {
  static std::string s;
  return s;
}

std::vector<KernelEntry>& entries() {
  static std::vector<KernelEntry> all = [] {
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

}  // namespace

const std::vector<KernelEntry>& registry() { return entries(); }

void use_cpu(const std::optional<CpuRegisters>& fake) {
  override_cpu(fake);
  forced().clear();
  for (auto& e : entries()) e.usable = missing_features(e.kernel->cpu).empty();
}

std::string current_isa() {
  if (!forced().empty()) return forced();
  std::string best;
  for (auto& e : registry())
    if (e.usable && cpu().vendor != e.kernel->slow_on) best = e.kernel->isa;
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
