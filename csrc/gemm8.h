// The int8 domain of the driver: quantized rows times weight codes, exact 32-bit sums per group.
//
// Rows are quantized per group (Quantized::group, it divides the weights' group or a channel):
// scale = max / 127, codes rounded to nearest. Weight bytes are unsigned, code + bias; the sums
// start at -bias * (sum of the row's codes in the group), so nothing extra is stored with the
// weights.
//   C = fma(weight scale, row scale * float(sum), C), groups ascending
// few() and tile() are again two loop orders of one arithmetic.
#pragma once
#include "gemm.h"

namespace kt {
namespace {

template <class I, class F>
struct Driver8 {
  using f32 = typename I::f32;
  using u32 = typename I::u32;
  using i32 = typename I::i32;
  using Quad = typename I::Quad;
  using D = Driver<I, F>;
  static constexpr int V = kVecs<I>, L = I::lanes;

  template <int P>
  struct Bytes {
    u32 v[P][V];  // 16 P channels x 4 unsigned bytes
  };
  struct Groups {
    int64_t count, quads, per_scale;  // groups of a row; quads per group; groups per weight scale
  };
  static Groups groups_of(const Shape& s, int64_t group) {
    return {(s.kp + group - 1) / group, group / 4, (group_size(s) + group - 1) / group};
  }

  static void quantize(const bf16* src, int64_t ld, int64_t m, const Shape& s, int64_t group,
                       void* codes, float* scale, int32_t* start) {
    const int64_t count = (s.kp + group - 1) / group;
    auto* q = (Quad*)codes;
    for (int64_t i = 0; i < m; ++i, src += ld, q += s.kp / 4)
      for (int64_t g = 0; g < count; ++g) {
        const int64_t k0 = g * group, k1 = min64(s.kp, k0 + group), have = min64(k1, s.k) - k0;
        float v[128];
        int8_t code[128];
        for (int64_t k = 0; k < k1 - k0; ++k) v[k] = k < have ? widen(src[k0 + k]) : 0.f;
        float top = 0;
        for (int64_t k = 0; k < k1 - k0; ++k)
          top = __builtin_fabsf(v[k]) > top ? __builtin_fabsf(v[k]) : top;
        // a row with a NaN or Inf must not come out finite
        float bad = 0;
        for (int64_t k = 0; k < k1 - k0; ++k) bad += v[k] - v[k];
        float inv = top > 0 ? 127.f / top : 0.f;
        if (inv - inv != 0) inv = 0;  // subnormal values, or none finite: codes 0, and so their sum
        int32_t sum = 0;
        for (int64_t k = 0; k < k1 - k0; ++k) {
          int32_t c = bad == 0 ? int32_t(__builtin_rintf(v[k] * inv)) : 0;
          code[k] = int8_t(c), sum += c;
        }
        for (int64_t k = 0; k < k1 - k0; k += 4) q[(k0 + k) / 4] = I::quad(code + k);
        scale[i * count + g] = top / 127.f + bad;
        start[i * count + g] = -F::bias * sum;
      }
  }

  KT_OP i32 idot(i32 acc, u32 bytes, const Quad* q) {
    if constexpr (F::bias <= 8) return I::idot_small(acc, bytes, q, I{});
    return I::idot(acc, bytes, q);
  }
  template <int M, int P>
  KT_OP void begin(i32 (&acc)[M][P][V], const Quantized& a, int64_t g) {
    for (int i = 0; i < M; ++i)
      for (int q = 0; q < P; ++q)
        for (int j = 0; j < V; ++j) acc[i][q][j] = i32{} + a.start[i * a.groups + g];
  }
  template <int M, int P>
  KT_OP void fold(i32 (&acc)[M][P][V], const Quantized& a, int64_t g, const bf16* const (&scale)[P],
                  float* c) {
    for (int q = 0; q < P; ++q)
      for (int j = 0; j < V; ++j) {
        f32 s = I::load_bf16(scale[q] + j * L);
        for (int i = 0; i < M; ++i) {
          float* p = c + i * kCols + q * kPanel + j * L;
          f32 sum = I::to_float(acc[i][q][j]) * I::splat(a.scale[i * a.groups + g]);
          *(f32*)p = I::fma(s, sum, g ? *(f32*)p : f32{});
        }
      }
  }

  template <int M, int P>
  static __attribute__((noinline)) void tile(const Quantized& a, const Bytes<P>* b,
                                             const bf16* const* scales, int64_t quads,
                                             const Groups& n, float* c) {
    const Quad* row[(M + 2) / 3];
    for (int i = 0; i < M; i += 3) row[i / 3] = (const Quad*)a.codes + i * a.ld;
    for (int64_t g = 0, k = 0; g < n.count; ++g) {
      i32 acc[M][P][V];
      begin<M, P>(acc, a, g);
      for (int64_t end = min64(quads, k + n.quads); k < end; ++k) {
        Bytes<P> w = b[k];
        for (int i = 0; i < M; ++i)
          for (int q = 0; q < P; ++q)
            for (int j = 0; j < V; ++j)
              acc[i][q][j] = idot(acc[i][q][j], w.v[q][j], row[i / 3] + (i % 3) * a.ld + k);
      }
      const bf16* s[P];
      for (int q = 0; q < P; ++q) s[q] = scales[q] + g / n.per_scale * kPanel;
      fold<M, P>(acc, a, g, s, c);
    }
  }

