// flags: -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mavx512bf16 -mfma -mamx-tile -mamx-int8 -mamx-bf16
// cpu: avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_vbmi avx512_bf16 fma amx_tile amx_int8 amx_bf16
// Matrix tiles for many rows: tdpbf16ps, and tdpbsud (signed codes x unsigned weight bytes). Few
// rows, small products, decoding and everything elementwise are avx512_bf16's.
//
// An unpacked line is a row of a B tile as it stands (16 channels x one dword; the panels beside it
// make the stride 64 P bytes), rows of A are rows of an A tile. All eight tiles are in use:
//   tmm0..3 sums of 2 row tiles x 2 panels | tmm4,5 A | tmm6,7 B
// so each loaded tile is multiplied twice: 4 loads (8 cycles each) hide behind 4 products (16
// each). Loops: chunk of the reduction (a scale group, or kChunk) > row tiles > steps. A chunk of B
// stays in L1 (48 KB) for all rows, only A streams from L2: 2 KB per 64 cycles of products, where B
// too would make it 4 KB, more than L2 gives. Sums wait in C between chunks. Rows are cut into
// tiles of one height, so that one configuration serves a product whatever its row count, and
// nothing beyond A and C is touched: the last tile starts early enough to be whole and repeats rows
// of the one before it.
#pragma once
#include "gemm/kernel.h"
#include "isa/avx512_bf16.h"

namespace kt {
namespace {
namespace tmm {
// Own asm: gcc 12's intrinsics declare neither the memory they read nor the whole configuration.
template <int T, int Offset = 0>
KT_OP void load(const void* p, int64_t stride) {
  asm volatile("tileloadd %c3(%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T), "i"(Offset)
               : "memory");
}
template <int T>
KT_OP void store(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
KT_OP void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <bool Int8, int C, int A, int B>
KT_OP void product() {
  if constexpr (Int8) {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  } else {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
}
// Sums and A of `rows` rows; A and B of `depth` dwords along the reduction.
KT_OP void configure(int64_t rows, int64_t depth) {
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } c = {};
  c.palette = 1;
  for (int t = 0; t < 8; ++t) {
    c.bytes[t] = uint16_t(t == 4 || t == 5 ? 4 * depth : 64);
    c.rows[t] = uint8_t(t < 6 ? rows : depth);
  }
  asm volatile("ldtilecfg %0" ::"m"(c));
}
KT_OP void release() { asm volatile("tilerelease"); }

// Sums of R row tiles (`next` bytes apart in A) x P panels += `steps` tiles of A and B.
template <bool Int8, int R, int P>
KT_OP void multiply(const uint8_t* a, int64_t next, int64_t lda, const uint8_t* b, int64_t steps,
                    int64_t depth) {
  for (const uint8_t* a1 = a + next; steps > 0; --steps) {
    load<4>(a, lda);
    if constexpr (R > 1) load<5>(a1, lda);
    load<6>(b, kAlign * P);
    if constexpr (P > 1) load<7, kAlign>(b, kAlign * P);
    product<Int8, 0, 4, 6>();
    if constexpr (P > 1) product<Int8, 1, 4, 7>();
    if constexpr (R > 1) product<Int8, 2, 5, 6>();
    if constexpr (R > 1 && P > 1) product<Int8, 3, 5, 7>();
    a += 4 * depth, a1 += 4 * depth, b += kAlign * P * depth;
  }
}
// The sums of R x P tiles: zero, from or to fp32 or int32 rows of kCols.
template <int R, int P>
KT_OP void zero_sums() {
  zero<0>();
  if constexpr (P > 1) zero<1>();
  if constexpr (R > 1) zero<2>();
  if constexpr (R > 1 && P > 1) zero<3>();
}
template <int R, int P>
KT_OP void load_sums(const float* c, int64_t next) {
  load<0>(c, kCols * 4);
  if constexpr (P > 1) load<1>(c + kPanel, kCols * 4);
  if constexpr (R > 1) load<2>(c + next, kCols * 4);
  if constexpr (R > 1 && P > 1) load<3>(c + next + kPanel, kCols * 4);
}
template <int R, int P, class T>
KT_OP void store_sums(T* c, int64_t next) {
  store<0>(c, kCols * 4);
  if constexpr (P > 1) store<1>(c + kPanel, kCols * 4);
  if constexpr (R > 1) store<2>(c + next, kCols * 4);
  if constexpr (R > 1 && P > 1) store<3>(c + next + kPanel, kCols * 4);
}

// m rows as tiles of `rows` rows.
struct Cut {
  int64_t m, tiles, rows;
  explicit Cut(int64_t n) : m(n), tiles((n + 15) / 16), rows((n + tiles - 1) / tiles) {}
  int64_t start(int64_t t) const { return min64(t * rows, m - rows); }
};
// f<R>(t) for tiles t .. t + R - 1. An odd one comes first: the tile that repeats rows is then
// always in one block with the tile it repeats, and both load their sums before either stores.
template <class F>
KT_OP void blocks(const Cut& cut, F f) {
  int64_t t = cut.tiles % 2;
  if (t) f.template operator()<1>(0);
  for (; t < cut.tiles; t += 2) f.template operator()<2>(t);
}
// f(row of the block's sums, row of C) for the rows of a block, each once.
template <int R, class F>
KT_OP void rows_of(const Cut& cut, int64_t t, F f) {
  for (int r = 0; r < R; ++r) {
    const int64_t begin = cut.start(t + r);
    for (int64_t i = (t + r) * cut.rows - begin; i < cut.rows; ++i) f(16 * r + i, begin + i);
  }
}
}  // namespace tmm

struct Isa_amx : Isa_avx512_bf16 {
  static constexpr const char* name = "amx";
  static constexpr const char* slow_on = "";
  static constexpr bool matrix_tiles = true;   // matmul and matmul8 below; see dense() in driver.h
  static constexpr bool signed_bytes = false;  // tdpbssd takes the codes of both sides as they are
  static constexpr int64_t kChunk = 128;       // pairs: 16 KB of B, and 16 KB of A pass beside it
  // Vector products that tiles must replace, from counted instructions (no CPU with AMX was at
  // hand): ldtilecfg and tilerelease are taken as 217 cycles (204 + 13, Intel's optimization
  // manual), the latency of one load, product and store as 120, so the break-even is where vectors
  // need about 1,350 instructions, four a cycle. 16 rows x 8 pairs x 2 panels are 256 vdpbf16ps in
  // 1,428 instructions; tiles take 160. For 32 rows x 2048 x 32 columns a configuration is 5 % of
  // the products' 4,096 cycles, for kRowBlock rows 1 %.
  static constexpr int64_t kTileWork = 256;

