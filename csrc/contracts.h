// The two axes along which kernels grow, as contracts: a new tier is one file in isa/ that
// satisfies `Isa`, a new weight format one file in format/ that satisfies `Format`. gemm/kernel.cpp
// asserts both for every pair, so a file that misses something is refused by name.
//
// Self type. Operations that are built from other operations take a last argument `auto isa`, an
// empty object of the tier itself, and call those through `decltype(isa)`. A base class
// (isa/base.h) thereby uses what a derived tier has overridden, without virtual calls, which cannot
// be inlined, and without a template parameter in every base.
#pragma once
#include <concepts>
#include <type_traits>

#include "gemm/panel.h"

namespace kt {
namespace {

// A tier: vectors of `lanes` fp32 values and what is computed with them. All defaults are in
// isa/base.h (Lanes, ByteLanes); isa/scalar.h is the shortest tier there is.
template <class I>
concept Isa = requires(typename I::f32 f, typename I::u32 u, typename I::i32 i, typename I::B b,
                       typename I::B (&pairs2)[2], typename I::B (&pairs4)[4],
                       typename I::Quad quad, const typename I::A* a, typename I::A* to_a,
                       const bf16* h, bf16* to_h, const float* v, float* to_v, const uint8_t* byte,
                       const int8_t* code, int8_t* to_code, float x, bf16 y, int step) {
  // -- what it is ---------------------------------------------------------------------------------
  { I::name } -> std::convertible_to<const char*>;     // of the file; KT_ISA takes it
  { I::slow_on } -> std::convertible_to<const char*>;  // CPU vendor on which the tier before wins
  requires kPanel % I::lanes == 0;
  requires std::same_as<typename I::A, float> || std::same_as<typename I::A, bf16>;
  requires I::mr > 0 && I::mr8 > 0;           // rows of a tile: bf16 domain, quantized rows
  requires I::few > 0 && I::few <= I::mr;     // at most so many rows are multiplied as they stream
  requires I::registers > 0;                  // vector registers of this width
  requires I::steps == 1 || I::steps == 2;    // multiply-adds per pair of bf16
  { I::fused } -> std::convertible_to<bool>;  // fma() rounds once
  { I::signed_bytes } -> std::convertible_to<bool>;  // idot_signed() is as fast as idot()
  { I::int16_pays } -> std::convertible_to<bool>;  // training in rows of two int8 digits is faster
  { I::matrix_tiles } -> std::convertible_to<bool>;  // matmul() and matmul8() exist: see isa/amx.h
  // -- fp32 vectors -------------------------------------------------------------------------------
  { I::splat(x) } -> std::same_as<typename I::f32>;
  { I::fma(f, f, f) } -> std::same_as<typename I::f32>;  // a * b + c
  { I::load_bf16(h) } -> std::same_as<typename I::f32>;
  { I::load_bytes(byte) } -> std::same_as<typename I::f32>;  // unsigned
  I::store_bf16(to_h, f);                                    // nearest even; NaN stays NaN
  { I::round_pair(f, f) } -> std::same_as<typename I::u32>;  // two values to a pair of bf16
  { I::to_float(i) } -> std::same_as<typename I::f32>;
  I::stream(to_v, f);  // a store past the caches, visible to others after settle()
  I::settle();
  // -- operands of products in the bf16 domain ----------------------------------------------------
  I::store_a(to_a, h);  // `lanes` values of a row (16 where A is bf16)
  { I::a_of(y) } -> std::same_as<typename I::A>;
  { I::line(u) } -> std::same_as<typename I::B>;       // a stored line of bf16 pairs
  { I::zip(f, f) } -> std::same_as<typename I::B>;     // values of bf16, low and high of the pairs
  { I::pair_of(b) } -> std::same_as<typename I::u32>;  // and back; exact for values of bf16
  { I::lo_of(b) } -> std::same_as<typename I::f32>;
  { I::hi_of(b) } -> std::same_as<typename I::f32>;
  { I::operand(b, step) } -> std::same_as<typename I::Operand>;  // what step `step` multiplies
  { I::madd(f, a, I::operand(b, 0), 0, I{}) } -> std::same_as<typename I::f32>;
  { I::dot(f, a, b, I{}) } -> std::same_as<typename I::f32>;  // all steps, k ascending
  // -- decoding a line of codes (order of k: gemm/panel.h) ----------------------------------------
  { I::int8_unit } -> std::convertible_to<float>;  // int8_pairs() gives codes / int8_unit
  { I::int4_unit } -> std::convertible_to<float>;
  { I::fp8_unit } -> std::convertible_to<float>;
  I::int8_pairs(u, pairs2, I{});      // signed bytes above -128
  I::byte_pairs(u, pairs2, I{});      // signed bytes
  I::fp8_pairs(u, pairs2, I{});       // bytes of e4m3fn, NaN left out
  I::int4_pairs(u, h, pairs4, I{});   // nibbles, stored + 8; h: their values, bf16[32] (twice 16)
  I::table_pairs(u, h, pairs4, I{});  // nibbles as indices into such a table
  // bytes below 16 as indices into a table of 16 bytes
  { I::table_bytes(u, byte) } -> std::same_as<typename I::u32>;
  // -- quantized rows: exact sums of byte products ------------------------------------------------
  { I::quad(code) } -> std::same_as<typename I::Quad>;  // four codes of a row
  I::quads(&quad, code);                                // `lanes` of them
  I::split(v, v, to_code, to_code, I{});                // 64 values as two digits
  { I::swap_middle(u) } -> std::same_as<typename I::u32>;
  { I::turn_bytes(u) } -> std::same_as<typename I::u32>;
  { I::idot(i, u, &quad) } -> std::same_as<typename I::i32>;
  { I::idot_small(i, u, &quad, I{}) } -> std::same_as<typename I::i32>;  // bytes of at most 31
  requires !I::signed_bytes || requires { I::idot_signed(i, u, &quad); };
};

// A weight format: how a line of a panel (16 channels x one dword) stands for values. A value is
// code x scale, code being a bf16 number that decode() gives exactly (as code / unit<I>, where a
// tier finds a power of two more cheaply), scale a number per channel and group, or none.
//
//   name, bits       of the file; per value, scales not counted
//   scaled           has scales; without, encode() writes the values themselves
//   pairs            pairs of values per channel and line: 16 / bits
//   groups           values per scale that a user may ask for; 0: one scale per channel
//   default_group    of them
//   encode()         chooses codes for `count` values of one channel; returns the scale, already
//                    rounded to bf16
//   dword()          codes of 2 * pairs values, in order of k, as they are stored
//   decode()         a line as pairs
//   quads, bias      quads > 0: codes are whole numbers in [-bias, bias), and bytes() gives a line
//                    as `quads` lines of code + bias, byte order k0 k2 k1 k3. Such formats have an
//                    int8 domain and are transposed as bytes; others as pairs of bf16
//   raw_bytes        a stored line is codes in two's complement in that order: nothing to unpack
// and, where a format has more than codes and bf16 scales:
//   Scale            float: scales are fp32
//   zeros            a byte per channel and group, a zero point: decode() and bytes() take it as a
//                    second argument, four times in a dword; encode() gives it by its last;
//                    zero_byte() is the one to store for a published zero point that
//                    valid_zero() allows
//   factor()         a number per channel, chosen before codes: value = code x scale x factor, and
//                    encode() sees values / factor
//   codes            name of the published codes that it takes, where that is not its own name
//   scale_of_code    what published scales are multiplied with, since decode() gives other values
//                    than the published meaning of a code, by that factor
//   valid()          whether a published code is a number; without it, every code is
template <class F>
struct ScaleOf {
  using type = bf16;
};
template <class F>
  requires requires { typename F::Scale; }
struct ScaleOf<F> {
  using type = typename F::Scale;
};
template <class F>
constexpr bool has_zeros() {
  if constexpr (requires { F::zeros; }) return F::zeros;
  return false;
}
template <class F>
constexpr bool has_factor() {
  return requires(const float* v) { F::factor(v, 1); };
}
template <class F>
constexpr const char* codes_of() {
  if constexpr (requires { F::codes; }) return F::codes;
  return F::name;
}
template <class F>
constexpr float scale_of_code() {
  if constexpr (requires { F::scale_of_code; }) return F::scale_of_code;
  return 1.f;
}
template <class F>
constexpr Storage kStorage = {F::bits, F::scaled ? int(sizeof(typename ScaleOf<F>::type)) : 0,
                              has_zeros<F>(), has_factor<F>()};

// What several formats are written with: the largest magnitude, NaN left out; and dword() of codes
// of a byte and of a nibble, in the order of k that gemm/panel.h gives them.
KT_OP float largest_magnitude(const float* v, int64_t count) {
  float top = 0;
  for (int64_t i = 0; i < count; ++i)
    top = __builtin_fabsf(v[i]) > top ? __builtin_fabsf(v[i]) : top;
  return top;
}
KT_OP uint32_t byte_dword(const uint16_t* c) {
  return c[0] | uint32_t(c[2]) << 8 | uint32_t(c[1]) << 16 | uint32_t(c[3]) << 24;
}
KT_OP uint32_t nibble_dword(const uint16_t* c) { return byte_dword(c) | byte_dword(c + 4) << 4; }

// decode(), bytes() and encode() with a zero point, where the format has any.
template <class I, class F>
KT_OP void decode(typename I::u32 x, [[maybe_unused]] typename I::u32 zero,
                  typename I::B (&out)[F::pairs]) {
  if constexpr (has_zeros<F>())
    F::template decode<I>(x, zero, out);
  else
    F::template decode<I>(x, out);
}
template <class I, class F>
KT_OP void bytes(typename I::u32 x, [[maybe_unused]] typename I::u32 zero,
                 typename I::u32 (&out)[F::quads]) {
  if constexpr (has_zeros<F>())
    F::template bytes<I>(x, zero, out);
  else
    F::template bytes<I>(x, out);
}
template <class F>
KT_OP float encode(const float* v, int64_t count, uint16_t* code, [[maybe_unused]] uint8_t* zero) {
  if constexpr (has_zeros<F>())
    return F::encode(v, count, code, *zero);
  else
    return F::encode(v, count, code);
}

template <class F, class I>
concept Format = requires(const float* v, int64_t count, uint16_t* code, const uint16_t* codes,
                          typename I::u32 line, uint8_t* zero, typename I::B (&pairs)[F::pairs],
                          typename I::u32 (&bytes)[F::quads > 0 ? F::quads : 1]) {
  { F::name } -> std::convertible_to<const char*>;
  requires F::bits == 16 || F::bits == 8 || F::bits == 4;
  requires F::pairs* F::bits == 16;
  { F::scaled } -> std::convertible_to<bool>;
  requires F::quads == 0 || (F::scaled && 2 * F::quads == F::pairs && F::bias <= 128);
  requires !F::raw_bytes || F::bias == 128;
  requires std::same_as<typename ScaleOf<F>::type, bf16> ||
               std::same_as<typename ScaleOf<F>::type, float>;
  requires !has_zeros<F>() || (F::scaled&& requires {
    F::zero_byte(uint8_t(0));
    F::valid_zero(uint8_t(0));
  });
  requires F::scaled || !has_factor<F>();
  requires std::extent_v<decltype(F::groups)> > 0;
  { F::default_group } -> std::convertible_to<int>;
  { F::template unit<I> } -> std::convertible_to<float>;
  requires requires {
    { F::encode(v, count, code) } -> std::same_as<float>;
  } || requires {
    { F::encode(v, count, code, *zero) } -> std::same_as<float>;
  };
  { F::dword(codes) } -> std::same_as<uint32_t>;
  requires requires { F::template decode<I>(line, pairs); } ||
               requires { F::template decode<I>(line, line, pairs); };
  requires F::quads == 0 || requires { F::template bytes<I>(line, bytes); } ||
                   requires { F::template bytes<I>(line, line, bytes); };
};

// Groups keep a scale's values in whole tiles and blocks of columns: see gemm/panel.h.
template <class F>
constexpr bool groups_fit() {
  bool found = false;
  for (int group : F::groups) {
    if (group % 16 || group < 0) return false;
    found |= group == F::default_group;
  }
  return found;
}

}  // namespace
}  // namespace kt
