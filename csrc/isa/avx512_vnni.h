// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma
// cpu: avx512f avx512bw avx512vl avx512dq avx512_vnni fma
// vpdpbusd for the int8 domain: four unsigned x signed bytes per lane, exact 32-bit sums.
#pragma once
#include "isa/avx512.h"

namespace kt {
namespace {
struct Isa_avx512_vnni : Isa_avx512 {
  static constexpr const char* name = "avx512_vnni";
  static constexpr int mr8 =
      7;  // 7 x 2 sums and 7 x 2 of C: folding a group costs no memory access
  using Quad = Lanes<16>::Quad;
  KT_OP Quad quad(const int8_t* a) { return Lanes<16>::quad(a); }
  KT_OP void quads(Quad* q, const int8_t* a) { *(u32*)q = swap_middle(*(const u32*)a); }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    return (i32)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, dword_at(q->v));
  }
  static constexpr bool signed_bytes = true;
  static constexpr bool int16_pays = true;
  KT_OP i32 idot_signed(i32 acc, u32 w, const Quad* q) {
    return (i32)_mm512_dpbusd_epi32((__m512i)acc, dword_at(q->v), (__m512i)w);
  }
  KT_OP i32 idot_small(i32 acc, u32 w, const Quad* q, auto) { return idot(acc, w, q); }
};
}  // namespace
}  // namespace kt
