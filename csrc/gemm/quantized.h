// The int8 domain of the driver: quantized rows times weight codes, exact 32-bit sums per group.
//
// Rows are quantized per group (Quantized::group, it divides the weights' group or a channel):
// scale = max / 127, codes rounded to nearest. Dot products of bytes take one side unsigned, as
// code
// + bias, and the sums start at -bias * (sum of the other side's codes in the group):
//   weights + F::bias  for any tier: sums of the row's codes, made with them; weights are unpacked
//   rows + 128         where a tier has it so (direct): whole bytes of weights are used as they
//   lie,
//                      and their sums are made once for all rows; nothing extra is stored
//   C = fma(weight scale, row scale * float(sum), C), groups ascending
// few() and tile() are again two loop orders of one arithmetic.
#pragma once
#include "gemm/driver.h"

namespace kt {
namespace {

template <class I, class F>
struct QuantizedDriver {
  using f32 = typename I::f32;
  using u32 = typename I::u32;
  using i32 = typename I::i32;
  using Quad = typename I::Quad;
  using D = Driver<I, F>;
  static constexpr int V = kVecs<I>, L = I::lanes;
  static constexpr bool direct = I::signed_bytes && F::raw_bytes;

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
                       int digits, void* codes, RowScale* scale, int32_t* start) {
    if (digits == 2) return quantize_rows<2>(src, ld, m, s, group, (Quad*)codes, scale, start);
    quantize_rows<1>(src, ld, m, s, group, (Quad*)codes, scale, start);
  }
  template <int D>
  KT_OP void quantize_rows(const bf16* src, int64_t ld, int64_t m, const Shape& s, int64_t group,
                           Quad* q, RowScale* scale, int32_t* start) {
    const int64_t count = (s.kp + group - 1) / group, quads = s.kp / 4;
    for (int64_t i = 0; i < m; ++i, src += ld, q += D * quads)
      for (int64_t g = 0; g < count; ++g) {
        const int64_t k0 = g * group, n = min64(group, s.kp - k0);
        auto values = [&](int64_t k) __attribute__((always_inline)) {
          return load_edge(src + k0 + k, s.k - k0 - k);
        };
        quantize_group<D>(values, n, q + k0 / 4, quads, scale + i * D * count + g,
                          start + i * D * count + g, count);
      }
  }
  // L values, the first `have` of them from p, zeros after.
  KT_OP f32 load_edge(const bf16* p, int64_t have) {
    if (have >= L) return I::load_bf16(p);
    bf16 edge[L] = {};
    for (int64_t e = 0; e < have; ++e) edge[e] = p[e];
    return I::load_bf16(edge);
  }
  // n values (a multiple of L, at most 128), values(k) the L from k on, as codes of D digits: digit
  // d goes to q + d * quads, its scale and start to [d * count]; the last is the lowest.
  template <int D>
  KT_OP void quantize_group(auto values, int64_t n, Quad* q, int64_t quads, RowScale* scale,
                            int32_t* start, int64_t count) {
    constexpr float whole_range = D == 2 ? kTwoDigits : 127.f;
    f32 v[128 / L];
    for (int64_t k = 0; k < n; k += L) v[k / L] = values(k);
    const float most = largest(v, n);
    float inv = most > 0 ? whole_range / most : 0.f;
    if (inv - inv != 0) inv = 0;  // subnormal values: codes 0
    // Adding kRoundMagic rounds to an integer, ties even, and leaves it in the low bits.
    int16_t whole[128];
    for (int64_t k = 0; k < n; k += L) {
      const f32 x = I::fma(v[k / L], I::splat(inv), I::splat(kRoundMagic));
      *(typename I::i16*)(whole + k) = __builtin_convertvector((i32)x, typename I::i16);
    }
    float unit = most / whole_range;
    shorten(unit);
    for (int d = D - 1; d >= 0; --d, unit *= 256.f) {
      int8_t code[128];
      for (int64_t k = 0; k < n; ++k) {
        code[k] = int8_t(whole[k]);
        whole[k] = int16_t(int16_t(whole[k] + 128) >> 8);
      }
      scale[d * count] = {unit, -kRoundMagic * unit};
      start[d * count] = kRoundMagicBits - put_codes(code, n, q + d * quads);
    }
  }
  // The largest size of n values; NaN if one is NaN or Inf: such a row must not come out finite.
  KT_OP float largest(const f32* v, int64_t n) {
    f32 top = {}, bad = {};
    for (int64_t k = 0; k < n; k += L) {
      const f32 x = v[k / L], size = (f32)((u32)x & 0x7fffffffu);
      top = size > top ? size : top;
      bad += x - x;
    }
    auto sum_of = [](auto a, auto b) __attribute__((always_inline)) { return a + b; };
    auto max_of = [](f32 a, f32 b) __attribute__((always_inline)) { return a > b ? a : b; };
    return I::over_lanes(top, max_of) + I::over_lanes(bad, sum_of);
  }
  // To 22 bits (RowScale).
  KT_OP void shorten(float& scale) {
    uint32_t bits;
    __builtin_memcpy(&bits, &scale, 4);
    bits &= ~3u;
    __builtin_memcpy(&scale, &bits, 4);
  }
  // Stores n codes; returns F::bias times their sum where sums of products need it.
  KT_OP int32_t put_codes(int8_t* code, int64_t n, Quad* q) {
    int32_t sum = 0;
    if constexpr (direct) {
      for (int64_t k = 0; k < n; ++k) code[k] ^= char(0x80);
    } else {
      for (int64_t k = 0; k < n; ++k) sum += code[k];
    }
    int64_t k = 0;
    for (; k + 4 * L <= n; k += 4 * L) I::quads(q + k / 4, code + k);
    for (; k < n; k += 4) q[k / 4] = I::quad(code + k);
    return F::bias * sum;
  }

