// Which kernels exist, which this CPU can run, which one is used.
#pragma once
#include <atomic>
#include <string>
#include <vector>

#include "gemm/kernel.h"
#include "machine/cpu.h"

namespace kt {

struct KernelEntry {
  const Kernel* kernel;
  bool usable;                   // CPU and operating system allow it
  std::atomic<uint64_t>* calls;  // tasks that ran with it
};

const std::vector<KernelEntry>& registry();
// Tier in use: forced, else the last in the order of registry.list that is usable and not slow on
// this CPU. Throws on an unknown or unusable name.
std::string current_isa();
void force_isa(const std::string& name);                    // "" = automatic
const KernelEntry& find_kernel(const std::string& format);  // in the current tier
// For tests: chooses as on a machine with these registers (none: this one); nothing is forced then.
// Running a tier that the real CPU lacks dies, unless its instructions are emulated.
void use_cpu(const std::optional<CpuRegisters>& fake);

}  // namespace kt