  // C (+)= A x lines, as dense(); false: too little work for a tile configuration.
  template <int P, class S>
  static bool matmul(const Rows& a, const void* lines, const S* scales, int64_t pairs, int64_t step,
                     bool add, float* c) {
    if (a.m * pairs * P < kTileWork) return false;
    const tmm::Cut cut(a.m);
    if (scales[0].at) {
      const int64_t depth = common_depth(pairs, step);
      tmm::configure(cut.rows, depth);
      for (int64_t p = 0; p < pairs; p += step)
        scaled_group<P>(a, cut, lines, scales, p, min64(step, pairs - p), p / step, depth,
                        add || p > 0, c);
    } else {
      const int64_t tail = pairs % 16, whole = pairs - tail;
      if (whole) tmm::configure(cut.rows, 16);
      for (int64_t p = 0; p < whole; p += kChunk)
        chunk<P>(a, cut, lines, p, min64(kChunk, whole - p) / 16, 16, add || p > 0, c);
      if (tail) tmm::configure(cut.rows, tail);
      if (tail) chunk<P>(a, cut, lines, whole, 1, tail, add || whole, c);
    }
    tmm::release();
    return true;
  }

  // The same in the int8 domain: `step` quads per group of a row, `per_scale` groups per scale.
  template <int P, class S>
  static bool matmul8(const Quantized& a, const void* bytes, const S* scales, int64_t quads,
                      int64_t step, int64_t per_scale, float* c) {
    if (a.m * quads * P < kTileWork) return false;
    const tmm::Cut cut(a.m);
    const int64_t depth = common_depth(quads, step);
    tmm::configure(cut.rows, depth);
    for (int64_t k = 0, g = 0; k < quads; k += step, ++g) {
      f32 s[P];
      for (int q = 0; q < P; ++q)
        s[q] = further(scales[q], g / per_scale * kPanel).template of<Isa_amx>(0);
      tmm::blocks(cut, [=]<int R>(int64_t t) {
        alignas(64) int32_t sums[32][kCols];
        multiply<true, R, P>((const uint8_t*)a.codes, a.ld * 4, cut, t, bytes, k,
                             min64(step, quads - k) / depth, depth);
        tmm::store_sums<R, P>(sums[0], 16 * kCols);
        tmm::rows_of<R>(cut, t, [=, &sums](int64_t from, int64_t row) {
          const int64_t at = row * a.groups + g;
          for (int q = 0; q < P; ++q) {
            float* to = c + row * kCols + q * kPanel;
            const f32 sum = (f32)(*(const i32*)&sums[from][q * kPanel] + a.start[at]);
            const f32 scaled = fma(splat(a.scale[at].scale), sum, splat(a.scale[at].shift));
            *(f32*)to = fma(s[q], scaled, g ? *(f32*)to : f32{});
          }
        });
      });
    }
    tmm::release();
    return true;
  }

