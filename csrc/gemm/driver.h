// The one driver: A [m, k] times packed or unpacked panels, for every ISA, format and orientation.
//
//   few()   few rows: lines are decoded in registers; bound by memory bandwidth
//   tile()  many rows: a dense M x (16 P) tile over panels that were unpacked once
// Both are loop orders of one arithmetic: k ascends, one fp32 accumulator per scale group, folded
// into C by C = fma(scale, accumulator, C). So a row's bits do not depend on the other rows.
//   nt: unpack() keeps codes exact and unscaled; scales are folded
//   nn: unpack_across() applies the scale, which varies along this reduction
//   tn: zip() pairs two rows of V
#pragma once
#include "gemm/transposed.h"

namespace kt {
namespace {

// M rows x P panels of C to and from registers.
template <class I, int M, int P>
KT_OP void load_c(const float* c, typename I::f32 (&total)[M][P][kVecs<I>]) {
  for (int i = 0; i < M; ++i)
    for (int q = 0; q < P; ++q)
      for (int j = 0; j < kVecs<I>; ++j)
        total[i][q][j] = *(typename I::f32*)(c + i * kCols + q * kPanel + j * I::lanes);
}
template <class I, int M, int P>
KT_OP void store_c(const typename I::f32 (&total)[M][P][kVecs<I>], float* c) {
  for (int i = 0; i < M; ++i)
    for (int q = 0; q < P; ++q)
      for (int j = 0; j < kVecs<I>; ++j)
        *(typename I::f32*)(c + i * kCols + q * kPanel + j * I::lanes) = total[i][q][j];
}

template <class I, int M, int P>
KT_OP void clear_c(float* c) {
  const typename I::f32 zero[M][P][kVecs<I>] = {};
  store_c<I, M, P>(zero, c);
}

// The scales of a matrix without: so that fold() has no branches, across which gcc would not keep
// sums in registers.
template <class T>
struct Ones {
  alignas(64) T at[kPanel];
  constexpr Ones() : at() {
    for (T& x : at) x = sizeof(T) == 2 ? T(0x3f80) : T(1);
  }
};
alignas(64) constexpr Ones<bf16> kOnes;
alignas(64) constexpr Ones<float> kFloatOnes;
KT_OP void set_ones(Scales<bf16, false>& s) { s = {kOnes.at}; }
KT_OP void set_ones(Scales<float, false>& s) { s = {kFloatOnes.at}; }
KT_OP void set_ones(Scales<bf16, true>& s) { s = {kOnes.at, kFloatOnes.at}; }
KT_OP void set_ones(Scales<float, true>& s) { s = {kFloatOnes.at, kFloatOnes.at}; }

// C[i][16 q + ..] += scale x unit x acc.
template <class I, int M, int P, class S>
KT_OP void fold(const typename I::f32 (&acc)[M][P][kVecs<I>], const S (&scale)[P], float unit,
                float* c) {
  using f32 = typename I::f32;
  for (int q = 0; q < P; ++q)
    for (int j = 0; j < kVecs<I>; ++j) {
      const f32 s = I::splat(unit) * scale[q].template of<I>(j * I::lanes);
      for (int i = 0; i < M; ++i) {
        float* p = c + i * kCols + q * kPanel + j * I::lanes;
        *(f32*)p = I::fma(s, acc[i][q][j], *(f32*)p);
      }
    }
}

// Packed bytes that are needed next, two runs of them: every second tile prefetches one, a line
// per step, so that memory delivers while the tiles multiply. Every 8 lines the address moves by
// `jump`.
struct Ahead {
  const uint8_t* run[2];
  int64_t jump;
};

// P of the `width` panels that lie side by side in unpacked lines b.
// `scales[q]`: [groups][16], times `unit`; `step` pairs per group.
template <class I, int M, int P, class S>
__attribute__((noinline)) void tile(const typename I::A* a, int64_t lda, const typename I::B* b,
                                    int64_t width, const S* scales, float unit, int64_t pairs,
                                    int64_t step, bool add, const uint8_t* ahead, int64_t jump,
                                    float* c) {
  constexpr int V = kVecs<I>;
  const typename I::A*
      row[(M + 2) / 3];  // every third row: the two after it are base + ld, base + 2 ld
  for (int i = 0; i < M; i += 3, a += 3 * lda) {
    row[i / 3] = a;
    asm("" : "+r"(a));  // or gcc computes them in vectors and scatters those
  }
  S scale[P];
  for (int q = 0; q < P; ++q) scale[q] = scales[q];
  if (!add) clear_c<I, M, P>(c);
  for (int64_t g = 0, p = 0; g < pairs; g += step) {
    typename I::f32 acc[M][P][V] = {};
    for (int64_t end = min64(pairs, g + step); p < end; ++p, b += width * V) {
      __builtin_prefetch(ahead + (p >> 3) * jump + (p & 7) * kAlign, 0, 2);
      for (int s = 0; s < I::steps; ++s) {  // so that few weights are in registers at once
        typename I::Operand w[P][V];
        for (int q = 0; q < P; ++q)
          for (int j = 0; j < V; ++j) w[q][j] = I::operand(b[q * V + j], s);
        for (int i = 0; i < M; ++i)
          for (int q = 0; q < P; ++q)
            for (int j = 0; j < V; ++j)
              acc[i][q][j] =
                  I::madd(acc[i][q][j], row[i / 3] + (i % 3) * lda + 2 * p, w[q][j], s, I{});
      }
    }
    // C is read from where it is: gcc otherwise keeps a second copy on the stack, which made a fold
    // three times as long.
    asm volatile("" : "+r"(c) : : "memory");
    fold<I, M, P>(acc, scale, unit, c);
    for (int q = 0; q < P; ++q) scale[q] = further(scale[q], kPanel);
  }
}

template <class I, int P, class S, int M = I::mr>
KT_OP void tile_rows(int64_t m, const typename I::A* a, int64_t lda, const typename I::B* b,
                     int64_t width, const S* scales, float unit, int64_t pairs, int64_t step,
                     bool add, const uint8_t* ahead, int64_t jump, float* c) {
  if (m == M)
    return tile<I, M, P>(a, lda, b, width, scales, unit, pairs, step, add, ahead, jump, c);
  if constexpr (M > 1)
    tile_rows<I, P, S, M - 1>(m, a, lda, b, width, scales, unit, pairs, step, add, ahead, jump, c);
}

// All rows over unpacked lines, in tiles of nearly equal height. An ISA with `matrix_tiles` is
// asked first: its matmul() does the whole product in its own order (codes as they are: unit 1),
// or returns false.
template <class I, int P, class S>
void dense(const Rows& a, const Line<I, P>* b, const S* scales, float unit, int64_t pairs,
           int64_t step, bool add, const Ahead& next, float* c) {
  if (!a.m) return;
  if constexpr (I::matrix_tiles)
    if (I::template matmul<P>(a, b, scales, pairs, step, add, c)) return;
  // Panels per tile: accumulators take at most three quarters of the registers.
  constexpr int N = 4 * I::mr * P * kVecs<I> <= 3 * I::registers ? P : 1;
  int64_t tiles = (a.m + I::mr - 1) / I::mr;
  S scale[P];
  for (int q = 0; q < P; ++q) {
    scale[q] = scales[q];
    if (!scales[q].at) set_ones(scale[q]);  // one group then
  }
  for (int q = 0; q < P; q += N)
    for (int64_t t = 0, i = 0; t < tiles; ++t) {
      int64_t rows = (a.m - i + tiles - t - 1) / (tiles - t);
      tile_rows<I, N, S>(rows, (const typename I::A*)a.a + i * a.ld, a.ld, b->v[q], P, scale + q,
                         unit, pairs, step, add, next.run[t & 1], next.jump,
                         c + i * kCols + q * kPanel);
      i += rows;
    }
}

template <class I, class F>
struct Driver : Transposed<I, F> {
  using typename Packing<I, F>::f32, typename Packing<I, F>::u32;
  using Packing<I, F>::V, Packing<I, F>::L, Packing<I, F>::lines, Packing<I, F>::scales,
      Packing<I, F>::zeros, Packing<I, F>::zeros_of, Packing<I, F>::group_pairs,
      Transposed<I, F>::unpack_across;
  using A = typename I::A;