  KT_OP i32 idot(i32 acc, u32 bytes, const Quad* q) {
    if constexpr (direct) return I::idot_signed(acc, bytes, q);
    if constexpr (F::bias <= 16) return I::idot_small(acc, bytes, q, I{});
    return I::idot(acc, bytes, q);
  }
  // A stored line as the bytes that idot takes.
  KT_OP void bytes_of(u32 line, u32 zero, u32 (&out)[F::quads]) {
    if constexpr (direct)
      out[0] = line;
    else
      bytes<I, F>(line, zero, out);
  }
  // 128 x (the weights of a line), which rows + 128 have too much.
  KT_OP i32 add_excess(i32 excess, u32 line) {
    constexpr Quad all{{char(0x80), char(0x80), char(0x80), char(0x80)}};
    return I::idot_signed(excess, line, &all);
  }
  // starts: of the group, [P][V] (direct).
  template <int M, int P>
  KT_OP void begin(i32 (&acc)[M][P][V], const Quantized& a, int64_t g, const i32* starts) {
    for (int i = 0; i < M; ++i)
      for (int q = 0; q < P; ++q)
        for (int j = 0; j < V; ++j) {
          if constexpr (direct)
            acc[i][q][j] = starts[q * V + j];
          else
            acc[i][q][j] = i32{} + a.start[i * a.groups + g];
        }
  }
  // float(sum) x the row's scale.
  KT_OP f32 scaled(i32 sum, const RowScale& r) {
    if constexpr (I::fused) return I::fma((f32)sum, I::splat(r.scale), I::splat(r.shift));
    return I::to_float(sum - kRoundMagicBits) * I::splat(r.scale);
  }
  template <int M, int P>
  KT_OP void fold(i32 (&acc)[M][P][V], const Quantized& a, int64_t g, const ScalesOf<F> (&scale)[P],
                  float* c) {
    for (int q = 0; q < P; ++q)
      for (int j = 0; j < V; ++j) {
        f32 s = scale[q].template of<I>(j * L);
        for (int i = 0; i < M; ++i) {
          float* p = c + i * kCols + q * kPanel + j * L;
          f32 sum = scaled(acc[i][q][j], a.scale[i * a.groups + g]);
          *(f32*)p = I::fma(s, sum, g ? *(f32*)p : f32{});
        }
      }
  }

  // A step of the fold with C in registers: see Driver::few.
  template <int M, int P>
  KT_OP void fold_in(const i32 (&acc)[M][P][V], const Quantized& a, int64_t g,
                     const ScalesOf<F> (&scale)[P], f32 (&total)[M][P][V]) {
    for (int q = 0; q < P; ++q)
      for (int j = 0; j < V; ++j) {
        f32 s = scale[q].template of<I>(j * L);
        for (int i = 0; i < M; ++i) {
          f32 sum = scaled(acc[i][q][j], a.scale[i * a.groups + g]);
          total[i][q][j] = I::fma(s, sum, total[i][q][j]);
        }
      }
  }
  // Folds group g, whose weight scales begin at `at`, into C: in registers (hold) or in memory.
  template <bool hold, int M, int P>
  KT_OP void end_group(i32 (&acc)[M][P][V], const Quantized& a, int64_t g,
                       const ScalesOf<F>* scales, int64_t at, f32 (&total)[M][P][V], float* c) {
    ScalesOf<F> s[P];
    for (int q = 0; q < P; ++q) s[q] = further(scales[q], at);
    if constexpr (hold)
      fold_in<M, P>(acc, a, g, s, total);
    else
      fold<M, P>(acc, a, g, s, c);
  }

