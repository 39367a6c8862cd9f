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
  struct Quad {
    int8_t v[4];  // order of the weight bytes: k0 k2 k1 k3
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[2], a[1], a[3]}}; }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    int x;
    __builtin_memcpy(&x, q->v, 4);
    return (i32)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(x));
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) { return idot(acc, w, q); }
};
}  // namespace
}  // namespace kt
