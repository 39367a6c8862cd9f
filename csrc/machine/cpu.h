// What this CPU and operating system offer: CPUID, XCR0 and the permission to use AMX tiles.
//
// Features are named as in /proc/cpuinfo. A test may put other registers in place of the
// processor's (override_cpu), e.g. to see what would be chosen on a Skylake.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace kt {

struct CpuRegisters {
  uint32_t leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf71_eax = 0;
  uint64_t xcr0 = 0;     // state the operating system saves; 0 without OSXSAVE
  bool tiles = false;    // the kernel has granted AMX tile data to this process
  std::string vendor{};  // "GenuineIntel", "AuthenticAMD", ...
};

// The processor's registers (read once per process; asks for AMX permission where tiles exist), or
// the ones put in their place.
const CpuRegisters& cpu();
void override_cpu(const std::optional<CpuRegisters>& fake);

// Those of the space-separated features in `needed` that are not usable here.
std::string missing_features(const char* needed);

// AMX exists and the operating system saves its state, but permission to use it was refused.
bool tiles_refused();

}  // namespace kt
