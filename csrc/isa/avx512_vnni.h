// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma
// cpu: avx512f avx512bw avx512vl avx512dq avx512_vnni fma
// vpdpbusd for the int8 domain: four unsigned x signed bytes per lane, exact 32-bit sums.
#pragma once
#include "isa/avx512.h"

namespace kt {
namespace {
struct Isa_avx512_vnni : Isa_avx512 {
  static constexpr const char* name = "avx512_vnni";
  struct Quad {
    int8_t v[4];  // order of the weight bytes: k0 k2 k1 k3
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[2], a[1], a[3]}}; }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    int x;
    __builtin_memcpy(&x, q->v, 4);
    return (i32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) { return idot(acc, w, q); }
};
}  // namespace
}  // namespace kt