  // What few() prefetches while it works on a line: the line kAhead further on in the order of
  // use. With two streams this reads 8 % more per second than the hardware's own prefetch
  // (bench/roofs.cpp). `skip`: from a panel's end to where this stream goes on.
  static constexpr int64_t kAhead = 4096;
  struct Stream {
    const uint8_t *line, *soon, *end;
  };
  KT_OP Stream stream(const uint8_t* lines, const Shape& s) {
    const int64_t bytes = s.kp * kPanel * F::bits / 8;
    return {lines, lines + min64(kAhead, bytes), lines + bytes};
  }
  KT_OP void prefetch(Stream& s, int64_t skip) {
    if (s.soon == s.end) s.soon += skip;
    __builtin_prefetch(s.soon);
    s.soon += kAlign;
  }
  // Two neighbouring panels: the next pair is behind the second.
  template <int P>
  KT_OP int64_t skip_of(const Packed* const* w, const int64_t* p) {
    const bool pair = P == 2 && w[0]->data == w[P - 1]->data && p[P - 1] == p[0] + 1;
    return pair ? panel_bytes(w[0]->shape, kStorage<F>) : 0;
  }

  struct Beside {  // the codes of a panel
    ScalesOf<F> scales;
    const uint8_t* zeros;
  };
  template <int M, int P>
  static __attribute__((noinline)) void few(const A* a, int64_t lda, const uint8_t* const* w,
                                            const Beside* beside, const Shape& shape, int64_t skip,
                                            bool add, float* c) {
    const int64_t pairs = shape.kp / 2, step = group_pairs(shape);
    // C stays in registers where they suffice: through memory, each group waits for the last one.
    constexpr bool hold = 4 * M * P * V <= I::registers;
    f32 total[M][P][V] = {};
    if (hold && add) load_c<I, M, P>(c, total);
    if (!hold && !add) clear_c<I, M, P>(c);
    Stream in[P];
    ScalesOf<F> scale[P];
    const uint8_t* zero[P];
    for (int q = 0; q < P; ++q) {
      in[q] = stream(w[q], shape);
      scale[q] = beside[q].scales, zero[q] = beside[q].zeros;
      if constexpr (!F::scaled) set_ones(scale[q]);
    }
    for (int64_t g = 0, p = 0; g < pairs; g += step) {
      f32 acc[M][P][V] = {};
      u32 z[P][V];
      for (int q = 0; q < P; ++q)
        for (int j = 0; j < V; ++j) z[q][j] = zeros_of(zero[q], 0, j);
      for (int64_t end = min64(pairs, g + step); p < end; p += F::pairs)
        for (int q = 0; q < P; ++q) {
          prefetch(in[q], skip);
          for (int j = 0; j < V; ++j) {
            typename I::B out[F::pairs];
            decode<I, F>(*(const u32*)(in[q].line + j * L * 4), z[q][j], out);
            for (int t = 0; t < F::pairs; ++t)
              for (int i = 0; i < M; ++i)
                acc[i][q][j] = I::dot(acc[i][q][j], a + i * lda + 2 * (p + t), out[t], I{});
          }
          in[q].line += kAlign;
        }
      if constexpr (hold) {
        for (int q = 0; q < P; ++q)
          for (int j = 0; j < V; ++j) {
            const f32 s = I::splat(F::template unit<I>) * scale[q].template of<I>(j * L);
            for (int i = 0; i < M; ++i) total[i][q][j] = I::fma(s, acc[i][q][j], total[i][q][j]);
          }
      } else {
        fold<I, M, P>(acc, scale, F::template unit<I>, c);
      }
      if (F::scaled)
        for (int q = 0; q < P; ++q) scale[q] = further(scale[q], kPanel);
      if (has_zeros<F>())
        for (int q = 0; q < P; ++q) zero[q] += kPanel;
    }
    if (hold) store_c<I, M, P>(total, c);
  }

