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
  static constexpr int mr8 = 12;
  static constexpr int few = 4;

  KT_OP f32 splat(float x) { return (f32)_mm512_set1_ps(x); }
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

  // Codes to fp32 as in avx2.h.
  static constexpr float int8_unit = 0x1p-24f, int4_unit = 0x1p-28f;
  template <int N>
  KT_OP f32 byte_on_top(u32 x) {
    constexpr char z = char(0x80);
    const __m512i control = _mm512_broadcast_i32x4(
        _mm_setr_epi8(z, z, z, N, z, z, z, N + 4, z, z, z, N + 8, z, z, z, N + 12));
    return (f32)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)x, control));
  }
  KT_OP f32 top_byte(u32 x) { return (f32)_mm512_cvtepi32_ps((__m512i)(x & 0xff000000u)); }
  KT_OP void int8_pairs(u32 x, B (&out)[2]) {
    out[0] = {byte_on_top<0>(x), byte_on_top<2>(x)};
    out[1] = {byte_on_top<1>(x), top_byte(x)};
  }
  KT_OP void int4_pairs(u32 x, const bf16*, B (&out)[4]) {
    x ^= 0x88888888u;  // two's complement nibbles
    const u32 high = x & 0xf0f0f0f0u, low = x << 4 & 0xf0f0f0f0u;
    out[0] = {byte_on_top<0>(low), byte_on_top<2>(low)};
    out[1] = {byte_on_top<1>(low), top_byte(low)};
    out[2] = {byte_on_top<0>(high), byte_on_top<2>(high)};
    out[3] = {byte_on_top<1>(high), top_byte(high)};
  }

  // int8 domain without VNNI: see avx2.h.
  struct Quad {
    int16_t v[4];  // k0 k1 | k2 k3
    int8_t c[4];   // k0 k2 k1 k3
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[1], a[2], a[3]}, {a[0], a[2], a[1], a[3]}}; }
  KT_OP void quads(Quad* q, const int8_t* a) {
    for (int i = 0; i < lanes; ++i) q[i] = quad(a + 4 * i);
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
