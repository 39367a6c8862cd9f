// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma
// cpu: avx512f avx512bw avx512vl avx512dq avx512_bf16 fma
// vdpbf16ps: a bf16 pair per lane and instruction, fp32 accumulation (subnormals count as zero).
#pragma once
#include "isa/avx512.h"

namespace kt {
namespace {
struct Isa_avx512_bf16 : Isa_avx512 {
  static constexpr const char* name = "avx512_bf16";
  using A = bf16;
  struct B {
    u32 pair;
  };
  KT_OP void store_a(A* p, const bf16* src) { __builtin_memcpy(p, src, 32); }
  KT_OP A a_of(bf16 x) { return x; }
  KT_OP B line(u32 pair) { return {pair}; }
  KT_OP f32 dot(f32 c, const A* a, const B& b, auto) {
    uint32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return (f32)_mm512_dpbf16_ps((__m512)c, (__m512bh)_mm512_set1_epi32((int)pair),
                                 (__m512bh)b.pair);
  }
};
}  // namespace
}  // namespace kt