  template <int P, int M = I::few>
  KT_OP void few_rows(const Rows& a, const uint8_t* const* w, const Beside* s, const Shape& shape,
                      int64_t skip, bool add, float* c) {
    if (a.m == M) {
      if constexpr (2 * M * P * V <= I::registers)
        return few<M, P>((const A*)a.a, a.ld, w, s, shape, skip, add, c);
      for (int q = 0; q < P; ++q)  // too many accumulators at once
        few<M, 1>((const A*)a.a, a.ld, w + q, s + q, shape, 0, add, c + q * kPanel);
      return;
    }
    if constexpr (M > 1) few_rows<P, M - 1>(a, w, s, shape, skip, add, c);
  }

  // Lines of one panel as unscaled bf16 pairs into column q of P-panel lines; `step` pairs per
  // group.
  template <int P>
  static void unpack(const uint8_t* line, const uint8_t* zero, int64_t step, int64_t pairs, int q,
                     Line<I, P>* dst) {
    if constexpr (has_zeros<F>()) {
      for (int64_t g = 0, p = 0; p < pairs; ++g, p += step, line += step / F::pairs * kAlign)
        unpack_group<P>(line, zero, g, min64(step, pairs - p), q, dst + p);
    } else {
      unpack_group<P>(line, zero, 0, pairs, q, dst);
    }
  }
  template <int P>
  KT_OP void unpack_group(const uint8_t* line, const uint8_t* zero, int64_t g, int64_t pairs, int q,
                          Line<I, P>* dst) {
    u32 z[V];
    for (int j = 0; j < V; ++j) z[j] = zeros_of(zero, g * kPanel, j);
    for (int64_t p = 0; p < pairs; p += F::pairs, line += kAlign)
      for (int j = 0; j < V; ++j) {
        typename I::B out[F::pairs];
        decode<I, F>(*(const u32*)(line + j * L * 4), z[j], out);
        for (int t = 0; t < F::pairs; ++t) dst[p + t].v[q][j] = out[t];
      }
  }