  struct Block {  // of the reduction: groups [g0, g1), quads [k0, k1)
    int64_t g0, g1, k0, k1;
  };
  static constexpr int kUnroll = 4;
  struct Prefetch {  // lines from `at` on, rate / 2^16 of one per step; every 8 of them `jump`
                     // further
    const uint8_t* at;
    int64_t rate, jump;
  };
  // What tile t of `tiles` prefetches: the first half of them share the block's lines of run 0.
  KT_OP Prefetch prefetch(const uint8_t* const* run, int64_t t, int64_t tiles, const Block& b) {
    const int64_t half = (tiles + 1) / 2, of = t < half ? half : tiles - half,
                  lines = (b.k1 - b.k0) / F::quads, first = (t < half ? t : t - half) * lines / of;
    return {run[t >= half] + (b.k0 / F::quads + first) * kAlign, (1 << 16) / (F::quads * of),
            8 * kAlign};
  }
  // Weights of a block, from its first quad on: panel q of quad k at b[q] + k * step; what the sums
  // of its groups start at (direct).
  template <int P>
  struct Weights {
    const u32* b[P];
    int64_t step;
    const i32* starts;
    int64_t per_group;  // vectors of `starts`
  };
  // C goes on from the block before. Packed bytes needed next are prefetched, spread over the
  // steps: these are so short that a line in each would wait for memory.
  template <int M, int P>
  static __attribute__((noinline)) void tile(const Quantized& a, const Weights<P>& w,
                                             const ScalesOf<F>* scales, const Block& block,
                                             const Groups& n, const Prefetch& next, float* c) {
    // sums, C, two weights and a broadcast have to fit the registers
    constexpr bool hold = 2 * M * P * V + 3 <= I::registers;
    const Quad* row[(M + 2) / 3];
    for (int i = 0; i < M; i += 3) row[i / 3] = (const Quad*)a.codes + i * a.ld;
    f32 total[M][P][V] = {};
    if (hold && block.g0) load_c<I, M, P>(c, total);
    int64_t k = block.k0, of_scale = block.g0 % n.per_scale,
            scale = block.g0 / n.per_scale * kPanel;
    const u32* b[P];
    for (int q = 0; q < P; ++q) b[q] = w.b[q];
    const i32* starts = w.starts;
    for (int64_t g = block.g0; g < block.g1; ++g, starts += w.per_group) {
      i32 acc[M][P][V];
      begin<M, P>(acc, a, g, starts);
      // Groups are multiples of 8 quads. Unrolled, so that their ends are predicted.
      for (int64_t end = min64(block.k1, k + n.quads); k < end; k += kUnroll) {
        const int64_t line = (k - block.k0) * next.rate >> 16;
        __builtin_prefetch(next.at + (line >> 3) * next.jump + (line & 7) * kAlign, 0, 2);
        for (int u = 0; u < kUnroll; ++u) {
          for (int i = 0; i < M; ++i)
            for (int q = 0; q < P; ++q)
              for (int j = 0; j < V; ++j)
                acc[i][q][j] = idot(acc[i][q][j], b[q][j], row[i / 3] + (i % 3) * a.ld + k + u);
          for (int q = 0; q < P; ++q) b[q] += w.step;
        }
      }
      end_group<hold, M, P>(acc, a, g, scales, scale, total, c);
      if (++of_scale == n.per_scale) of_scale = 0, scale += kPanel;
    }
    if (hold) store_c<I, M, P>(total, c);
  }

