// bits: 8
// MXFP8 (OCP Microscaling): fp8 e4m3 codes, a power of two per 32 values as scale, exact in bf16.
#pragma once
#include "format/fp8.h"

namespace kt {
namespace {
// 2^(floor(log2(top)) - most) as the specification chooses it, `most` being the largest exponent of
// a code; within what e8m0 holds.
KT_OP float power_of_two(float top, int most) {
  uint32_t bits;
  __builtin_memcpy(&bits, &top, 4);
  int e = int(bits >> 23) - 127 - most;
  if (top == 0) return 0.f;
  return e < -126 ? 0x1p-127f : __builtin_ldexpf(1.f, e);
}

struct Format_mxfp8 : Format_fp8 {
  static constexpr const char* name = "mxfp8";
  using Scale = bf16;
  static constexpr int groups[] = {32}, default_group = 32;

  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    const float scale = power_of_two(largest_magnitude(v, count), 8),
                inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) code[i] = round(v[i] * inv);
    return scale;
  }
};
}  // namespace
}  // namespace kt