  // Pairs of a panel that are unpacked at once: a multiple of a group, small enough for unpacked
  // lines to stay in L1 while all rows are multiplied with them.
  KT_OP int64_t chunk_pairs(int64_t pairs, int64_t step) {
    if constexpr (I::matrix_tiles) return pairs;
    return min64(pairs, max64(step, 64 / step * step));
  }

  template <int P>
  static void nt_panels(const Rows& a, const Packed* const* w, const int64_t* p, bool add, float* c,
                        void* scratch) {
    const uint8_t* data[P];
    Beside beside[P];
    ScalesOf<F> scale[P];
    for (int q = 0; q < P; ++q) {
      data[q] = lines(*w[q], p[q]);
      beside[q] = {scales(*w[q], p[q]), zeros(*w[q], p[q])};
      scale[q] = beside[q].scales;
    }
    int64_t pairs = w[0]->shape.kp / 2, step = group_pairs(w[0]->shape);
    if (a.m <= I::few) return few_rows<P>(a, data, beside, w[0]->shape, skip_of<P>(w, p), add, c);
    auto* b = (Line<I, P>*)scratch;
    const int64_t ahead = panel_bytes(w[0]->shape, kStorage<F>) + skip_of<P>(w, p);
    const int64_t most = F::scaled ? chunk_pairs(pairs, step) : pairs;
    for (int64_t from = 0; from < pairs; from += most) {
      const int64_t n = min64(most, pairs - from), line = from / F::pairs * kAlign;
      for (int q = 0; q < P; ++q) {
        unpack<P>(data[q] + line, beside[q].zeros, step, n, q, b);
        if (from) scale[q] = further(scale[q], most / step * kPanel);
        if (has_zeros<F>()) beside[q].zeros += most / step * kPanel;
      }
      const Ahead next{{data[0] + line + ahead, data[P - 1] + line + ahead}, 8 * kAlign};
      const Rows part{(const A*)a.a + 2 * from, a.ld, a.m};
      dense<I, P>(part, b, scale, F::template unit<I>, n, step, add || from, next, c);
    }
  }

  static void nt(const Rows& a, const Packed* const* w, const int64_t* p, int count, bool add,
                 float* c, void* scratch) {
    if (a.m == 0) return;
    if (count == 2) return nt_panels<2>(a, w, p, add, c, scratch);
    nt_panels<1>(a, w, p, add, c, scratch);
  }

  template <int P>
  static void nt_of_panels(const Rows& a, const Matrix& w, int64_t panel, bool add, float* c,
                           void* lines, void* rows) {
    const int64_t kp = padded_rank(w.k);
    auto* b = (Line<I, P>*)lines;
    for (int q = 0; q < P; ++q)
      Packing<I, F>::round_panel(w, panel + q, kp, rows, [&](int64_t i, int j, u32 pairs) {
        b[i].v[q][j] = I::line(pairs);
      });
    const PlainScales none[P] = {};
    // Where rows are short, the next panels lie behind these.
    const auto* after = (const uint8_t*)w.src + (panel + P) * kPanel * w.rs * size_of(w.type);
    const Ahead next{{after, after + kp / 2 * kAlign}, w.rs == w.k ? 8 * kAlign : 0};
    dense<I, P>(a, b, none, 1.f, kp / 2, kp / 2, add, next, c);
  }
  static void nt_of(const Rows& a, const Matrix& w, int64_t panel, int count, bool add, float* c,
                    void* lines, void* rows) {
    if (count == 2) return nt_of_panels<2>(a, w, panel, add, c, lines, rows);
    nt_of_panels<1>(a, w, panel, add, c, lines, rows);
  }

