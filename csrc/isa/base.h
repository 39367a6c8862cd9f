// Generic vectors: what an ISA file inherits, and all that the scalar tier needs.
//
// Lanes<N> is a policy over N fp32 lanes written with GCC vector extensions. It is the fp32 way of
// multiplying bf16 pairs: operand A is fp32 row-major, a B vector holds the low and high halves of
// a line of pairs as fp32, dot() is two multiply-adds in ascending k. Tiers with bf16 dot products
// replace A, B, line(), dot() and its steps.
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
    typedef int16_t i16 __attribute__((vector_size(N * 2), aligned(2), may_alias));  \
    typedef int8_t i8 __attribute__((vector_size(N), aligned(1), may_alias));        \
    typedef uint8_t u8 __attribute__((vector_size(N), aligned(1), may_alias));       \
  };
KT_VECTORS(4)
KT_VECTORS(8)
KT_VECTORS(16)
#undef KT_VECTORS

// kSwap[s][i] = i ^ 2^s: a table, since gcc builds such vectors lane by lane.
struct SwapLanes {
  int32_t at[4][16];
  constexpr SwapLanes() : at() {
    for (int s = 0; s < 4; ++s)
      for (int i = 0; i < 16; ++i) at[s][i] = i ^ 1 << s;
  }
  constexpr const int32_t* operator[](int s) const { return at[s]; }
};
alignas(64) constexpr SwapLanes kSwap;

// bf16 of the codes of fp8 e4m3fn (without NaN).
struct Fp8Values {
  alignas(64) bf16 at[256];
  constexpr Fp8Values() : at() {
    for (int code = 0; code < 128; ++code) {
      int e = code >> 3, m = code & 7;
      if (!e && m) {  // m / 8 of the least exponent
        for (e = 1; m < 8; --e) m *= 2;
        m -= 8;
      }
      at[code] = code ? bf16((e + 120) << 7 | m << 4) : bf16(0);
      at[code + 128] = bf16(at[code] | 0x8000);
    }
  }
};
alignas(64) constexpr Fp8Values kFp8Values;

template <int N>
struct Lanes {
  static constexpr int lanes = N;
  static constexpr const char* slow_on = "";  // CPU vendor on which the tier before is faster
  static constexpr int registers = N == 16 ? 32 : 16;  // of this width
  static constexpr bool fused = false;                 // fma() rounds once
  static constexpr bool signed_bytes = false;          // idot_signed() is as fast as idot()
  static constexpr bool int16_pays = false;            // two idot() are faster than madd() of 4 k
  static constexpr bool matrix_tiles = false;          // matmul() and matmul8() exist
  using f32 = typename Vectors<N>::f32;
  using u32 = typename Vectors<N>::u32;
  using i32 = typename Vectors<N>::i32;
  using u64 = typename Vectors<N>::u64;
  using i16 = typename Vectors<N>::i16;
  using i8 = typename Vectors<N>::i8;
  using u8 = typename Vectors<N>::u8;

  using A = float;
  struct B {
    f32 lo, hi;
  };

