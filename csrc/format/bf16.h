// bits: 16
// bf16 weights as they are: exact, no scales.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Format_bf16 {
  static constexpr const char* name = "bf16";
  static constexpr int bits = 16;
  static constexpr bool scaled = false;
  static constexpr int pairs = 1;
  static constexpr int groups[] = {0}, default_group = 0;
  static constexpr int quads = 0, bias = 0;
  static constexpr bool raw_bytes = false;

  template <class I>
  static constexpr float unit = 1.f;
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    out[0] = I::line(x);
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    for (int64_t i = 0; i < count; ++i) code[i] = narrow(v[i]);
    return 1.f;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return c[0] | uint32_t(c[1]) << 16; }
};
}  // namespace
}  // namespace kt