  // As Driver::few. `n.per_scale` groups of a row share a weight scale.
  template <int M, int P>
  static __attribute__((noinline)) void few(const Quantized& a, const uint8_t* const* w,
                                            const ScalesOf<F>* scales, const uint8_t* const* zeros,
                                            const Shape& shape, int64_t skip, const Groups& n,
                                            float* c) {
    const int64_t quads = shape.kp / 4;
    constexpr bool hold = 4 * M * P * V <= I::registers;
    const Quad* codes = (const Quad*)a.codes;
    f32 total[M][P][V] = {};
    typename D::Stream in[P];
    for (int q = 0; q < P; ++q) in[q] = D::stream(w[q], shape);
    for (int64_t g = 0, k = 0, of_scale = 0, scale = 0; g < n.count; ++g) {
      i32 acc[M][P][V], excess[P][V] = {};
      const i32 whole[P * V] = {};
      begin<M, P>(acc, a, g, whole);
      u32 z[P][V];
      for (int q = 0; q < P; ++q)
        for (int j = 0; j < V; ++j) z[q][j] = D::zeros_of(zeros[q], scale, j);
      for (int64_t end = min64(quads, k + n.quads); k < end; k += F::quads)
        for (int q = 0; q < P; ++q) {
          D::prefetch(in[q], skip);
          for (int j = 0; j < V; ++j) {
            u32 bytes[F::quads];
            bytes_of(*(const u32*)(in[q].line + j * L * 4), z[q][j], bytes);
            if constexpr (direct) excess[q][j] = add_excess(excess[q][j], bytes[0]);
            for (int t = 0; t < F::quads; ++t)
              for (int i = 0; i < M; ++i)
                acc[i][q][j] = idot(acc[i][q][j], bytes[t], codes + i * a.ld + k + t);
          }
          in[q].line += kAlign;
        }
      if constexpr (direct)
        for (int i = 0; i < M; ++i)
          for (int q = 0; q < P; ++q)
            for (int j = 0; j < V; ++j) acc[i][q][j] += kRoundMagicBits - excess[q][j];
      end_group<hold, M, P>(acc, a, g, scales, scale, total, c);
      if (++of_scale == n.per_scale) of_scale = 0, scale += kPanel;
    }
    if (hold) store_c<I, M, P>(total, c);
  }

  static Quantized rows_from(const Quantized& a, int64_t i) {
    Quantized r = a;
    r.codes = (const Quad*)a.codes + i * a.ld;
    r.scale += i * a.groups, r.start += i * a.groups;
    return r;
  }

  template <int P, int M>
  KT_OP void tile_rows(int64_t m, const Quantized& a, const Weights<P>& w, const ScalesOf<F>* s,
                       const Block& block, const Groups& n, const Prefetch& next, float* c) {
    if (m == M) return tile<M, P>(a, w, s, block, n, next, c);
    if constexpr (M > 1) tile_rows<P, M - 1>(m, a, w, s, block, n, next, c);
  }
  template <int P, int M>
  KT_OP void few_rows(const Quantized& a, const uint8_t* const* w, const ScalesOf<F>* s,
                      const uint8_t* const* z, const Shape& shape, int64_t skip, const Groups& n,
                      float* c) {
    if (a.m == M) {
      if constexpr (2 * M * P * V <= I::registers) return few<M, P>(a, w, s, z, shape, skip, n, c);
      for (int q = 0; q < P; ++q) few<M, 1>(a, w + q, s + q, z + q, shape, 0, n, c + q * kPanel);
      return;
    }
    if constexpr (M > 1) few_rows<P, M - 1>(a, w, s, z, shape, skip, n, c);
  }

  template <int P>
  static void panels_of(const Quantized& a, const Packed* const* w, const int64_t* p, float* c,
                        void* scratch) {
    const uint8_t* data[P];
    const uint8_t* zeros[P];
    ScalesOf<F> scale[P];
    for (int q = 0; q < P; ++q) {
      data[q] = D::lines(*w[q], p[q]);
      scale[q] = D::scales(*w[q], p[q]), zeros[q] = D::zeros(*w[q], p[q]);
    }
    const Shape& s = w[0]->shape;
    const int64_t quads = s.kp / 4;
    const Groups n = groups_of(s, a.group);
    if (a.m <= I::few)
      return few_rows<P, I::few>(a, data, scale, zeros, s, D::template skip_of<P>(w, p), n, c);
    if constexpr (I::matrix_tiles) {  // exact sums: the same bits as below
      auto* b = (Bytes<P>*)scratch;
      for (int q = 0; q < P; ++q) unpack<P>(data[q], zeros[q], s, {0, n.count, 0, quads}, q, b);
      if (I::template matmul8<P>(a, b, scale, quads, n.quads, n.per_scale, c)) return;
    }
    // Blocks of 512 quads (64 KB of two panels, in the L2 cache): each begins and ends a tile, with
    // C through memory and branches of which no two tiles are alike; blocks of 128, which stay in
    // L1, cost 8 % of a prefill.
    const int64_t step = max64(1, 512 / n.quads), bytes = panel_bytes(s, kStorage<F>);
    for (int64_t g = 0; g < n.count; g += step) {
      const int64_t end = min64(n.count, g + step);
      const Block block{g, end, g * n.quads, min64(quads, end * n.quads)};
      const uint8_t* const run[2] = {data[0] + bytes, data[P - 1] + bytes};
      auto next = [&](int64_t t, int64_t tiles) { return prefetch(run, t, tiles, block); };
      if constexpr (direct) {
        i32 starts[kStarts * P * V];
        Weights<P> weights{{}, V, starts, P * V};
        for (int q = 0; q < P; ++q) {
          weights.b[q] = (const u32*)(data[q] + block.k0 * kAlign);
          begin_sums(weights.b[q], block, n, starts + q * V, P * V);
        }
        rows_times<P>(a, weights, scale, block, n, next, c);
      } else {
        auto* b = (Bytes<P>*)scratch;
        for (int q = 0; q < P; ++q) unpack<P>(data[q], zeros[q], s, block, q, b);
        Weights<P> weights{{}, P * V, nullptr, 0};
        for (int q = 0; q < P; ++q) weights.b[q] = b->v[q];
        rows_times<P>(a, weights, scale, block, n, next, c);
      }
    }
  }
  static constexpr int kStarts = 64;  // groups of a block: at least 8 quads each

