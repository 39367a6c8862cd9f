// bits: 4
// A table format as somebody else would add it: 16 values that are no straight line, one bf16 scale
// per group and channel. tests/csrc/test_toys.py compiles it from outside of csrc/.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Format_toy4 {
  static constexpr const char* name = "toy4";
  static constexpr int bits = 4;
  static constexpr bool scaled = true;
  static constexpr int pairs = 4;
  static constexpr int groups[] = {16, 32, 64, 0}, default_group = 16;
  static constexpr int quads = 0, bias = 0;
  static constexpr bool raw_bytes = false;
  // -8, -6, -4, -3, -2, -1.5, -1, -0.5, then 0 and their opposites but the largest
  alignas(64) static constexpr bf16 table[32] = {
      0xC100, 0xC0C0, 0xC080, 0xC040, 0xC000, 0xBFC0, 0xBF80, 0xBF00, 0x0000, 0x3F00, 0x3F80,
      0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0xC100, 0xC0C0, 0xC080, 0xC040, 0xC000, 0xBFC0,
      0xBF80, 0xBF00, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};

  template <class I>
  static constexpr float unit = 1.f;
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::table_pairs(x, table, out, I{});
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    float top = 0;
    for (int64_t i = 0; i < count; ++i)
      top = __builtin_fabsf(v[i]) > top ? __builtin_fabsf(v[i]) : top;
    const float scale = widen(narrow(top / 6.f)), inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) {
      int best = 8;
      for (int c = 0; c < 16; ++c)
        if (__builtin_fabsf(widen(table[c]) - v[i] * inv) <
            __builtin_fabsf(widen(table[best]) - v[i] * inv))
          best = c;
      code[i] = uint16_t(best);
    }
    return scale;
  }
  KT_OP uint32_t dword(const uint16_t* c) {
    const uint32_t low = c[0] | uint32_t(c[2]) << 8 | uint32_t(c[1]) << 16 | uint32_t(c[3]) << 24,
                   high = c[4] | uint32_t(c[6]) << 8 | uint32_t(c[5]) << 16 | uint32_t(c[7]) << 24;
    return low | high << 4;
  }
};
}  // namespace
}  // namespace kt
