// flags: -mavx2 -mfma -mf16c
// cpu: avx2 fma
// 8 fp32 lanes; a panel is two ymm.
#pragma once
#include <immintrin.h>

#include "lanes.h"

namespace kt {
namespace {
struct Isa_avx2 : Lanes<8> {
  static constexpr const char* name = "avx2";
  static constexpr int mr =
      6;  // 6 x 2 accumulators + 2 weights + 1 broadcast = 15 of 16 registers (one panel)
  static constexpr int few = 4;

  KT_OP f32 fma(f32 a, f32 b, f32 c) {
    return (f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  KT_OP f32 load_bf16(const bf16* p) {
    return (f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
  }
  KT_OP void store_a(A* p, const bf16* src) { *(f32*)p = load_bf16(src); }

  // 16 bf16 table entries as two byte planes, each looked up with one in-lane byte shuffle.
  KT_OP u32 lut16(const bf16* t, u32 idx) {
    const __m128i even = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i odd = _mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i a = _mm_loadu_si128((const __m128i*)t), b = _mm_loadu_si128((const __m128i*)t + 1);
    __m256i low = _mm256_broadcastsi128_si256(
        _mm_unpacklo_epi64(_mm_shuffle_epi8(a, even), _mm_shuffle_epi8(b, even)));
    __m256i high = _mm256_broadcastsi128_si256(
        _mm_unpacklo_epi64(_mm_shuffle_epi8(a, odd), _mm_shuffle_epi8(b, odd)));
    __m256i z = _mm256_or_si256((__m256i)idx, _mm256_set1_epi16((short)0x8000));  // odd bytes -> 0
    return (u32)_mm256_or_si256(_mm256_shuffle_epi8(low, z),
                                _mm256_slli_epi16(_mm256_shuffle_epi8(high, z), 8));
  }
  KT_OP void lut4(const bf16* t, u32 x, u32 (&out)[4]) {
    const u32 m = u32{} + 0x000f000fu;
    out[0] = lut16(t, x & m);
    out[1] = lut16(t, x >> 8 & m);
    out[2] = lut16(t, x >> 4 & m);
    out[3] = lut16(t, x >> 12 & m);
  }
};
}  // namespace
}  // namespace kt
