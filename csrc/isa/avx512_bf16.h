// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mavx512bf16 -mfma
// cpu: avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_vbmi avx512_bf16 fma
// Preferred where vdpbf16ps runs at full rate. On Intel without AMX one takes two cycles (measured
// on Emerald Rapids: 1.4 G/s, against 5.6 G/s of fp32 multiply-adds), so fp32 lanes are twice as
// fast. vdpbf16ps: a bf16 pair per lane and instruction, fp32 accumulation (subnormals count as
// zero). Decodes codes to bf16 by table: byte tables of 128 entries need VBMI (all but Cooper Lake
// have it, which gets avx512_vnni).
#pragma once
#include "isa/avx512_vnni.h"

namespace kt {
namespace {
// The bytes of bf16(0 .. 127): high and low.
struct Bf16Bytes {
  uint8_t high[128], low[128];
  constexpr Bf16Bytes() : high(), low() {
    for (int v = 1; v < 128; ++v) {
      int e = 0;
      while (v >> (e + 1)) ++e;
      int bits = (127 + e) << 7 | ((v << (7 - e)) & 0x7f);
      high[v] = uint8_t(bits >> 8), low[v] = uint8_t(bits & 255);
    }
  }
};
alignas(64) constexpr Bf16Bytes kBf16Bytes;

struct Isa_avx512_bf16 : Isa_avx512_vnni {
  static constexpr bool int16_pays = false;  // bf16 products are as fast
  static constexpr const char* name = "avx512_bf16";
  static constexpr const char* slow_on = "GenuineIntel";
  static constexpr float int8_unit = 1.f, int4_unit = 1.f;
  using A = bf16;
  struct B {
    u32 pair;
  };
  KT_OP void store_a(A* p, const bf16* src) { __builtin_memcpy(p, src, 32); }
  KT_OP A a_of(bf16 x) { return x; }
  KT_OP B line(u32 pair) { return {pair}; }
  KT_OP B zip(f32 lo, f32 hi) { return {(u32)lo >> 16 | (u32)hi}; }
  KT_OP u32 pair_of(const B& b) { return b.pair; }
  KT_OP f32 lo_of(const B& b) { return lo(b.pair); }
  KT_OP f32 hi_of(const B& b) { return hi(b.pair); }

  KT_OP void int8_pairs(u32 x, B (&out)[2], auto) {
    const __m512i h0 = _mm512_load_si512(kBf16Bytes.high),
                  h1 = _mm512_load_si512(kBf16Bytes.high + 64);
    const __m512i l0 = _mm512_load_si512(kBf16Bytes.low),
                  l1 = _mm512_load_si512(kBf16Bytes.low + 64);
    __m512i v = (__m512i)x, mag = _mm512_abs_epi8(v);
    __m512i high = _mm512_permutex2var_epi8(h0, mag, h1),
            low = _mm512_permutex2var_epi8(l0, mag, l1);
    const __m512i sign = _mm512_set1_epi8(char(0x80)), even = _mm512_set1_epi16(0x00ff);
    high = _mm512_ternarylogic_epi32(high, v, sign, 0xf8);  // high | (v & sign)
    out[0].pair = (u32)_mm512_ternarylogic_epi32(_mm512_slli_epi16(high, 8), low, even, 0xf8);
    out[1].pair = (u32)_mm512_ternarylogic_epi32(even, high, _mm512_srli_epi16(low, 8), 0xae);
  }
  // The table gives -0 for -128: what is missing are the other bits of its high byte.
  KT_OP void byte_pairs(u32 x, B (&out)[2], auto isa) {
    int8_pairs(x, out, isa);
    const __mmask64 least = _mm512_cmpeq_epi8_mask((__m512i)x, _mm512_set1_epi8(char(0x80)));
    const u32 bits = (u32)_mm512_maskz_mov_epi8(least, _mm512_set1_epi8(0x43));
    out[0].pair |= bits << 8 & 0xff00ff00u;
    out[1].pair |= bits & 0xff00ff00u;
  }
  KT_OP void int4_pairs(u32 x, const bf16* table, B (&out)[4], auto isa) {
    table_pairs(x, table, out, isa);
  }
  static constexpr int steps = 1;
  using Operand = B;
  KT_OP Operand operand(const B& b, int) { return b; }
  KT_OP f32 madd(f32 c, const A* a, const B& b, int, auto isa) { return dot(c, a, b, isa); }
  KT_OP f32 dot(f32 c, const A* a, const B& b, auto) {
    uint32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return (f32)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)pair),
                                 (__m512bh)b.pair);
  }
};
}  // namespace
}  // namespace kt
