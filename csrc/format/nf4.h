// bits: 4
// NF4 of bitsandbytes (QLoRA): 16 quantiles of a normal distribution, fp32 scale per 64 values, the
// largest of them. The quantiles are no bf16 numbers: as code x scale with codes in bf16 they are
// off by up to 0.2 %. A quantile is stored as itself x 1.437 and the scale divided by that, which
// of all such numbers loses least: 0.03 % of the largest value (root of the mean square), a
// hundredth of what the 4 bits lose. bitsandbytes, which rounds every product to bf16, loses twice
// as much.
#pragma once
#include "contracts.h"

namespace kt {
namespace {
struct Nf4Table {
  static constexpr float stretch = 1.437006f;
  alignas(64) bf16 at[32];  // twice
  constexpr Nf4Table() : at() {
    constexpr float quantile[16] = {-1.f,         -0.69619280f, -0.52507305f, -0.39491749f,
                                    -0.28444138f, -0.18477343f, -0.09105004f, 0.f,
                                    0.07958030f,  0.16093020f,  0.24611230f,  0.33791524f,
                                    0.44070983f,  0.56261700f,  0.72295684f,  1.f};
    for (int i = 0; i < 32; ++i) {
      const auto u = __builtin_bit_cast(uint32_t, quantile[i % 16] * stretch);
      at[i] = bf16((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
  }
};
alignas(64) constexpr Nf4Table kNf4;

struct Format_nf4 {
  static constexpr const char* name = "nf4";
  static constexpr int bits = 4;
  static constexpr bool scaled = true;
  using Scale = float;
  static constexpr int pairs = 4;
  static constexpr int groups[] = {64, 128}, default_group = 64;
  static constexpr int quads = 0, bias = 0;
  static constexpr bool raw_bytes = false;
  static constexpr float scale_of_code = 1.f / Nf4Table::stretch;

  template <class I>
  static constexpr float unit = 1.f;
  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::table_pairs(x, kNf4.at, out, I{});
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    const float scale = largest_magnitude(v, count) * scale_of_code,
                inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) {
      int best = 7;  // 0
      for (int c = 0; c < 16; ++c)
        if (__builtin_fabsf(widen(kNf4.at[c]) - v[i] * inv) <
            __builtin_fabsf(widen(kNf4.at[best]) - v[i] * inv))
          best = c;
      code[i] = uint16_t(best);
    }
    return scale;
  }
  KT_OP uint32_t dword(const uint16_t* c) { return nibble_dword(c); }
};
}  // namespace
}  // namespace kt
