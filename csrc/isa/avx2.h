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

  // int8 domain without VNNI: bytes widen to 16 bits, where products and their pair sums are exact
  // (255 * 127 * 2 needs 17 bits, vpmaddwd has 32; vpmaddubsw would saturate).
  struct Quad {
    int16_t v[4];  // k0 k1 | k2 k3
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[1], a[2], a[3]}}; }
  KT_OP __m256i pair_at(const int16_t* p) {
    int x;
    __builtin_memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    __m256i even = (__m256i)(w & 0x00ff00ffu), odd = (__m256i)(w >> 8 & 0x00ff00ffu);
    acc += (i32)_mm256_madd_epi16(even, pair_at(q->v));
    return acc + (i32)_mm256_madd_epi16(odd, pair_at(q->v + 2));
  }
};
}  // namespace
}  // namespace kt
