// Generic vectors: what an ISA file inherits, and all that the scalar tier needs.
//
// Lanes<N> is a policy over N fp32 lanes written with GCC vector extensions. It is the fp32 way of
// multiplying bf16 pairs: operand A is fp32 row-major, a B vector holds the low and high halves of
// a line of pairs as fp32, dot() is two multiply-adds in ascending k. Tiers with bf16 dot products
// replace A, B, line() and dot().
#pragma once
#include "kt.h"

namespace kt {
namespace {

// GCC drops attributes next to a dependent vector_size, so each width is spelled out.
// Unaligned and may_alias: vectors are loaded from any row of any buffer.
template <int N>
struct Vectors;
#define KT_VECTORS(N)                                                                \
  template <>                                                                        \
  struct Vectors<N> {                                                                \
    typedef float f32 __attribute__((vector_size(N * 4), aligned(4), may_alias));    \
    typedef uint32_t u32 __attribute__((vector_size(N * 4), aligned(4), may_alias)); \
    typedef int32_t i32 __attribute__((vector_size(N * 4), aligned(4), may_alias));  \
    typedef uint64_t u64 __attribute__((vector_size(N * 4), aligned(4), may_alias)); \
  };
KT_VECTORS(4)
KT_VECTORS(8)
KT_VECTORS(16)
#undef KT_VECTORS

template <int N>
struct Lanes {
  static constexpr int lanes = N;
  using f32 = typename Vectors<N>::f32;
  using u32 = typename Vectors<N>::u32;
  using i32 = typename Vectors<N>::i32;
  using u64 = typename Vectors<N>::u64;

  using A = float;
  struct B {
    f32 lo, hi;
  };

  KT_OP f32 splat(float x) { return f32{} + x; }
  KT_OP f32 fma(f32 a, f32 b, f32 c) { return a * b + c; }
  KT_OP f32 load_bf16(const bf16* p) {
    f32 r;
    for (int i = 0; i < N; ++i) r[i] = widen(p[i]);
    return r;
  }
  KT_OP void store_bf16(bf16* p, f32 v) {
    u32 u = (u32)v;
    u32 r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    u32 nan = (u32)(v != v);
    r = (r & ~nan) | ((0x7fc0u | (u >> 16 & 0x8000)) & nan);
    for (int i = 0; i < N; ++i) p[i] = bf16(r[i]);
  }
  KT_OP void store_a(A* p, const bf16* src) { *(f32*)p = load_bf16(src); }
  KT_OP A a_of(bf16 x) { return widen(x); }

  // Two fp32 vectors -> one vector of bf16 pairs (lo, hi), round to nearest even; finite input.
  KT_OP u32 round_pair(f32 lo, f32 hi) {
    u32 a = (u32)lo, b = (u32)hi;
    a += 0x7fff + (a >> 16 & 1);
    b += 0x7fff + (b >> 16 & 1);
    return a >> 16 | (b & 0xffff0000u);
  }
  KT_OP f32 lo(u32 pair) { return (f32)(pair << 16); }
  KT_OP f32 hi(u32 pair) { return (f32)(pair & 0xffff0000u); }

  // Bytes -> exact bf16 pairs: even bytes of each dword, then odd bytes (see panel.h).
  KT_OP void int8_pairs(u32 x, u32 (&out)[2]) {
    auto f = [](u32 v) { return (u32) __builtin_convertvector((i32)v >> 24, f32); };
    out[0] = f(x << 24) >> 16 | f(x << 8);  // |code| <= 127: the low 16 bits of the fp32 are zero
    out[1] = f(x << 16) >> 16 | f(x);
  }
  // Nibbles -> bf16 pairs through a 16-entry table held twice (32 entries).
  KT_OP void lut4(const bf16* table, u32 x, u32 (&out)[4]) {
    for (int i = 0; i < N; ++i) {
      uint32_t v = x[i];
      auto pair = [&](int s) {
        return table[v >> s & 15] | uint32_t(table[v >> (s + 16) & 15]) << 16;
      };
      out[0][i] = pair(0), out[1][i] = pair(8), out[2][i] = pair(4), out[3][i] = pair(12);
    }
  }

  KT_OP B line(u32 pair) { return {lo(pair), hi(pair)}; }
  KT_OP f32 dot(f32 c, const A* a, const B& b, auto isa) {
    using I = decltype(isa);
    return I::fma(I::splat(a[1]), b.hi, I::fma(I::splat(a[0]), b.lo, c));
  }
};

}  // namespace
}  // namespace kt
