// bits: 4
// 4-bit codes in [0, 15] with zero points in [0, 16] (GPTQ, AWQ): value = (code - zero) x scale,
// one fp32 scale and one zero point per group and channel. 16 - zero is what is stored: code + (16
// - zero) lies in [0, 31], so one addition folds the zero points of four codes without a carry.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Format_uint4 {
  static constexpr const char* name = "uint4";
  static constexpr int bits = 4;
  static constexpr bool scaled = true;
  using Scale = float;
  static constexpr bool zeros = true;
  static constexpr int pairs = 4;
  static constexpr int groups[] = {32, 64, 128}, default_group = 128;
  static constexpr int quads = 2, bias = 16;
  static constexpr bool raw_bytes = false;

  template <class I>
  static constexpr float unit = I::int8_unit;  // decode() gives code - zero, / unit
  template <class I>
  KT_OP void bytes(typename I::u32 x, typename I::u32 zero, typename I::u32 (&out)[quads]) {
    out[0] = (x & 0x0f0f0f0fu) + zero;
    out[1] = (x >> 4 & 0x0f0f0f0fu) + zero;
  }
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::u32 zero, typename I::B (&out)[pairs]) {
    // less 16 in every byte, as two's complement, again without a carry
    zero += 0x70707070u;
    typename I::B low[2], high[2];
    I::int8_pairs(((x & 0x0f0f0f0fu) + zero) ^ 0x80808080u, low, I{});
    I::int8_pairs(((x >> 4 & 0x0f0f0f0fu) + zero) ^ 0x80808080u, high, I{});
    out[0] = low[0], out[1] = low[1], out[2] = high[0], out[3] = high[1];
  }
  KT_OP uint8_t zero_byte(uint8_t zero) { return uint8_t(16 - zero); }
  KT_OP bool valid_zero(uint8_t zero) { return zero <= 16; }
  // From the smallest value to the largest, zero among them.
  KT_OP float encode(const float* v, int64_t count, uint16_t* code, uint8_t& zero) {
    float least = 0, most = 0;
    for (int64_t i = 0; i < count; ++i)
      least = v[i] < least ? v[i] : least, most = v[i] > most ? v[i] : most;
    const float scale = (most - least) / 15.f, inv = scale > 0 ? 1.f / scale : 0.f;
    const float at = __builtin_rintf(-least * inv), middle = at >= 0 && at <= 15.f ? at : 0.f;
    for (int64_t i = 0; i < count; ++i) {
      const float q = __builtin_rintf(v[i] * inv) + middle;
      code[i] = uint16_t(q > 15.f ? 15 : q >= 0 ? int(q) : q == q ? 0 : int(middle));
    }
    zero = zero_byte(uint8_t(middle));
    return scale;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return nibble_dword(c); }
};
}  // namespace
}  // namespace kt
