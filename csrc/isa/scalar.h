// flags:
// cpu:
// Any CPU: generic 4-lane vectors, which compilers lower to SSE2, NEON or plain scalars.
#pragma once
#include "isa/base.h"

namespace kt {
namespace {
struct Isa_scalar : Lanes<4> {
  static constexpr const char* name = "scalar";
  static constexpr int mr = 2;  // 2 x 4 accumulators: half of the 16 SSE registers
  static constexpr int mr8 = 2;
  static constexpr int few = 2;
};
}  // namespace
}  // namespace kt