  // Lane by lane: `f32{} + x` is a broadcast only after an addition, since 0 + -0 is not -0.
  KT_OP f32 splat(float x) {
    f32 r;
    for (int i = 0; i < N; ++i) r[i] = x;
    return r;
  }
  // op over all lanes, halving the distance: for op that may take them in any order.
  template <class V>
  KT_OP auto over_lanes(V v, auto op) {
    for (int s = 3; s >= 0; --s)
      if (1 << s < N) v = op(v, __builtin_shuffle(v, *(const i32*)kSwap[s]));
    return v[0];
  }
  KT_OP f32 fma(f32 a, f32 b, f32 c) { return a * b + c; }
  KT_OP f32 load_bf16(const bf16* p) {
    f32 r;
    for (int i = 0; i < N; ++i) r[i] = widen(p[i]);
    return r;
  }
  // Past the caches, where the tier can: lines that are written whole and not read soon need not be
  // read first. p is a multiple of the vector's size.
  KT_OP void stream(float* p, f32 v) { *(f32*)p = v; }
  KT_OP void settle() {}
  KT_OP f32 load_bytes(const uint8_t* p) {
    return __builtin_convertvector(__builtin_convertvector(*(const u8*)p, i32), f32);
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

  // -- decoding a line of codes: whole bf16 pairs as B vectors (order of k: panel.h) --------------
  // A tier may decode codes times a power of two; what undoes it goes into the scales, exactly.
  static constexpr float int8_unit = 1.f, int4_unit = 1.f, fp8_unit = 1.f;
  KT_OP B line(u32 pair) { return {lo(pair), hi(pair)}; }
  KT_OP B zip(f32 lo, f32 hi) { return {lo, hi}; }                       // values of bf16
  KT_OP u32 pair_of(const B& b) { return (u32)b.lo >> 16 | (u32)b.hi; }  // exact codes only
  KT_OP f32 lo_of(const B& b) { return b.lo; }
  KT_OP f32 hi_of(const B& b) { return b.hi; }

  KT_OP f32 top_byte(u32 x) { return __builtin_convertvector((i32)x >> 24, f32); }
  KT_OP void int8_pairs(u32 x, B (&out)[2], auto) {
    out[0] = {top_byte(x << 24), top_byte(x << 8)};
    out[1] = {top_byte(x << 16), top_byte(x)};
  }
  // The same where there may be codes of -128, which int8_pairs() need not take.
  KT_OP void byte_pairs(u32 x, auto& out, auto isa) { decltype(isa)::int8_pairs(x, out, isa); }
  // Nibbles stored + 8: flipping the top bit of each makes them two's complement.
  KT_OP f32 top_nibble(u32 x) { return __builtin_convertvector((i32)x >> 28, f32); }
  KT_OP void int4_pairs(u32 x, const bf16*, B (&out)[4], auto) {
    x ^= 0x88888888u;
    out[0] = {top_nibble(x << 28), top_nibble(x << 12)};
    out[1] = {top_nibble(x << 20), top_nibble(x << 4)};
    out[2] = {top_nibble(x << 24), top_nibble(x << 8)};
    out[3] = {top_nibble(x << 16), top_nibble(x)};
  }

  KT_OP void fp8_pairs(u32 x, B (&out)[2], auto isa) {
    for (int t = 0; t < 2; ++t, x >>= 8) {
      u32 pair;
      for (int i = 0; i < N; ++i)
        pair[i] = kFp8Values.at[x[i] & 255] | uint32_t(kFp8Values.at[x[i] >> 16 & 255]) << 16;
      out[t] = decltype(isa)::line(pair);
    }
  }
  // Bytes below 16 as indices into a table of 16 bytes.
  KT_OP u32 table_bytes(u32 x, const uint8_t* table) {
    u32 out;
    for (int i = 0; i < N; ++i)
      out[i] = table[x[i] & 15] | uint32_t(table[x[i] >> 8 & 15]) << 8 |
               uint32_t(table[x[i] >> 16 & 15]) << 16 | uint32_t(table[x[i] >> 24 & 15]) << 24;
    return out;
  }

  // Nibbles as indices into a table of 16 values of bf16 (which stands there twice).
  KT_OP void table_pairs(u32 x, const bf16* table, B (&out)[4], auto isa) {
    constexpr int shift[4] = {0, 8, 4, 12};
    for (int t = 0; t < 4; ++t) {
      u32 pair;
      for (int i = 0; i < N; ++i) {
        const uint32_t at = x[i] >> shift[t];
        pair[i] = table[at & 15] | uint32_t(table[at >> 16 & 15]) << 16;
      }
      out[t] = decltype(isa)::line(pair);
    }
  }

  // One pair takes `steps` multiply-adds; dot() does them all.
  static constexpr int steps = 2;
  using Operand = f32;
  KT_OP Operand operand(const B& b, int step) { return step ? b.hi : b.lo; }
  KT_OP f32 madd(f32 c, const A* a, const Operand& w, int step, auto isa) {
    using I = decltype(isa);
    return I::fma(I::splat(a[step]), w, c);
  }
  KT_OP f32 dot(f32 c, const A* a, const B& b, auto isa) {
    using I = decltype(isa);
    return I::madd(I::madd(c, a, b.lo, 0, isa), a, b.hi, 1, isa);
  }

  // -- int8 domain --------------------------------------------------------------------------------
  // Four codes of a row as `Quad`, four unsigned weight bytes (code + bias) per lane as u32:
  // idot adds the exact integer products. Here: 32-bit multiplies, any CPU.
  struct Quad {
    int8_t v[4];  // order of the weight bytes: k0 k2 k1 k3
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[2], a[1], a[3]}}; }
  // Bytes k0 k1 k2 k3 of every dword in the order k0 k2 k1 k3, or back.
  KT_OP u32 swap_middle(u32 x) {
    return (x & 0xff0000ffu) | (x >> 8 & 0xff00u) | (x << 8 & 0xff0000u);
  }
  // Every four dwords with bytes k0 k2 k1 k3 of rows n0 .. n3 as dwords k0 .. k3 with bytes n0 n2
  // n1 n3.
  KT_OP u32 turn_bytes(u32 x) {
    u32 out = {};
    for (int i = 0; i < N; ++i)
      for (int b = 0; b < 4; ++b) {
        const int of[4] = {0, 2, 1, 3};
        out[i] |= (x[i / 4 * 4 + of[b]] >> 8 * of[i % 4] & 0xff) << 8 * b;
      }
    return out;
  }
  // N quads from 4 N codes.
  KT_OP void quads(Quad* q, const int8_t* a) { *(u32*)q = swap_middle(*(const u32*)a); }
  // round(v[k] * f[k]) = 256 high + low of 64 values, less than 2^15 in size. Four values of every
  // 16 go together: value 16 t + 4 j + i to 16 j + 4 t + i.
  KT_OP void split(const float* v, const float* f, int8_t* high, int8_t* low, auto) {
    for (int k = 0; k < 64; ++k) {
      const float sum = v[k] * f[k] + kRoundMagic;
      int32_t bits;
      __builtin_memcpy(&bits, &sum, 4);
      const int16_t x = int16_t(bits);
      const int at = k % 16 / 4 * 16 + k / 16 * 4 + k % 4;
      low[at] = int8_t(x), high[at] = int8_t(int16_t(x + 128) >> 8);
    }
  }
  KT_OP i32 idot(i32 acc, u32 w, const Quad* q) {
    for (int i = 0; i < 4; ++i) acc += (i32)(w >> (8 * i) & 0xff) * int32_t(q->v[i]);
    return acc;
  }
  // The same for bytes of at most 31: products of two fit 16 bits.
  KT_OP i32 idot_small(i32 acc, u32 w, const auto* q, auto isa) {
    return decltype(isa)::idot(acc, w, q);
  }
  KT_OP f32 to_float(i32 x) { return __builtin_convertvector(x, f32); }
};

