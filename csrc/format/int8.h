// bits: 8
// Signed 8-bit codes in [-127, 127], symmetric, one bf16 scale per group and channel.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Format_int8 {
  static constexpr const char* name = "int8";
  static constexpr int bits = 8;
  static constexpr bool scaled = true;
  static constexpr int pairs = 2;
  static constexpr int groups[] = {32, 64, 128, 0}, default_group = 128;
  static constexpr int quads = 1, bias = 128;
  static constexpr bool raw_bytes = true;

  template <class I>
  static constexpr float unit = I::int8_unit;  // decode() gives codes / unit
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::int8_pairs(x, out, I{});
  }
  template <class I>
  KT_OP void bytes(typename I::u32 x, typename I::u32 (&out)[quads]) {
    out[0] = x ^ 0x80808080u;
  }
  KT_OP bool valid(uint16_t code) { return code != 0x80; }  // -128
  // The scale is rounded to bf16 first, then codes are chosen for the scale that is stored.
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    float scale = widen(narrow(largest_magnitude(v, count) / 127.f));
    float inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) {
      float q = __builtin_rintf(v[i] * inv);
      q = q > 127.f ? 127.f : q < -127.f ? -127.f : q == q ? q : 0.f;  // NaN: 0 * inf, or refused
      code[i] = uint16_t(int8_t(int(q)) & 0xff);
    }
    return scale;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return byte_dword(c); }
};
}  // namespace
}  // namespace kt
