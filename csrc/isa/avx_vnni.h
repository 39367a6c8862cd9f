// flags: -mavx2 -mfma -mf16c -mavxvnni
// cpu: avx2 fma avx_vnni
// vpdpbusd on ymm in its VEX encoding, for the int8 domain: client CPUs since Alder Lake, which
// have no AVX-512. Everything else is avx2's.
#pragma once
#include "isa/avx2.h"

namespace kt {
namespace {
struct Isa_avx_vnni : Isa_avx2 {
  static constexpr const char* name = "avx_vnni";
  static constexpr int mr8 = 6;  // 6 x 2 sums + 2 weights + 1 broadcast = 15 of 16 registers
  using Quad = Lanes<8>::Quad;
  KT_OP Quad quad(const int8_t* a) { return Lanes<8>::quad(a); }
  KT_OP void quads(Quad* q, const int8_t* a) { Lanes<8>::quads(q, a); }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    return (i32)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, dword_at(q->v));
  }
  static constexpr bool signed_bytes = true;
  static constexpr bool int16_pays = true;
  KT_OP i32 idot_signed(i32 acc, u32 w, const Quad* q) {
    return (i32)_mm256_dpbusd_avx_epi32((__m256i)acc, dword_at(q->v), (__m256i)w);
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) { return idot(acc, w, q); }
};
}  // namespace
}  // namespace kt
