// bits: 4
// MXFP4 (OCP Microscaling): e2m1 codes (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), a power of two per
// 32 values as scale. Twice a code's value is a whole number, so these are what decode() and
// bytes() give, for scales that are halved where they are stored, exactly.
#pragma once
#include "format/mxfp8.h"

namespace kt {
namespace {
struct Format_mxfp4 {
  static constexpr const char* name = "mxfp4";
  static constexpr int bits = 4;
  static constexpr bool scaled = true;
  static constexpr int pairs = 4;
  static constexpr int groups[] = {32}, default_group = 32;
  static constexpr int quads = 2, bias = 16;
  static constexpr bool raw_bytes = false;
  static constexpr float scale_of_code = 0.5f;
  // bf16 of 0, 1, 2, 3, 4, 6, 8, 12 and of their opposites, twice; their bytes, + bias
  alignas(64) static constexpr bf16 table[32] = {
      0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0, 0x4100, 0x4140, 0x0000, 0xBF80, 0xC000,
      0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40C0,
      0x4100, 0x4140, 0x0000, 0xBF80, 0xC000, 0xC040, 0xC080, 0xC0C0, 0xC100, 0xC140};
  alignas(16) static constexpr uint8_t biased[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                     16, 15, 14, 13, 12, 10, 8,  4};

  template <class I>
  static constexpr float unit = 1.f;
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::table_pairs(x, table, out, I{});
  }
  template <class I>
  KT_OP void bytes(typename I::u32 x, typename I::u32 (&out)[quads]) {
    out[0] = I::table_bytes(x & 0x0f0f0f0fu, biased);
    out[1] = I::table_bytes(x >> 4 & 0x0f0f0f0fu, biased);
  }
  // The nearest code, ties to the even one; the largest where there is none.
  KT_OP uint16_t round(float v) {
    const float a = __builtin_fabsf(v);
    const int c = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                  (a >= 3.5f) + (a > 5.f);
    return uint16_t(v < 0 ? c | 8 : c);
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    const float scale = power_of_two(largest_magnitude(v, count), 2),
                inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) code[i] = round(v[i] * inv);
    return scale * scale_of_code;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return nibble_dword(c); }
};
}  // namespace
}  // namespace kt
