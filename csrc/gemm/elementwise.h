// Elementwise work between the matrix products: gate activations forward and backward, narrowing,
// scattering, LoRA dropout. All run over fp32 C scratch [m][kCols] or bf16 rows.
//
// exp() is our own: ranges +-inf included, relative error < 2e-7, identical on every tier with the
// same multiply-add. silu(x) = x * (1 / (1 + exp(-x))), whose second factor its derivative needs
// too, is then exact in the limits: silu(200) = 200, silu(-200) = -0.
#pragma once
#include "gemm/pack.h"

namespace kt {
namespace {

template <class I>
struct Elementwise {
  using f32 = typename I::f32;
  using u32 = typename I::u32;
  using i32 = typename I::i32;
  static constexpr int L = I::lanes;

  // The polynomial is that of Cephes (Moshier), expf.c.
  KT_OP f32 exp(f32 x) {
    const f32 lo = I::splat(-104.f),
              hi = I::splat(89.f);  // exp underflows to 0 / overflows to inf there
    x = x < lo ? lo : x;
    x = x > hi ? hi : x;
    f32 n = x * I::splat(1.44269504f);
    f32 magic = I::splat(kRoundMagic);
    f32 k = (n + magic) - magic;
    f32 r = I::fma(k, I::splat(-0.693359375f), x);  // ln 2 in two parts: the first product is exact
    r = I::fma(k, I::splat(2.12194440e-4f), r);
    f32 p = I::splat(1.9875691500e-4f);
    p = I::fma(p, r, I::splat(1.3981999507e-3f));
    p = I::fma(p, r, I::splat(8.3334519073e-3f));
    p = I::fma(p, r, I::splat(4.1665795894e-2f));
    p = I::fma(p, r, I::splat(1.6666665459e-1f));
    p = I::fma(p, r, I::splat(5.0000001201e-1f));
    p = I::fma(p, r * r, r) + I::splat(1.f);
    i32 e = __builtin_convertvector(k, i32);
    i32 half = e >> 1;  // 2^e in two factors: e = 128 and subnormal results do not fit one exponent
    return p * (f32)((half + 127) << 23) * (f32)((e - half + 127) << 23);
  }
  KT_OP f32 sigmoid(f32 x) { return I::splat(1.f) / (I::splat(1.f) + exp(-x)); }