  // What sums over the groups of a block start at where rows are unsigned: one panel's.
  KT_OP void begin_sums(const u32* line, const Block& block, const Groups& n, i32* starts,
                        int64_t step) {
    for (int64_t g = block.g0, k = block.k0; g < block.g1; ++g, starts += step) {
      i32 excess[kUnroll][V] = {};  // a chain each: one alone would wait for its last result
      for (int64_t end = min64(block.k1, k + n.quads); k < end; k += kUnroll, line += kUnroll * V)
        for (int u = 0; u < kUnroll; ++u)
          for (int j = 0; j < V; ++j) excess[u][j] = add_excess(excess[u][j], line[u * V + j]);
      for (int j = 0; j < V; ++j)
        starts[j] = kRoundMagicBits - (excess[0][j] + excess[1][j]) - (excess[2][j] + excess[3][j]);
    }
  }

  // Lines of one panel as unsigned bytes into column q of b.
  template <int P>
  KT_OP void unpack(const uint8_t* data, const uint8_t* zeros, const Shape& s, const Block& block,
                    int q, Bytes<P>* b) {
    if constexpr (has_zeros<F>()) {
      const int64_t group = group_size(s) / 4;
      for (int64_t k = block.k0, end; k < block.k1; b += end - k, k = end) {
        end = min64(block.k1, (k / group + 1) * group);
        unpack_group<P>(data, zeros, k / group, k, end, q, b);
      }
    } else {
      unpack_group<P>(data, zeros, 0, block.k0, block.k1, q, b);
    }
  }
  template <int P>
  KT_OP void unpack_group(const uint8_t* data, const uint8_t* zeros, int64_t g, int64_t k,
                          int64_t end, int q, Bytes<P>* b) {
    const uint8_t* line = data + k / F::quads * kAlign;
    u32 z[V];
    for (int j = 0; j < V; ++j) z[j] = D::zeros_of(zeros, g * kPanel, j);
    for (; k < end; k += F::quads, line += kAlign, b += F::quads)
      for (int j = 0; j < V; ++j) {
        u32 bytes[F::quads];
        bytes_of(*(const u32*)(line + j * L * 4), z[j], bytes);
        for (int t = 0; t < F::quads; ++t) b[t].v[q][j] = bytes[t];
      }
  }

  // All rows, in tiles of nearly equal height. next(t, tiles): what tile t prefetches.
  template <int P>
  KT_OP void rows_times(const Quantized& a, const Weights<P>& all, const ScalesOf<F>* scale,
                        const Block& block, const Groups& n, auto next, float* c) {
    constexpr int N = 4 * I::mr8 * P * V <= 3 * I::registers ? P : 1;  // panels per tile
    const int64_t tiles = (a.m + I::mr8 - 1) / I::mr8;
    for (int q = 0; q < P; q += N) {
      Weights<N> w{{}, all.step, direct ? all.starts + q * V : nullptr, all.per_group};
      for (int x = 0; x < N; ++x) w.b[x] = all.b[q + x];
      for (int64_t t = 0, i = 0; t < tiles; ++t) {
        const int64_t rows = (a.m - i + tiles - t - 1) / (tiles - t);
        tile_rows<N, I::mr8>(rows, rows_from(a, i), w, scale + q, block, n, next(t, tiles),
                             c + i * kCols + q * kPanel);
        i += rows;
      }
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
