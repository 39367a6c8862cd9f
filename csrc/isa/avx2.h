// flags: -mavx2 -mfma -mf16c
// cpu: avx2 fma
// 8 fp32 lanes; a panel is two ymm.
#pragma once
#include <immintrin.h>

#include "isa/base.h"

namespace kt {
namespace {
struct Isa_avx2 : ByteLanes<8> {
  static constexpr const char* name = "avx2";
  static constexpr int mr =
      6;  // 6 x 2 accumulators + 2 weights + 1 broadcast = 15 of 16 registers (one panel)
  static constexpr int mr8 = 4;  // 4 x 2 sums, even and odd bytes of 2 weights, 2 broadcasts
  static constexpr int few = 4;
  static constexpr bool fused = true;

  KT_OP f32 splat(float x) { return (f32)_mm256_set1_ps(x); }
  KT_OP f32 fma(f32 a, f32 b, f32 c) {
    return (f32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  // In asm: gcc otherwise also picks the form that overwrites a factor, and then spills one of the
  // tile's 15 registers in every step.
  KT_OP f32 madd(f32 c, const A* a, const Operand& w, int step, auto) {
    asm("vfmadd231ps %1, %2, %0" : "+x"(c) : "x"(w), "x"(splat(a[step])));
    return c;
  }
  // For few rows: a broadcast per product is free (loads have ports of their own). Shared ones,
  // which gcc makes of them otherwise, take the registers, and the sums wait for memory in every
  // step.
  KT_OP f32 dot(f32 c, const A* a, const B& b, auto) {
    f32 x;
    asm("vbroadcastss %3, %1\n\tvfmadd231ps %2, %1, %0" : "+x"(c), "=&x"(x) : "x"(b.lo), "m"(a[0]));
    asm("vbroadcastss %3, %1\n\tvfmadd231ps %2, %1, %0" : "+x"(c), "=&x"(x) : "x"(b.hi), "m"(a[1]));
    return c;
  }
  KT_OP f32 load_bf16(const bf16* p) {
    return (f32)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
  }
  KT_OP void stream(float* p, f32 v) { _mm256_stream_ps(p, (__m256)v); }
  KT_OP void settle() { _mm_sfence(); }
  KT_OP f32 load_bytes(const uint8_t* p) {
    return (f32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadu_si64(p)));
  }
  KT_OP void store_a(A* p, const bf16* src) { *(f32*)p = load_bf16(src); }

  template <int N>
  KT_OP f32 byte_on_top(u32 x) {
    constexpr char z = char(0x80);
    const __m256i control =
        _mm256_setr_epi8(z, z, z, N, z, z, z, N + 4, z, z, z, N + 8, z, z, z, N + 12,  //
                         z, z, z, N, z, z, z, N + 4, z, z, z, N + 8, z, z, z, N + 12);
    return (f32)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)x, control));
  }
  KT_OP f32 top_byte(u32 x) { return __builtin_convertvector((i32)(x & 0xff000000u), f32); }
  // The table's low and high bytes, each looked up for two values of every dword.
  KT_OP void table_pairs(u32 x, const bf16* table, B (&out)[4], auto) {
    const __m128i t0 = _mm_loadu_si128((const __m128i*)table),
                  t1 = _mm_loadu_si128((const __m128i*)(table + 8)), byte = _mm_set1_epi16(255);
    const __m256i low = _mm256_broadcastsi128_si256(
                      _mm_packus_epi16(_mm_and_si128(t0, byte), _mm_and_si128(t1, byte))),
                  high = _mm256_broadcastsi128_si256(
                      _mm_packus_epi16(_mm_srli_epi16(t0, 8), _mm_srli_epi16(t1, 8)));
    for (int h = 0; h < 2; ++h, x >>= 4) {
      const __m256i at = (__m256i)(x & 0x0f0f0f0fu);
      const u32 lows = (u32)_mm256_shuffle_epi8(low, at),
                highs = (u32)_mm256_shuffle_epi8(high, at);
      out[2 * h] = line((lows & 0x00ff00ffu) | (highs & 0x00ff00ffu) << 8);
      out[2 * h + 1] = line((lows >> 8 & 0x00ff00ffu) | (highs & 0xff00ff00u));
    }
  }
  // By way of fp16, whose bits are those of fp8 moved up, 2^-8 times as large: the conversion also
  // takes subnormal numbers, at no cost. Values of the low and of the high halves of dwords are
  // first put together.
  static constexpr float fp8_unit = 256.f;
  KT_OP void fp8_pairs(u32 x, B (&out)[2], auto) {
    const __m256i apart = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13,  //
                                                                    2, 3, 6, 7, 10, 11, 14, 15));
    const u32 half[2] = {(x & 0x007f007fu) << 7 | (x & 0x00800080u) << 8,
                         (x & 0x7f007f00u) >> 1 | (x & 0x80008000u)};
    for (int t = 0; t < 2; ++t) {
      const __m256i v =
          _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)half[t], apart), 0xd8);
      out[t] = {(f32)_mm256_cvtph_ps(_mm256_castsi256_si128(v)),
                (f32)_mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
    }
  }
  KT_OP u32 table_bytes(u32 x, const uint8_t* table) {
    const __m128i t = _mm_loadu_si128((const __m128i*)table);
    return (u32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)x);
  }
  KT_OP __m256i dword_at(const void* p) {
    int x;
    __builtin_memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    __m256i even = (__m256i)(w & 0x00ff00ffu), odd = _mm256_srli_epi16((__m256i)w, 8);
    acc += (i32)_mm256_madd_epi16(even, dword_at(q->v));
    return acc + (i32)_mm256_madd_epi16(odd, dword_at(q->v + 2));
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) {  // 31 * 127 * 2 fits 16 bits
    const __m256i sums = _mm256_maddubs_epi16((__m256i)w, dword_at(q->c));
    return acc + (i32)_mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }
};
}  // namespace
}  // namespace kt
