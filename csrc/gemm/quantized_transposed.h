// Transposed products of quantized rows: C = A W[:, col .. col + 32), reduced over the channels n.
//
// Scales vary along this reduction, so rows take them in before they are quantized, per
// kRowScaleChannels channels: anew for every scale group of columns. Codes are transposed as the
// bytes they are, to quads along n with lanes along k: what QuantizedDriver's tiles multiply.
#pragma once
#include "gemm/quantized.h"

namespace kt {
namespace {

template <class I, class F>
struct QuantizedTransposed : QuantizedDriver<I, F> {
  using typename QuantizedDriver<I, F>::f32, typename QuantizedDriver<I, F>::u32,
      typename QuantizedDriver<I, F>::i32, typename QuantizedDriver<I, F>::Quad,
      typename QuantizedDriver<I, F>::D, typename QuantizedDriver<I, F>::Groups,
      typename QuantizedDriver<I, F>::Block;
  using QuantizedDriver<I, F>::V, QuantizedDriver<I, F>::L, QuantizedDriver<I, F>::direct;
  static constexpr int kQuads = int(kPanel) / 4;  // of a panel's channels
  static constexpr int64_t kGroup =
      kRowScaleChannels / kPanel;  // panels whose channels share a row scale

  // Rows as fp32 in [-1, 1], zero from n to np; top: the largest value of every kRowScaleChannels.
  static void normalize(const bf16* src, int64_t ld, const int32_t* rows, int64_t m, int64_t n,
                        int64_t np, float* out, float* top) {
    for (int64_t i = 0; i < m; ++i, out += np)
      for (int64_t first = 0; first < np; first += kRowScaleChannels) {
        const bf16* row = src + (rows ? rows[i] : i) * ld + first;
        const int64_t count = min64(kRowScaleChannels, np - first);
        f32 v[kRowScaleChannels / L];
        for (int64_t k = 0; k < count; k += L)
          v[k / L] = QuantizedTransposed::load_edge(row + k, n - first - k);
        const float most = QuantizedTransposed::largest(v, count), inv = 1.f / most;
        const bool none = most != most || inv - inv != 0;  // not finite, or zero or nearly so
        for (int64_t k = 0; k < count; k += L)
          *(f32*)(out + first + k) = none ? f32{} : v[k / L] * I::splat(inv);
        *top++ = none && most == most ? 0.f : most;
      }
  }
  static void quantize(const float* rows, const float* top, int64_t m, const Packed& w, int64_t col,
                       void* codes, RowScale* scale, int32_t* start, float* factors) {
    const int64_t n = padded_channels(w.shape), quads = n / 4,
                  count = (n + kRowScaleChannels - 1) / kRowScaleChannels;
    float* unit = factors + n;
    scale_factors(w, col, kTwoDigits, factors, unit);
    auto* q = (Quad*)codes;
    for (int64_t i = 0; i < m; ++i, top += count, scale += 2 * count, start += 2 * count)
      for (int64_t g = 0; g < count; ++g) {
        int32_t sums[2] = {};
        for (int64_t k = g * kRowScaleChannels; k < min64(n, (g + 1) * kRowScaleChannels);
             k += 64, rows += 64) {
          int8_t digit[2][64];
          I::split(rows, factors + k, digit[0], digit[1], I{});
          for (int d = 0; d < 2; ++d)
            sums[d] +=
                QuantizedTransposed::put_codes(digit[d], 64, q + (2 * i + d) * quads + k / 4);
        }
        float low = top[g] * unit[g];
        QuantizedTransposed::shorten(low);
        scale[g] = {256.f * low, -kRoundMagic * (256.f * low)},
        start[g] = kRoundMagicBits - sums[0];
        scale[count + g] = {low, -kRoundMagic * low}, start[count + g] = kRoundMagicBits - sums[1];
      }
  }
  // Scales of the channels for the group of column `col`, divided by unit[g] of their
  // kRowScaleChannels: the largest is `whole`.
  KT_OP void scale_factors(const Packed& w, int64_t col, float whole, float* factors, float* unit) {
    const int64_t n = padded_channels(w.shape), stored = panels(w.shape.n) * kPanel;
    for (int64_t k = 0; k < n; k += kPanel)
      for (int j = 0; j < V; ++j)
        *(f32*)(factors + k + j * L) =
            k < stored ? D::scales(w, k / kPanel, col / group_size(w.shape)).template of<I>(j * L)
                       : f32{};
    for (int64_t g = 0, first = 0; first < n; ++g, first += kRowScaleChannels) {
      auto* v = (f32*)(factors + first);
      const int64_t count = min64(kRowScaleChannels, n - first);
      const float most = QuantizedTransposed::largest(v, count), up = most > 0 ? whole / most : 0.f;
      const bool none = up - up != 0;  // so small that the inverse overflows
      for (int64_t j = 0; j < count / L; ++j) v[j] = none ? f32{} : v[j] * I::splat(up);
      unit[g] = none ? 0.f : most / whole;
    }
  }

