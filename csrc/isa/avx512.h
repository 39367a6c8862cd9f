// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
// cpu: avx512f avx512bw avx512vl avx512dq fma
// 16 fp32 lanes; a panel is one zmm.
#pragma once
#include <immintrin.h>

#include "isa/base.h"

namespace kt {
namespace {
struct Isa_avx512 : ByteLanes<16> {
  static constexpr const char* name = "avx512";
  static constexpr int mr = 12;  // 12 x 2 accumulators + 2 weights + broadcasts: fits 32 registers
  static constexpr int mr8 = 12;
  static constexpr int few = 4;
  static constexpr bool fused = true;

  KT_OP f32 splat(float x) { return (f32)_mm512_set1_ps(x); }
  KT_OP f32 fma(f32 a, f32 b, f32 c) {
    return (f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  // In asm: with another form than this one gcc keeps one of the tile's 24 sums in memory.
  KT_OP f32 madd(f32 c, const A* a, const Operand& w, int step, auto) {
    asm("vfmadd231ps %1, %2, %0" : "+v"(c) : "v"(w), "v"(splat(a[step])));
    return c;
  }
  KT_OP f32 load_bf16(const bf16* p) {
    return (f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
  }
  KT_OP void stream(float* p, f32 v) { _mm512_stream_ps(p, (__m512)v); }
  KT_OP void settle() { _mm_sfence(); }
  KT_OP f32 load_bytes(const uint8_t* p) {
    return (f32)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  KT_OP void store_bf16(bf16* p, f32 v) {
    u32 u = (u32)v;
    __m512i r = (__m512i)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, (__m512i)(0x7fc0u | (u >> 16 & 0x8000)));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
  }
  KT_OP u32 swap_middle(u32 x) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    return (u32)_mm512_shuffle_epi8((__m512i)x, order);
  }
  // Packing works within 128 bits, which makes the order of split().
  KT_OP void split(const float* v, const float* f, int8_t* high, int8_t* low, auto) {
    __m512i x[4];
    for (int t = 0; t < 4; ++t)
      x[t] = _mm512_cvtps_epi32(
          _mm512_mul_ps(_mm512_loadu_ps(v + 16 * t), _mm512_loadu_ps(f + 16 * t)));
    const __m512i a = _mm512_packs_epi32(x[0], x[1]), b = _mm512_packs_epi32(x[2], x[3]),
                  byte = _mm512_set1_epi16(255), half = _mm512_set1_epi16(128);
    _mm512_storeu_si512(low,
                        _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
    _mm512_storeu_si512(high, _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                                 _mm512_srai_epi16(_mm512_add_epi16(b, half), 8)));
  }
  KT_OP u32 turn_bytes(u32 x) {
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15));
    return (u32)_mm512_shuffle_epi8((__m512i)x, order);
  }
  KT_OP void store_a(A* p, const bf16* src) { *(f32*)p = load_bf16(src); }

  template <int N>
  KT_OP f32 byte_on_top(u32 x) {
    constexpr char z = char(0x80);
    const __m512i control = _mm512_broadcast_i32x4(
        _mm_setr_epi8(z, z, z, N, z, z, z, N + 4, z, z, z, N + 8, z, z, z, N + 12));
    return (f32)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)x, control));
  }
  KT_OP f32 top_byte(u32 x) { return (f32)_mm512_cvtepi32_ps((__m512i)(x & 0xff000000u)); }
  KT_OP void table_pairs(u32 x, const bf16* table, auto (&out)[4], auto isa) {
    using I = decltype(isa);
    // vpermw reads the low 5 bits of an index; the table is held twice, so bit 4 does not matter
    const __m512i t = _mm512_loadu_si512(table);
    const auto look = [&](u32 at) __attribute__((always_inline)) {
      return I::line((u32)_mm512_permutexvar_epi16((__m512i)at, t));
    };
    out[0] = look(x), out[1] = look(x >> 8), out[2] = look(x >> 4), out[3] = look(x >> 12);
  }
  // The bits of fp8 moved to those of bf16, exponents + 120; subnormal numbers, below 8, by table.
  KT_OP void fp8_pairs(u32 x, auto (&out)[2], auto isa) {
    using I = decltype(isa);
    const __m512i small = _mm512_load_si512(kFp8Values.at), eight = _mm512_set1_epi16(8);
    const u32 sign[2] = {x << 8 & 0x80008000u, x & 0x80008000u};
    for (int t = 0; t < 2; ++t, x >>= 8) {
      const __m512i size = (__m512i)(x & 0x007f007fu);
      __m512i v = (__m512i)(((u32)size << 4) + 0x3c003c00u);
      v = _mm512_mask_permutexvar_epi16(v, _mm512_cmplt_epu16_mask(size, eight), size, small);
      out[t] = I::line((u32)v | sign[t]);
    }
  }
  KT_OP u32 table_bytes(u32 x, const uint8_t* table) {
    const __m128i t = _mm_loadu_si128((const __m128i*)table);
    return (u32)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)x);
  }
  KT_OP __m512i dword_at(const void* p) {
    int x;
    __builtin_memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    __m512i even = (__m512i)(w & 0x00ff00ffu), odd = _mm512_srli_epi16((__m512i)w, 8);
    acc += (i32)_mm512_madd_epi16(even, dword_at(q->v));
    return acc + (i32)_mm512_madd_epi16(odd, dword_at(q->v + 2));
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) {
    const __m512i sums = _mm512_maddubs_epi16((__m512i)w, dword_at(q->c));
    return acc + (i32)_mm512_madd_epi16(sums, _mm512_set1_epi16(1));
  }
};
}  // namespace
}  // namespace kt
