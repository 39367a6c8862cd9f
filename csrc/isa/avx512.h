// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
// cpu: avx512f avx512bw avx512vl avx512dq fma
// 16 fp32 lanes; a panel is one zmm.
#pragma once
#include <immintrin.h>

#include "lanes.h"

namespace kt {
namespace {
struct Isa_avx512 : Lanes<16> {
  static constexpr const char* name = "avx512";
  static constexpr int mr = 12;  // 12 x 2 accumulators + 2 weights + broadcasts: fits 32 registers
  static constexpr int few = 4;

  KT_OP f32 fma(f32 a, f32 b, f32 c) {
    return (f32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  KT_OP f32 load_bf16(const bf16* p) {
    return (f32)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
  }
  KT_OP void store_bf16(bf16* p, f32 v) {
    u32 u = (u32)v;
    __m512i r = (__m512i)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    r = _mm512_mask_mov_epi32(r, nan, (__m512i)(0x7fc0u | (u >> 16 & 0x8000)));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
  }
  KT_OP void store_a(A* p, const bf16* src) { *(f32*)p = load_bf16(src); }
  KT_OP void lut4(const bf16* table, u32 x, u32 (&out)[4]) {
    // vpermw reads the low 5 bits of an index; the table is held twice, so bit 4 does not matter
    __m512i t = _mm512_loadu_si512(table);
    out[0] = (u32)_mm512_permutexvar_epi16((__m512i)x, t);
    out[1] = (u32)_mm512_permutexvar_epi16((__m512i)(x >> 8), t);
    out[2] = (u32)_mm512_permutexvar_epi16((__m512i)(x >> 4), t);
    out[3] = (u32)_mm512_permutexvar_epi16((__m512i)(x >> 12), t);
  }
};
}  // namespace
}  // namespace kt