  // Both digits of a row are rows of `a`.
  static void nn(const Quantized& a, const Packed& w, int64_t col, float* c, void* scratch) {
    if (a.m == 0) return;
    ScalesOf<F> ones[2];
    set_ones(ones[0]), set_ones(ones[1]);
    const Groups n{a.groups, kRowScaleChannels / 4, a.groups};  // all share one scale of weights: 1
    const int64_t stored = panels(w.shape.n), count = padded_channels(w.shape) / kPanel,
                  bytes = panel_bytes(w.shape, kStorage<F>);
    for (int64_t p = 0; p < count; p += kAtOnce) {
      const int64_t end = min64(count, p + kAtOnce), lines = (end - p) * kQuads;
      const Block block{p / kGroup, (end + kGroup - 1) / kGroup, p * kQuads, end * kQuads};
      u32* b = (u32*)scratch;
      i32 starts[2 * V * kAtOnce / kGroup];
      typename QuantizedTransposed::template Weights<2> weights{{}, V, starts, 2 * V};
      for (int q = 0; q < 2; ++q, b += lines * V) {
        const int64_t lines_to = (col + q * kPanel) / (2 * F::pairs) * kAlign;
        for (int64_t x = p; x < end; ++x) {
          u32 quad[kQuads][V] = {};
          if (x < stored)
            turn(D::lines(w, x) + lines_to, D::zeros(w, x), col / group_size(w.shape), quad);
          // as split() has them: quad j of four panels, then quad j + 1
          u32* to = b + ((x - p) / 4 * 4 * kQuads + (x - p) % 4) * V;
          for (int j = 0; j < kQuads; ++j, to += 4 * V)
            for (int y = 0; y < V; ++y) to[y] = quad[j][y];
        }
        weights.b[q] = b;
        if constexpr (direct) QuantizedTransposed::begin_sums(b, block, n, starts + q * V, 2 * V);
      }
      // The same panels' lines for the next columns, a part in each tile.
      const uint8_t* after = D::lines(w, p) + (col + kCols) / (2 * F::pairs) * kAlign;
      const int64_t lines_ahead = 8 * (min64(end, stored) - p), steps = (end - p) * kQuads;
      auto next = [&](int64_t t, int64_t tiles) {
        const int64_t first = lines_ahead * t / tiles / 8;
        return typename QuantizedTransposed::Prefetch{after + first * bytes,
                                                      (lines_ahead << 16) / (steps * tiles), bytes};
      };
      QuantizedTransposed::template rows_times<2>(a, weights, ones, block, n, next, c);
    }
  }

 private:
  // Panels that are transposed at once: 24 KB of lines, which stay in L1.
  static constexpr int64_t kAtOnce = 6 * kGroup;

  // One panel's 16 channels x 16 k, from `line` on, as quads of channels with lanes along k.
  KT_OP void turn(const uint8_t* line, const uint8_t* zeros, int64_t group,
                  u32 (&quads)[kQuads][V]) {
    constexpr int kLines = int(kPanel) / 4 / F::quads;
    u32 x[4][V];  // four k of all channels
    for (int t = 0; t < kLines; ++t)
      for (int j = 0; j < V; ++j) {
        u32 bytes[F::quads];
        QuantizedTransposed::bytes_of(*(const u32*)(line + t * kAlign + j * L * 4),
                                      D::zeros_of(zeros, group * kPanel, j), bytes);
        for (int y = 0; y < F::quads; ++y) x[t * F::quads + y][j] = I::turn_bytes(bytes[y]);
      }
    if constexpr (L == kPanel) {  // runs of four dwords change places
      for (int t = 0; t < 4; ++t) quads[t][0] = x[t][0];
      exchange<4>(quads[0][0], quads[1][0]), exchange<4>(quads[2][0], quads[3][0]);
      exchange<8>(quads[0][0], quads[2][0]), exchange<8>(quads[1][0], quads[3][0]);
    } else {
      for (int j = 0; j < kQuads; ++j)
        for (int k = 0; k < kPanel; ++k)
          quads[j][k / L][k % L] = x[k / 4][4 * j / L][4 * j % L + k % 4];
    }
  }
};

}  // namespace
}  // namespace kt