 private:
  // Dwords per tile when a reduction of `total` is cut into groups of `step`.
  KT_OP int64_t common_depth(int64_t total, int64_t step) {
    int64_t depth = 16;
    while (total % depth || (step < total && step % depth)) depth /= 2;
    return depth;
  }

  // Sums of row tiles t .. t + R - 1 over `steps` tiles from dword k of the reduction.
  template <bool Int8, int R, int P, bool Continue = false>
  KT_OP void multiply(const uint8_t* a, int64_t lda, const tmm::Cut& cut, int64_t t,
                      const void* lines, int64_t k, int64_t steps, int64_t depth) {
    const int64_t row = cut.start(t), next = R > 1 ? cut.start(t + 1) - row : 0;
    if constexpr (!Continue) tmm::zero_sums<R, P>();
    tmm::multiply<Int8, R, P>(a + row * lda + 4 * k, next * lda, lda,
                              (const uint8_t*)lines + k * P * kAlign, steps, depth);
  }

  // Unscaled: sums go on from C, so chunks do not show in the result.
  template <int P>
  KT_OP void chunk(const Rows& a, const tmm::Cut& cut, const void* lines, int64_t p, int64_t steps,
                   int64_t depth, bool add, float* c) {
    tmm::blocks(cut, [=]<int R>(int64_t t) {
      const int64_t row = cut.start(t), next = R > 1 ? (cut.start(t + 1) - row) * kCols : 0;
      float* to = c + row * kCols;
      if (add) {
        tmm::load_sums<R, P>(to, next);
      } else {
        tmm::zero_sums<R, P>();
      }
      multiply<false, R, P, true>((const uint8_t*)a.a, a.ld * 2, cut, t, lines, p, steps, depth);
      tmm::store_sums<R, P>(to, next);
    });
  }

  // C = fma(scale, sum of the group, C).
  template <int P, class S>
  KT_OP void scaled_group(const Rows& a, const tmm::Cut& cut, const void* lines, const S* scales,
                          int64_t p, int64_t pairs, int64_t g, int64_t depth, bool add, float* c) {
    f32 s[P];
    for (int q = 0; q < P; ++q) s[q] = further(scales[q], g * kPanel).template of<Isa_amx>(0);
    tmm::blocks(cut, [=]<int R>(int64_t t) {
      alignas(64) float sums[32][kCols];
      multiply<false, R, P>((const uint8_t*)a.a, a.ld * 2, cut, t, lines, p, pairs / depth, depth);
      tmm::store_sums<R, P>(sums[0], 16 * kCols);
      tmm::rows_of<R>(cut, t, [=, &sums](int64_t from, int64_t row) {
        for (int q = 0; q < P; ++q) {
          float* to = c + row * kCols + q * kPanel;
          *(f32*)to = fma(s[q], *(const f32*)&sums[from][q * kPanel], add ? *(f32*)to : f32{});
        }
      });
    });
  }
};
}  // namespace
}  // namespace kt
