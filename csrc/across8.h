// Transposed products of quantized rows: C = A W[:, col .. col + 32), reduced over the channels n.
//
// Scales vary along this reduction, so rows take them in before they are quantized, per kChannels
// channels: anew for every scale group of columns. Codes are transposed as the bytes they are, to
// quads along n with lanes along k: what Driver8's tiles multiply.
#pragma once
#include "gemm8.h"

namespace kt {
namespace {

template <class I, class F>
struct Across8 : Driver8<I, F> {
  using typename Driver8<I, F>::f32, typename Driver8<I, F>::u32, typename Driver8<I, F>::i32,
      typename Driver8<I, F>::Quad, typename Driver8<I, F>::D, typename Driver8<I, F>::Groups,
      typename Driver8<I, F>::Block;
  using Driver8<I, F>::V, Driver8<I, F>::L, Driver8<I, F>::direct;
  static constexpr int kQuads = int(kPanel) / 4;         // of a panel's channels
  static constexpr int64_t kGroup = kChannels / kPanel;  // panels whose channels share a row scale

  // factors: [n] fp32, n padded to panels.
  static void quantize(const bf16* src, int64_t ld, const int32_t* rows, int64_t m, const Packed& w,
                       int64_t col, void* codes, RowScale* scale, int32_t* start, float* factors) {
    const int64_t n = panels(w.shape.n) * kPanel, quads = n / 4,
                  count = (n + kChannels - 1) / kChannels;
    for (int64_t p = 0; p * kPanel < n; ++p) {
      const bf16* of = D::scales(w, p) + col / group_size(w.shape) * kPanel;
      for (int j = 0; j < V; ++j) *(f32*)(factors + p * kPanel + j * L) = I::load_bf16(of + j * L);
    }
    auto* q = (Quad*)codes;
    for (int64_t i = 0; i < m; ++i, q += 2 * quads, scale += 2 * count, start += 2 * count) {
      const bf16* row = src + (rows ? rows[i] : i) * ld;
      for (int64_t g = 0, first = 0; g < count; ++g, first += kChannels) {
        auto values = [&](int64_t k) __attribute__((always_inline)) {
          return Across8::load_edge(row + first + k, w.shape.n - first - k) *
                 *(const f32*)(factors + first + k);
        };
        Across8::template quantize_group<2>(values, min64(kChannels, n - first), q + first / 4,
                                            quads, scale + g, start + g, count);
      }
    }
  }

  // Both digits of a row are rows of `a`.
  static void nn(const Quantized& a, const Packed& w, int64_t col, float* c, void* scratch) {
    if (a.m == 0) return;
    const bf16* const ones[2] = {kOnes, kOnes};
    const Groups n{a.groups, kChannels / 4, a.groups};  // all share one scale of weights: 1
    const int64_t count = panels(w.shape.n);
    for (int64_t p = 0; p < count; p += kAtOnce) {
      const int64_t end = min64(count, p + kAtOnce), lines = (end - p) * kQuads;
      const Block block{p / kGroup, (end + kGroup - 1) / kGroup, p * kQuads, end * kQuads};
      u32* b = (u32*)scratch;
      i32 starts[2 * V * kAtOnce / kGroup];
      typename Across8::template Weights<2> weights{{}, V, starts, 2 * V};
      for (int q = 0; q < 2; ++q, b += lines * V) {
        for (int64_t x = p; x < end; ++x)
          turn(D::lines(w, x) + (col + q * kPanel) / (2 * F::pairs) * kAlign,
               b + (x - p) * kQuads * V);
        weights.b[q] = b;
        if constexpr (direct) Across8::begin_sums(b, block, n, starts + q * V, 2 * V);
      }
      Across8::template rows_times<2>(a, weights, ones, block, n, nullptr, c);
    }
  }

 private:
  // Panels that are transposed at once: 24 KB of lines, which stay in L1.
  static constexpr int64_t kAtOnce = 6 * kGroup;

  // One panel's 16 channels x 16 k, from `line` on, to 4 quads of channels [16 k].
  KT_OP void turn(const uint8_t* line, u32* quads) {
    constexpr int kLines = int(kPanel) / 4 / F::quads;
    u32 x[4][V];  // four k of all channels
    for (int t = 0; t < kLines; ++t)
      for (int j = 0; j < V; ++j) {
        u32 bytes[F::quads];
        Across8::bytes_of(*(const u32*)(line + t * kAlign + j * L * 4), bytes);
        for (int y = 0; y < F::quads; ++y) x[t * F::quads + y][j] = I::turn_bytes(bytes[y]);
        if (j == 0)  // the same k of the next columns
          __builtin_prefetch(line + (kCols / (2 * F::pairs) + t) * kAlign, 0, 2);
      }
    if constexpr (L == kPanel) {  // runs of four dwords change places
      u32 run[4] = {x[0][0], x[1][0], x[2][0], x[3][0]};
      exchange<4>(run[0], run[1]), exchange<4>(run[2], run[3]);
      exchange<8>(run[0], run[2]), exchange<8>(run[1], run[3]);
      for (int j = 0; j < kQuads; ++j) quads[j] = run[j];
    } else {
      auto* to = (uint32_t*)quads;
      for (int j = 0; j < kQuads; ++j)
        for (int t = 0; t < 4; ++t)
          for (int i = 0; i < 4; ++i) *to++ = x[t][4 * j / L][4 * j % L + i];
    }
  }
};

}  // namespace
}  // namespace kt
