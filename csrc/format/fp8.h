// bits: 8
// fp8 e4m3fn: a sign, 4 bits of exponent, 3 of mantissa, up to 448, without infinities; fp32
// scales. As DeepSeek-V3 publishes it (a scale per 128 x 128 block: here per channel and 128
// values) and per channel. The largest value of a group gets code 448.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Format_fp8 {
  static constexpr const char* name = "fp8";
  static constexpr int bits = 8;
  static constexpr bool scaled = true;
  using Scale = float;
  static constexpr int pairs = 2;
  static constexpr int groups[] = {128, 0}, default_group = 128;
  static constexpr int quads = 0, bias = 0;
  static constexpr bool raw_bytes = false;

  template <class I>
  static constexpr float unit = I::fp8_unit;  // decode() gives codes / unit
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::fp8_pairs(x, out, I{});
  }
  KT_OP bool valid(uint16_t code) { return (code & 0x7f) != 0x7f; }  // NaN
  // The nearest code, ties to even; the largest where there is none.
  KT_OP uint16_t round(float v) {
    const float a = __builtin_fabsf(v);
    const uint16_t sign = v < 0 ? 0x80 : 0;
    if (!(a < 448.f)) return a == a ? sign | 0x7e : 0;
    if (a < 0x1p-6f) return sign | uint16_t(__builtin_rintf(a * 512.f));
    uint32_t u;
    __builtin_memcpy(&u, &a, 4);
    u = (u + 0x7ffff + (u >> 20 & 1)) >> 20;
    return sign | uint16_t(u - (120 << 3));
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    const float scale = largest_magnitude(v, count) / 448.f, inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) code[i] = round(v[i] * inv);
    return scale;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return byte_dword(c); }
};
}  // namespace
}  // namespace kt