  static void nn(const Rows& a, const Packed& w, int64_t col, bool add, float* c, void* scratch) {
    if (a.m == 0) return;
    auto* b = (Line<I, 2>*)scratch;
    const PlainScales none[2] = {};
    const int64_t count = panels(w.shape.n), most = chunk_pairs(count * kPanel / 2, 1) * 2 / kPanel;
    const int64_t bytes = panel_bytes(w.shape, kStorage<F>);
    for (int64_t p = 0; p < count; p += most) {
      const int64_t end = min64(count, p + most), pairs = (end - p) * kPanel / 2;
      unpack_across(w, col, p, end, 0, b);
      unpack_across(w, col + kPanel, p, end, 1, b);
      // A panel gives 8 pairs of n and kCols / (2 F::pairs) lines to these columns and to the next.
      const uint8_t* after = lines(w, p) + (col + kCols) / (2 * F::pairs) * kAlign;
      const Ahead next{{after, after + 8 * kAlign}, bytes};
      const Rows part{(const A*)a.a + p * kPanel, a.ld, a.m};
      dense<I, 2>(part, b, none, 1.f, pairs, pairs, add || p, next, c);
    }
  }

  static void transpose(const bf16* u, int64_t ld, int64_t m, int64_t mp, int64_t r, void* at) {
    A* dst = (A*)at;
    for (int64_t j = 0; j < r; ++j, dst += mp) {
      for (int64_t i = 0; i < m; ++i) dst[i] = I::a_of(u[i * ld + j]);
      for (int64_t i = m; i < mp; ++i) dst[i] = I::a_of(0);
    }
  }

  static void tn(const Rows& at, const bf16* v, int64_t ldv, const int32_t* rows, int64_t m,
                 int64_t col, int64_t cols, bool add, float* c, void* scratch) {
    auto* b = (Line<I, 2>*)scratch;
    bf16 edge[2][kCols] = {};
    const int64_t have = max64(0, min64(kCols, cols - col)), pairs = (m + 1) / 2;
    auto row = [&](int64_t i, int side) -> const bf16* {
      if (i >= m) {
        for (int64_t x = 0; x < kCols; ++x) edge[side][x] = 0;
        return edge[side];
      }
      const bf16* p = v + (rows ? rows[i] : i) * ldv + col;
      __builtin_prefetch(p + kCols, 0, 2);  // rows are too far apart to be seen as a stream
      if (have == kCols) return p;
      for (int64_t x = 0; x < have; ++x) edge[side][x] = p[x];
      return edge[side];
    };
    for (int64_t p = 0; p < pairs; ++p) {
      const bf16 *x = row(2 * p, 0), *y = row(2 * p + 1, 1);
      for (int q = 0; q < 2; ++q)
        for (int j = 0; j < V; ++j) {
          int64_t o = q * kPanel + j * L;
          b[p].v[q][j] = I::zip(I::load_bf16(x + o), I::load_bf16(y + o));
        }
    }
    const PlainScales none[2] = {};
    const Ahead nothing{{(const uint8_t*)v, (const uint8_t*)v}, 0};
    dense<I, 2>(at, b, none, 1.f, pairs, pairs, add, nothing, c);
  }

  static void gather(const bf16* src, int64_t ld, const int32_t* rows, int64_t m, int64_t k,
                     int64_t kp, void* out) {
    A* dst = (A*)out;
    for (int64_t i = 0; i < m; ++i, dst += kp) {
      const bf16* p = src + (rows ? rows[i] : i) * ld;
      int64_t j = 0;
      if constexpr (sizeof(A) == 2) {
        __builtin_memcpy(dst, p, size_t(k) * 2), j = k;
      } else {
        for (; j + L <= k; j += L) I::store_a(dst + j, p + j);
        for (; j < k; ++j) dst[j] = I::a_of(p[j]);
      }
      for (; j < kp; ++j) dst[j] = I::a_of(0);
    }
  }
};

}  // namespace
}  // namespace kt