// What tiers with byte shuffles, but without dot products of bf16 or bytes, share.
//
// Codes to fp32: a byte shuffle puts the code at the top of its dword, with zeros below, and the
// conversion of that integer is the code times 2^24 (2^28 for a nibble): two instructions, where
// shifting down first takes three, all on the two ports that also multiply. The tier gives
// byte_on_top<N>(x), byte N of every dword so converted.
// int8 domain: bytes widen to 16 bits, where products and their pair sums are exact (255 * 127 * 2
// needs 17 bits, vpmaddwd has 32; vpmaddubsw would saturate); bytes of at most 31 fit vpmaddubsw.
template <int N>
struct ByteLanes : Lanes<N> {
  using typename Lanes<N>::u32;
  using typename Lanes<N>::B;
  static constexpr float int8_unit = 0x1p-24f, int4_unit = 0x1p-28f;
  KT_OP void int8_pairs(u32 x, B (&out)[2], auto isa) {
    using I = decltype(isa);
    out[0] = {I::template byte_on_top<0>(x), I::template byte_on_top<2>(x)};
    out[1] = {I::template byte_on_top<1>(x), I::top_byte(x)};
  }
  KT_OP void int4_pairs(u32 x, const bf16*, B (&out)[4], auto isa) {
    using I = decltype(isa);
    x ^= 0x88888888u;  // two's complement nibbles
    const u32 half[2] = {x << 4 & 0xf0f0f0f0u, x & 0xf0f0f0f0u};
    for (int h = 0; h < 2; ++h) {
      out[2 * h] = {I::template byte_on_top<0>(half[h]), I::template byte_on_top<2>(half[h])};
      out[2 * h + 1] = {I::template byte_on_top<1>(half[h]), I::top_byte(half[h])};
    }
  }

  struct Quad {
    int16_t v[4];  // k0 k1 | k2 k3
    int8_t c[4];   // k0 k2 k1 k3, the order of the weight bytes
  };
  KT_OP Quad quad(const int8_t* a) { return {{a[0], a[1], a[2], a[3]}, {a[0], a[2], a[1], a[3]}}; }
  KT_OP void quads(Quad* q, const int8_t* a) {
    for (int i = 0; i < N; ++i) q[i] = quad(a + 4 * i);
  }
};

}  // namespace
}  // namespace kt
