// Unpacking across a panel: 16 columns of W as lines whose reduction runs over the channels n, the
// weights of nn(). Pairs (n, n + 1), lanes along k.
//
// Where operand B is fp32, a channel's 16 values are brought side by side as bytes of codes, or as
// pairs of bf16 where a format's codes are no whole numbers, which moves dwords, and widened then:
// a third of the instructions of transposing widened values. Code x scale is exact there (16 bits).
// Where B is pairs of bf16, that product is rounded to bf16, and pairs are zipped and transposed.
#pragma once
#include "gemm/pack.h"

namespace kt {
namespace {

template <class I, int P>
struct Line {  // one unpacked line of P panels
  typename I::B v[P][kVecs<I>];
};

template <class I, class F>
struct Transposed : Packing<I, F> {
  using typename Packing<I, F>::f32, typename Packing<I, F>::u32, typename Packing<I, F>::u64;
  using Packing<I, F>::V, Packing<I, F>::L, Packing<I, F>::lines, Packing<I, F>::scales,
      Packing<I, F>::zeros, Packing<I, F>::zeros_of;
  static constexpr bool single = sizeof(typename I::A) == 4;

  // Columns [col, col + 16) of w's panels [p, end) into panel q of dst, one line per pair of
  // channels.
  static void unpack_across(const Packed& w, int64_t col, int64_t p, int64_t end, int q,
                            Line<I, 2>* dst) {
    const int64_t first = col / 2,
                  have = min64(8, w.shape.kp / 2 - first),  // pairs of k that are stored
        bytes = panel_bytes(w.shape, kStorage<F>),
                  group = F::scaled ? col / group_size(w.shape) : 0;
    const uint8_t* line = lines(w, p) + first / F::pairs * kAlign;
    ScalesOf<F> scale = scales(w, p, group);
    for (; p < end; ++p, dst += kPanel / 2, line += bytes, scale = next_panel(scale, bytes)) {
      u32 zero[V];
      for (int j = 0; j < V; ++j) zero[j] = zeros_of(zeros(w, p), group * kPanel, j);
      if constexpr (single)
        widen_rows(line, have, scale, zero, q, dst);
      else
        zip_rows(line, have, scale, zero, q, dst);
    }
  }

 private:
  // -- fp32: transpose what is stored, then widen -------------------------------------------------
  static constexpr bool as_bytes = F::quads > 0;       // else as pairs of bf16
  static constexpr int kRows = as_bytes ? 4 : 8;       // dwords of a channel's 16 values
  static constexpr int kSide = kRows < L ? kRows : L;  // of a block that is transposed
  static constexpr int kBlocks = kRows / kSide;
  struct Stored {
    alignas(64) uint32_t at[kBlocks][V][kSide][L];
    // L values of channel n, from k = x on; n = L j + kSide b + i
    const uint32_t* of(int64_t n, int64_t x) const {
      const int64_t j = n / L, b = n % L / kSide, i = n % kSide, dword = as_bytes ? x / 4 : x / 2;
      return at[dword / kSide][j][i] + b * kSide + dword % kSide;
    }
  };