  // As Driver::few. `n.per_scale` groups of a row share a weight scale.
  template <int M, int P>
  static __attribute__((noinline)) void few(const Quantized& a, const uint8_t* const* w,
                                            const bf16* const* scales, int64_t quads,
                                            const Groups& n, float* c) {
    constexpr bool hold = 4 * M * P * V <= I::registers;
    const Quad* codes = (const Quad*)a.codes;
    f32 total[M][P][V] = {};
    const uint8_t* line[P];
    for (int q = 0; q < P; ++q) line[q] = w[q];
    for (int64_t g = 0, k = 0, of_scale = 0, scale = 0; g < n.count; ++g) {
      i32 acc[M][P][V];
      begin<M, P>(acc, a, g);
      for (int64_t end = min64(quads, k + n.quads); k < end; k += F::quads)
        for (int q = 0; q < P; ++q) {
          __builtin_prefetch(line[q] + D::kAhead);
          for (int j = 0; j < V; ++j) {
            u32 bytes[F::quads];
            F::template bytes<I>(*(const u32*)(line[q] + j * L * 4), bytes);
            for (int t = 0; t < F::quads; ++t)
              for (int i = 0; i < M; ++i)
                acc[i][q][j] = idot(acc[i][q][j], bytes[t], codes + i * a.ld + k + t);
          }
          line[q] += kAlign;
        }
      const bf16* s[P];
      for (int q = 0; q < P; ++q) s[q] = scales[q] + scale;
      if constexpr (hold) {
        for (int q = 0; q < P; ++q)
          for (int j = 0; j < V; ++j) {
            f32 of = I::load_bf16(s[q] + j * L);
            for (int i = 0; i < M; ++i) {
              f32 sum = I::to_float(acc[i][q][j]) * I::splat(a.scale[i * a.groups + g]);
              total[i][q][j] = I::fma(of, sum, total[i][q][j]);
            }
          }
      } else {
        fold<M, P>(acc, a, g, s, c);
      }
      if (++of_scale == n.per_scale) of_scale = 0, scale += kPanel;
    }
    if (hold)
      for (int i = 0; i < M; ++i)
        for (int q = 0; q < P; ++q)
          for (int j = 0; j < V; ++j) *(f32*)(c + i * kCols + q * kPanel + j * L) = total[i][q][j];
  }

  static Quantized rows_from(const Quantized& a, int64_t i) {
    Quantized r = a;
    r.codes = (const Quad*)a.codes + i * a.ld;
    r.scale += i * a.groups, r.start += i * a.groups;
    return r;
  }

  template <int P, int M>
  KT_OP void tile_rows(int64_t m, const Quantized& a, const Bytes<P>* b, const bf16* const* s,
                       int64_t quads, const Groups& n, float* c) {
    if (m == M) return tile<M, P>(a, b, s, quads, n, c);
    if constexpr (M > 1) tile_rows<P, M - 1>(m, a, b, s, quads, n, c);
  }
  template <int P, int M>
  KT_OP void few_rows(const Quantized& a, const uint8_t* const* w, const bf16* const* s,
                      int64_t quads, const Groups& n, float* c) {
    if (a.m == M) {
      if constexpr (2 * M * P * V <= I::registers) return few<M, P>(a, w, s, quads, n, c);
      for (int q = 0; q < P; ++q) few<M, 1>(a, w + q, s + q, quads, n, c + q * kPanel);
      return;
    }
    if constexpr (M > 1) few_rows<P, M - 1>(a, w, s, quads, n, c);
  }

  template <int P>
  static void panels_of(const Quantized& a, const Packed* const* w, const int64_t* p, float* c,
                        void* scratch) {
    const uint8_t* data[P];
    const bf16* scale[P];
    for (int q = 0; q < P; ++q) data[q] = D::lines(*w[q], p[q]), scale[q] = D::scales(*w[q], p[q]);
    const Shape& s = w[0]->shape;
    const int64_t quads = s.kp / 4;
    const Groups n = groups_of(s, a.group);
    if (a.m <= I::few) return few_rows<P, I::few>(a, data, scale, quads, n, c);
    auto* b = (Bytes<P>*)scratch;
    for (int q = 0; q < P; ++q)
      for (int64_t k = 0; k < quads; k += F::quads)
        for (int j = 0; j < V; ++j) {
          u32 bytes[F::quads];
          F::template bytes<I>(*(const u32*)(data[q] + k / F::quads * kAlign + j * L * 4), bytes);
          for (int t = 0; t < F::quads; ++t) b[k + t].v[q][j] = bytes[t];
        }
    if constexpr (requires { I::matrix_tiles; })  // exact sums: the same bits as below
      if (I::template matmul8<P>(a, b, scale, quads, n.quads, n.per_scale, c)) return;
    const int64_t tiles = (a.m + I::mr - 1) / I::mr;
    for (int64_t t = 0, i = 0; t < tiles; ++t) {
      const int64_t rows = (a.m - i + tiles - t - 1) / (tiles - t);
      tile_rows<P, I::mr>(rows, rows_from(a, i), b, scale, quads, n, c + i * kCols);
      i += rows;
    }
  }

  static void nt(const Quantized& a, const Packed* const* w, const int64_t* p, int count, float* c,
                 void* scratch) {
    if (a.m == 0) return;
    if (count == 2) return panels_of<2>(a, w, p, c, scratch);
    panels_of<1>(a, w, p, c, scratch);
  }
};

}  // namespace
}  // namespace kt