  // act(x) and its derivative. Only silu is vectorised; the others go through libm, lane by lane.
  KT_OP f32 act(Act a, f32 x) {
    if (a == Act::kSilu) return x * sigmoid(x);
    if (a == Act::kSigmoid) return sigmoid(x);
    f32 r;
    for (int i = 0; i < L; ++i) r[i] = act1(a, x[i]);
    return r;
  }
  KT_OP f32 act_grad(Act a, f32 x) {
    f32 s = sigmoid(x);
    if (a == Act::kSigmoid) return s * (I::splat(1.f) - s);
    if (a == Act::kSilu) {  // s (1 + x (1 - s)); x (1 - s) must not become inf * 0
      f32 far = I::splat(104.f), xc = x > far ? far : x;
      xc = xc < -far ? -far : xc;
      return s * I::fma(xc, I::splat(1.f) - s, I::splat(1.f));
    }
    f32 r;
    for (int i = 0; i < L; ++i) r[i] = act_grad1(a, x[i]);
    return r;
  }
  static float act1(Act a, float x) {
    if (a == Act::kRelu) return x > 0 ? x : x != x ? x : 0.f;
    if (a == Act::kGelu) return 0.5f * x * (1.f + __builtin_erff(x * 0.70710678f));
    return 0.5f * x * (1.f + __builtin_tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
  }
  static float act_grad1(Act a, float x) {
    if (a == Act::kRelu) return x > 0 ? 1.f : x != x ? x : 0.f;
    if (a == Act::kGelu)
      return 0.5f * (1.f + __builtin_erff(x * 0.70710678f)) +
             x * 0.39894228f * __builtin_expf(-0.5f * x * x);
    if (x > 20.f || x < -20.f) return x > 0 ? 1.f : 0.f;
    float t = __builtin_tanhf(0.79788456f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * 0.79788456f * (1.f + 0.134145f * x * x);
  }

  KT_OP void store_cols(bf16* p, f32 v, int64_t count) {
    if (count >= L) return I::store_bf16(p, v);
    for (int64_t i = 0; i < count; ++i) p[i] = narrow(v[i]);
  }
  KT_OP f32 load_cols(const bf16* p, int64_t count) {
    if (count >= L) return I::load_bf16(p);
    f32 r = {};
    for (int64_t i = 0; i < count; ++i) r[i] = widen(p[i]);
    return r;
  }

  static void gate_forward(Act a, const float* c, int64_t m, int64_t cols, bf16* gate, bf16* up,
                           int64_t ld, bf16* h, int64_t ldh) {
    for (int64_t i = 0; i < m; ++i, c += kCols) {
      if (gate) __builtin_prefetch(gate + i * ld + kPanel, 1, 2);
      if (gate) __builtin_prefetch(up + i * ld + kPanel, 1, 2);
      if (h) __builtin_prefetch(h + i * ldh + kPanel, 1, 2);
      for (int64_t j = 0; j < kPanel; j += L) {
        f32 g = *(const f32*)(c + j), u = *(const f32*)(c + kPanel + j);
        if (gate)
          store_cols(gate + i * ld + j, g, cols - j), store_cols(up + i * ld + j, u, cols - j);
        if (h) I::store_bf16(h + i * ldh + j, act(a, g) * u);
      }
    }
  }

  // A row's columns together, so that its cache lines and pages are touched once. Those of the next
  // columns are asked for: rows are too far apart for the hardware to see a stream, and waiting for
  // `gate` took 60 % of the time here.
  static void gate_backward(Act a, const float* c, int64_t m, int64_t cols, const bf16* gate,
                            const bf16* up, int64_t ld, const float* weight, bf16* dgate, bf16* dup,
                            bf16* h, int64_t ldo, float* dot, int64_t ldd) {
    for (int64_t i = 0; i < m; ++i, c += kCols) {
      __builtin_prefetch(gate + i * ld + kCols, 0, 2);
      __builtin_prefetch(up + i * ld + kCols, 0, 2);
      __builtin_prefetch(dgate + i * ldo + kCols, 1, 2);
      __builtin_prefetch(dup + i * ldo + kCols, 1, 2);
      for (int64_t p = 0; p < cols; p += kPanel) {
        f32 sum[kPanel / L];
        for (int64_t j = p; j < p + kPanel; j += L) {
          f32 g = load_cols(gate + i * ld + j, cols - j), u = load_cols(up + i * ld + j, cols - j);
          f32 raw = *(const f32*)(c + j), s = act(a, g), hv = s * u;
          f32 d = raw * I::splat(weight[i]);
          I::store_bf16(dgate + i * ldo + j, d * u * act_grad(a, g));
          I::store_bf16(dup + i * ldo + j, d * s);
          if (h) I::store_bf16(h + i * ldo + j, hv);
          sum[(j - p) / L] = raw * hv;
        }
        // by halves, which is one order whatever the lanes
        for (int64_t n = kPanel / L / 2; n > 0; n /= 2)
          for (int64_t j = 0; j < n; ++j) sum[j] += sum[j + n];
        dot[i * ldd + p / kPanel] = I::over_lanes(sum[0], [](f32 x, f32 y) { return x + y; });
      }
    }
  }

  static void narrow_rows(const float* c, int64_t m, int64_t cols, float scale, const float* weight,
                          bf16* dst, int64_t ld) {
    for (int64_t i = 0; i < m; ++i, c += kCols) {
      f32 s = I::splat(weight ? scale * weight[i] : scale);
      for (int64_t j = 0; j < cols; j += L)
        store_cols(dst + i * ld + j, *(const f32*)(c + j) * s, cols - j);
    }
  }

  static void scatter(const float* c, int64_t m, const int32_t* rows, const float* weight,
                      float* acc, int64_t ld) {
    for (int64_t i = 0; i < m; ++i, c += kCols) {
      f32 w = I::splat(weight ? weight[i] : 1.f);
      float* p = acc + rows[i] * ld;
      for (int64_t j = 0; j < kCols; j += L)
        *(f32*)(p + j) = I::fma(w, *(const f32*)(c + j), *(f32*)(p + j));
    }
  }

  // One block of a gradient: `count` values to or onto those at `out`.
  KT_OP void put(f32 v, int64_t count, bool onto, float* out) {
    if (count >= L && !onto && (uintptr_t)out % sizeof(f32) == 0) return I::stream(out, v);
    if (count >= L) return (void)(*(f32*)out = onto ? *(f32*)out + v : v);
    for (int64_t j = 0; j < count; ++j) out[j] = onto ? out[j] + v[j] : v[j];
  }
  static void put_block(const float* c, int64_t m, int64_t cols, bool transposed, bool onto,
                        float* out, int64_t ld) {
    if (!transposed) {
      for (int64_t i = 0; i < m; ++i, c += kCols, out += ld)
        for (int64_t j = 0; j < cols; j += L) put(*(const f32*)(c + j), cols - j, onto, out + j);
      return;
    }
    for (int64_t j = 0; j < cols; j += L)
      for (int64_t i = 0; i < m; i += L) {
        u32 square[L];
        for (int64_t a = 0; a < L; ++a)
          square[a] = i + a < m ? *(const u32*)(c + (i + a) * kCols + j) : u32{};
        transpose_squares(square);
        for (int64_t a = 0; a < min64(L, cols - j); ++a)
          put((f32)square[a], m - i, onto, out + (j + a) * ld + i);
      }
  }

  static void settle() { I::settle(); }

  static void add_rows(const float* src, int64_t m, float* c) {
    for (int64_t j = 0; j < m * kCols; j += L) *(f32*)(c + j) += *(const f32*)(src + j);
  }

  static void add_pairs(const float* src, int64_t m, bool add, float* c) {
    for (int64_t i = 0; i < m; ++i, src += 2 * kCols, c += kCols)
      for (int64_t j = 0; j < kCols; j += L) {
        const f32 sum = *(const f32*)(src + j) + *(const f32*)(src + kCols + j);
        *(f32*)(c + j) = add ? *(f32*)(c + j) + sum : sum;
      }
  }

  // Counter-based: a mask depends on its name, the projection and the element, never on the order
  // of work. The finalizers of splitmix64 (Steele, Lea, Flood 2014) and of MurmurHash3 (Appleby).
  KT_OP uint32_t row_key(const DropKey& key, uint64_t mask) {
    uint64_t z = mask + uint64_t(key.projection) * 0xD1B54A32D192ED03ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return uint32_t(z ^ z >> 31);
  }
  KT_OP bool keep(uint32_t row, int64_t element, uint32_t limit) {
    uint32_t h = row ^ uint32_t(element) * 0x9E3779B1u;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return ((h ^ h >> 16) >> 8) >= limit;  // 24 bits decide: p is met to 6e-8
  }
  KT_OP uint32_t drop_limit(const DropKey& key) { return uint32_t(key.p * 16777216.f); }

  static void drop_rows(const DropKey& key, const uint64_t* masks, const bf16* src, int64_t ld,
                        const int32_t* rows, int64_t m, int64_t k, bf16* dst, int64_t ldd) {
    const uint32_t limit = drop_limit(key);
    const float s = 1.f / (1.f - key.p);
    for (int64_t i = 0; i < m; ++i, dst += ldd) {
      const bf16* p = src + (rows ? rows[i] : i) * ld;
      uint32_t row = row_key(key, masks[i]);
      for (int64_t j = 0; j < k; ++j)
        dst[j] = keep(row, j, limit) ? narrow(widen(p[j]) * s) : bf16(0);
      for (int64_t j = k; j < ldd; ++j) dst[j] = 0;
    }
  }
  static void drop_add(const DropKey& key, const uint64_t* masks, const float* c, int64_t m,
                       int64_t col, float* acc) {
    const uint32_t limit = drop_limit(key);
    const float s = 1.f / (1.f - key.p);
    for (int64_t i = 0; i < m; ++i, c += kCols, acc += kCols) {
      uint32_t row = row_key(key, masks[i]);
      for (int64_t j = 0; j < kCols; ++j)
        if (keep(row, col + j, limit)) acc[j] += c[j] * s;
    }
  }
};

}  // namespace
}  // namespace kt