  // Vector j of the dwords of all channels, in order of k.
  KT_OP void load_rows(const uint8_t* line, int64_t have, u32 zero, int j, u32 (&row)[kRows]) {
    if constexpr (as_bytes) {
      for (int t = 0; t < kRows; t += F::quads) {
        u32 out[F::quads];
        bytes<I, F>(*(const u32*)(line + t / F::quads * kAlign + j * L * 4), zero, out);
        for (int x = 0; x < F::quads; ++x) row[t + x] = I::swap_middle(out[x]);
      }
    } else if constexpr (F::scaled) {
      for (int t = 0; t < kRows; t += F::pairs) {
        typename I::B out[F::pairs] = {};
        if (t < have)
          decode<I, F>(*(const u32*)(line + t / F::pairs * kAlign + j * L * 4), zero, out);
        for (int x = 0; x < F::pairs; ++x) row[t + x] = I::pair_of(out[x]);
      }
    } else {  // bf16 as it is stored
      for (int t = 0; t < kRows; ++t)
        row[t] = t < have ? *(const u32*)(line + t * kAlign + j * L * 4) : u32{};
    }
  }
  KT_OP void widen_rows(const uint8_t* line, int64_t have, const ScalesOf<F>& scale,
                        const u32 (&zero)[V], int q, Line<I, 2>* dst) {
    Stored stored;
    for (int j = 0; j < V; ++j) {
      u32 row[kRows];
      load_rows(line, have, zero[j], j, row);
      for (int b = 0; b < kBlocks; ++b) {
        u32 square[kSide];
        for (int i = 0; i < kSide; ++i) square[i] = row[b * kSide + i];
        transpose_squares(square);
        for (int i = 0; i < kSide; ++i) *(u32*)stored.at[b][j][i] = square[i];
      }
    }
    alignas(64) float factor[kPanel], shift[kPanel];
    if constexpr (F::scaled)
      for (int j = 0; j < V; ++j) {
        const f32 s = scale.template of<I>(j * L);
        *(f32*)(factor + j * L) = as_bytes ? s : s * I::splat(F::template unit<I>);
        *(f32*)(shift + j * L) = s * I::splat(-F::bias);
      }
    // In memory, whence values are broadcast by loads. From vectors that gcc knows it moves them
    // one by one, all through the one port that shuffles: three times as long.
    asm volatile("" : : "r"(&stored), "r"(factor), "r"(shift) : "memory");
    for (int n = 0; n < kPanel; ++n)
      for (int x = 0; x < V; ++x) {
        f32 value;
        if constexpr (as_bytes) {
          value = I::fma(I::load_bytes((const uint8_t*)stored.of(n, x * L)), I::splat(factor[n]),
                         I::splat(shift[n]));
        } else if constexpr (F::scaled) {
          value = I::load_bf16((const bf16*)stored.of(n, x * L)) * I::splat(factor[n]);
        } else {
          value = I::load_bf16((const bf16*)stored.of(n, x * L));
        }
        typename I::B& to = dst[n / 2].v[q][x];
        (n % 2 ? to.hi : to.lo) = value;
      }
  }

  // -- pairs of bf16 ------------------------------------------------------------------------------
  // (a0 a1)(b0 b1) -> (a0 b0)(a1 b1) in every 64-bit lane: dwords n, n+1 become pairs along n.
  KT_OP u64 zip_pairs(u32 x) {
    u64 v = (u64)x;
    return (v & 0xffff00000000ffffull) | (v >> 16 & 0xffff0000ull) | (v << 16 & 0xffff00000000ull);
  }
  KT_OP void zip_rows(const uint8_t* line, int64_t have, const ScalesOf<F>& scale,
                      const u32 (&zero)[V], int q, Line<I, 2>* dst) {
    for (int j = 0; j < V; ++j) {
      u64 v[8];
      f32 sc = {};
      if (F::scaled) sc = scale.template of<I>(j * L) * I::splat(F::template unit<I>);
      for (int t = 0; t < 8; t += F::pairs) {
        typename I::B out[F::pairs] = {};
        if (t < have)
          decode<I, F>(*(const u32*)(line + t / F::pairs * kAlign + j * L * 4), zero[j], out);
        for (int x = 0; x < F::pairs; ++x) {
          u32 pair = F::scaled ? I::round_pair(I::lo_of(out[x]) * sc, I::hi_of(out[x]) * sc)
                               : I::pair_of(out[x]);
          v[t + x] = zip_pairs(pair);
        }
      }
      constexpr int Q = L / 2;  // n-pairs per vector = qwords
      for (int x = 0; x < 8 / Q; ++x) {
        u64 square[Q];
        for (int i = 0; i < Q; ++i) square[i] = v[x * Q + i];
        transpose_squares(square);
        for (int i = 0; i < Q; ++i) dst[j * Q + i].v[q][x] = I::line((u32)square[i]);
      }
    }
  }
};

}  // namespace
}  // namespace kt
