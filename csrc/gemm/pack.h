// Packing a matrix into panels and back (panel.h), for every ISA and format.
#pragma once
#include "contracts.h"
#include "gemm/kernel.h"

namespace kt {
namespace {

template <class I>
constexpr int kVecs = int(kPanel) / I::lanes;  // vectors per panel line

// The scales of a panel from a group on, as fp32: times the channels' factors where there are any.
template <class T, bool Factor>
struct Scales {
  const T* at;
  template <class I>
  __attribute__((always_inline)) typename I::f32 of(int64_t lane) const {
    return load<I>(at + lane);
  }
  template <class I>
  KT_OP typename I::f32 load(const bf16* p) {
    return I::load_bf16(p);
  }
  template <class I>
  KT_OP typename I::f32 load(const float* p) {
    return *(const typename I::f32*)p;
  }
};
template <class T>
struct Scales<T, true> {
  const T* at;
  const float* factor;
  template <class I>
  __attribute__((always_inline)) typename I::f32 of(int64_t lane) const {
    return Scales<T, false>::template load<I>(at + lane) * *(const typename I::f32*)(factor + lane);
  }
};
template <class F>
using ScalesOf = Scales<typename ScaleOf<F>::type, has_factor<F>()>;
using PlainScales = Scales<bf16, false>;
// Of a group `scales` further on.
template <class S>
KT_OP S further(S s, int64_t scales) {
  s.at += scales;
  return s;
}
// Of the panel that begins `bytes` further on.
template <class T>
KT_OP Scales<T, false> next_panel(const Scales<T, false>& s, int64_t bytes) {
  return {s.at + bytes / int64_t(sizeof(T))};
}
template <class T>
KT_OP Scales<T, true> next_panel(const Scales<T, true>& s, int64_t bytes) {
  return {s.at + bytes / int64_t(sizeof(T)), s.factor + bytes / 4};
}

// Lanes of x whose number has bit S change places with those of y that have it not.
template <int S, class T>
KT_OP void exchange(T& x, T& y) {
  constexpr int L = int(sizeof(T) / sizeof(x[0]));
  T keep, take;
  for (int i = 0; i < L; ++i) keep[i] = i & S ? L + i - S : i, take[i] = i & S ? L + i : i + S;
  const T both = __builtin_shuffle(x, y, keep);
  y = __builtin_shuffle(x, y, take), x = both;
}
// One step of transposing squares of N x N lanes that lie side by side in N vectors.
template <int S, class T, int N>
KT_OP void butterfly(T (&v)[N]) {
  if constexpr (S < N)
    for (int i = 0; i < N; ++i)
      if (!(i & S)) exchange<S>(v[i], v[i + S]);
}
template <class T, int N>
KT_OP void transpose_squares(T (&v)[N]) {
  butterfly<1>(v);
  butterfly<2>(v);
  butterfly<4>(v);
  butterfly<8>(v);
}

template <class I, class F>
struct Packing {
  using f32 = typename I::f32;
  using u32 = typename I::u32;
  using u64 = typename I::u64;
  using Scale = typename ScaleOf<F>::type;
  static constexpr int V = kVecs<I>, L = I::lanes;

  // -- where the parts of a packed matrix lie -----------------------------------------------------
  KT_OP const uint8_t* panel(const Packed& w, int64_t p) {
    return w.data + p * panel_bytes(w.shape, kStorage<F>);
  }
  KT_OP const uint8_t* lines(const Packed& w, int64_t p) {
    return panel(w, p) + lines_at(w.shape, kStorage<F>);
  }
  // Of group g on.
  KT_OP ScalesOf<F> scales(const Packed& w, int64_t p, int64_t g = 0) {
    if constexpr (!F::scaled) return {};
    const uint8_t* from = panel(w, p);
    const auto* at = (const Scale*)(from + scales_at(kStorage<F>)) + g * kPanel;
    if constexpr (has_factor<F>())
      return {at, (const float*)from};
    else
      return {at};
  }
  // Zero points; null in formats without.
  KT_OP const uint8_t* zeros(const Packed& w, int64_t p) {
    if constexpr (!has_zeros<F>()) return nullptr;
    return panel(w, p) + zeros_at(w.shape, kStorage<F>);
  }
  // Those `first` further on in every byte of their channel's dword.
  KT_OP u32 zeros_of(const uint8_t* zero, int64_t first, int j) {
    if constexpr (!has_zeros<F>()) return u32{};
    const auto* at = (const typename I::u8*)(zero + first + j * L);
    return __builtin_convertvector(*at, u32) * 0x01010101u;
  }
  KT_OP int64_t group_pairs(const Shape& s) { return (F::scaled ? group_size(s) : s.kp) / 2; }

  // -- pack and unpack ----------------------------------------------------------------------------
  // v[k] = W[n, k] for k < s.k, zero up to kp.
  static void load_row(const void* src, DType t, int64_t first, int64_t cs, const Shape& s,
                       float* v) {
    const int64_t end = first + s.k * cs;
    if (t == DType::kBf16 && cs == 1) {  // the common checkpoint: a loop the compiler vectorises
      for (int64_t k = 0; k < s.k; ++k) v[k] = widen(((const bf16*)src)[first + k]);
    } else if (t == DType::kF32) {
      for (int64_t i = first, k = 0; i < end; i += cs) v[k++] = ((const float*)src)[i];
    } else {
      for (int64_t i = first, k = 0; i < end; i += cs) v[k++] = load_as_float(src, t, i);
    }
    for (int64_t k = s.k; k < s.kp; ++k) v[k] = 0;
  }

  // L channels that lie side by side in src, from element `at` on.
  KT_OP f32 load_channels(const void* src, DType t, int64_t at) {
    return t == DType::kF32 ? *(const f32*)((const float*)src + at)
                            : I::load_bf16((const bf16*)src + at);
  }
  // -- rounding to bf16 ---------------------------------------------------------------------------
  // put(i, j, pairs) gets pair i of k of channels [L j, L j + L) of a panel.
  //
  // A matrix that is transposed in memory: no value has to be moved between lanes. Those of the
  // next two panels are asked for, since rows lie far apart.
  template <class Put>
  KT_OP f32 round_across(const Matrix& w, int64_t channel, int64_t kp, Put put) {
    f32 bad = {};
    bf16 half[2][L];
    for (int64_t k = 0; k < kp; k += 2)
      for (int j = 0; j < V; ++j) {
        for (int64_t x = 0; x < 2; ++x) {
          f32 v = {};
          if (k + x < w.k) {
            const int64_t at = channel + j * L + (k + x) * w.cs;
            v = load_channels(w.src, w.type, at);
            __builtin_prefetch((const uint8_t*)w.src + (at + kCols) * size_of(w.type), 0, 2);
          }
          bad += v - v;
          I::store_bf16(half[x], v);
        }
        put(k / 2, j, (u32)I::load_bf16(half[0]) >> 16 | (u32)I::load_bf16(half[1]));
      }
    return bad;
  }
  // `count` values as bf16; NaN in `bad` or `odd` if any is not finite.
  KT_OP void round_values(const float* v, int64_t count, bf16* code, f32& bad, float& odd) {
    int64_t k = 0;
    for (; k + L <= count; k += L) {
      const f32 x = *(const f32*)(v + k);
      bad += x - x;
      I::store_bf16(code + k, x);
    }
    for (; k < count; ++k) odd += v[k] - v[k], code[k] = narrow(v[k]);
  }
  // The 16 rows of panel p as bf16 [16][kp], zero beyond the matrix.
  KT_OP void round_rows(const Matrix& w, int64_t p, int64_t kp, float* v, bf16* code, f32& bad,
                        float& odd) {
    const bool fp32 = w.type == DType::kF32 && w.cs == 1 && w.k == kp;
    if (fp32 && w.rs == kp && (p + 1) * kPanel <= w.n)  // one run of values
      return round_values((const float*)w.src + p * kPanel * kp, kPanel * kp, code, bad, odd);
    for (int64_t r = 0; r < kPanel; ++r, code += kp) {
      const int64_t n = p * kPanel + r;
      if (n >= w.n) {
        __builtin_memset(code, 0, size_t(kp) * 2);
        continue;
      }
      if (!fp32) load_row(w.src, w.type, n * w.rs, w.cs, {w.n, w.k, kp, 0}, v);
      round_values(fp32 ? (const float*)w.src + n * w.rs : v, kp, code, bad, odd);
    }
  }
  // Reads up to a vector past [16][kp].
  template <class Put>
  KT_OP void put_rows(const bf16* code, int64_t kp, Put put) {
    const auto* from = (const uint32_t*)code;
    const int64_t count = kp / 2;
    for (int64_t i = 0; i < count; i += L)
      for (int j = 0; j < V; ++j) {
        u32 square[L];
        for (int a = 0; a < L; ++a) square[a] = *(const u32*)(from + (j * L + a) * count + i);
        transpose_squares(square);
        for (int64_t a = 0; a < min64(L, count - i); ++a) put(i + a, j, square[a]);
      }
  }
  // Panel p of w; false if a value is not finite. scratch: pack_scratch() bytes.
  template <class Put>
  KT_OP bool round_panel(const Matrix& w, int64_t p, int64_t kp, void* scratch, Put put) {
    f32 bad = {};
    float odd = 0;
    if (w.rs == 1 && w.type != DType::kF16 && (p + 1) * kPanel <= w.n) {
      bad = round_across(w, p * kPanel, kp, put);
    } else {
      float* v = (float*)scratch;
      bf16* code = (bf16*)(v + kp);
      round_rows(w, p, kp, v, code, bad, odd);
      put_rows(code, kp, put);
    }
    for (int e = 0; e < L; ++e) odd += bad[e];
    return odd == 0;
  }
  // Formats without scales.
  static bool pack_plain(const Matrix& w, const Shape& s, int64_t p0, int64_t p1, uint8_t* dst,
                         void* scratch) {
    bool finite = true;
    for (int64_t p = p0; p < p1; ++p) {
      uint8_t* line = dst + p * panel_bytes(s, kStorage<F>);
      finite &= round_panel(w, p, s.kp, scratch, [&](int64_t i, int j, u32 pairs) {
        *(u32*)(line + i * kAlign + j * L * 4) = pairs;
      });
    }
    return finite;
  }

  static bool pack(const void* src, DType t, int64_t rs, int64_t cs, const Shape& s, int64_t p0,
                   int64_t p1, uint8_t* dst, void* scratch) {
    if constexpr (!F::scaled)
      return pack_plain({src, t, rs, cs, s.n, s.k}, s, p0, p1, dst, scratch);
    Channel to(s, scratch);
    float bad = 0;  // x - x is 0 for finite x and NaN otherwise
    for (int64_t p = p0; p < p1; ++p) {
      to.begin_panel(dst + p * panel_bytes(s, kStorage<F>));
      for (int64_t r = 0; r < kPanel; ++r) {
        if (int64_t n = p * kPanel + r; n < s.n) {
          load_row(src, t, n * rs, cs, s, to.v);
        } else {
          __builtin_memset(to.v, 0, size_t(s.kp) * 4);
        }
        for (int64_t k = 0; k < s.kp; ++k) bad += to.v[k] - to.v[k];
        to.choose(r);
        to.store(r);
      }
    }
    return bad == 0;
  }

  static bool pack_codes(const Codes& w, const Shape& s, int64_t p0, int64_t p1, uint8_t* dst,
                         void* scratch) {
    if constexpr (!F::scaled) return false;
    Channel to(s, scratch);
    bool good = true;
    for (int64_t p = p0; p < p1; ++p) {
      to.begin_panel(dst + p * panel_bytes(s, kStorage<F>));
      for (int64_t r = 0; r < kPanel; ++r) {
        __builtin_memset(to.v, 0, size_t(s.kp) * 4);
        to.choose(r);  // codes of zero, for what is beyond the matrix
        if (int64_t n = p * kPanel + r; n < s.n) good &= to.take(w, n, r);
        to.store(r);
      }
    }
    return good;
  }

  // One channel on its way into a panel.
  struct Channel {
    const Shape& s;
    float* v;        // [kp]: values, to choose codes for
    uint16_t* code;  // [kp]
    uint8_t* base = nullptr;

    Channel(const Shape& shape, void* scratch)
        : s(shape), v((float*)scratch), code((uint16_t*)(v + shape.kp)) {}
    void begin_panel(uint8_t* at) {
      base = at;
      __builtin_memset(base, 0, size_t(lines_at(s, kStorage<F>)));
    }
    Scale* scale(int64_t g, int64_t r) {
      return (Scale*)(base + scales_at(kStorage<F>)) + g * kPanel + r;
    }
    uint8_t* zero(int64_t g, int64_t r) { return base + zeros_at(s, kStorage<F>) + g * kPanel + r; }
    void put_scale(int64_t g, int64_t r, float x) {
      if constexpr (sizeof(Scale) == 4)
        *scale(g, r) = x;
      else
        *scale(g, r) = narrow(x);
    }
    // Codes, scales and what else there is, for v.
    void choose(int64_t r) {
      if constexpr (has_factor<F>()) {
        const float factor = F::factor(v, s.kp), inv = factor > 0 ? 1.f / factor : 0.f;
        ((float*)base)[r] = factor;
        for (int64_t k = 0; k < s.kp; ++k) v[k] *= inv;
      }
      const int64_t step = group_size(s);
      for (int64_t g = 0, k = 0; k < s.kp; ++g, k += step)
        put_scale(g, r, encode<F>(v + k, min64(step, s.kp - k), code + k, zero(g, r)));
    }
    // Those that are published for channel n; false if one is no number.
    bool take(const Codes& w, int64_t n, int64_t r) {
      bool good = true;
      const uint8_t* from = w.codes + n * w.rs;
      for (int64_t k = 0; k < s.k; ++k) {
        code[k] = from[k * w.cs];
        good &= code[k] >> F::bits == 0;
        if constexpr (requires { F::valid(code[k]); }) good &= F::valid(code[k]);
      }
      if constexpr (has_factor<F>()) {
        const float factor = w.factor ? w.factor[n * w.factor_rs] : 1.f;
        ((float*)base)[r] = factor;
        good &= factor - factor == 0;
      }
      for (int64_t g = 0; g * group_size(s) < s.k; ++g) {
        const float x = w.scales[n * w.scale_rs + g * w.scale_cs];
        put_scale(g, r, x * scale_of_code<F>());
        good &= x - x == 0;
        if constexpr (has_zeros<F>()) {
          const uint8_t z = w.zeros[n * w.zero_rs + g * w.zero_cs];
          *zero(g, r) = F::zero_byte(z);
          good &= F::valid_zero(z);
        }
      }
      if constexpr (has_zeros<F>())  // beyond the matrix, zero too
        for (int64_t k = s.k; k < s.kp; ++k) {
          const uint8_t z = w.zeros[n * w.zero_rs + (s.k - 1) / group_size(s) * w.zero_cs];
          code[k] = z < 15 ? z : 15;
        }
      return good;
    }
    void store(int64_t r) {
      constexpr int per_line = 2 * F::pairs;
      uint8_t* line = base + lines_at(s, kStorage<F>) + r * 4;
      for (int64_t k = 0; k < s.kp; k += per_line, line += kAlign) {
        const uint32_t d = F::dword(code + k);
        __builtin_memcpy(line, &d, 4);
      }
    }
  };

  static void unpack_panel(const Packed& w, int64_t p, float* out) {
    const Shape& s = w.shape;
    const uint8_t* line = lines(w, p);
    for (int64_t k = 0; k < s.kp; k += 2 * F::pairs, line += kAlign)
      for (int j = 0; j < V; ++j) {
        typename I::B pair[F::pairs];
        const int64_t g = F::scaled ? k / group_size(s) : 0;
        decode<I, F>(*(const u32*)(line + j * L * 4), zeros_of(zeros(w, p), g * kPanel, j), pair);
        f32 sc = I::splat(F::template unit<I>), factor = I::splat(1.f);
        if constexpr (F::scaled) {
          const auto at = scales(w, p, g);
          sc *= Scales<Scale, false>{at.at}.template of<I>(j * L);
          if constexpr (has_factor<F>()) factor = *(const f32*)(at.factor + j * L);
        }
        for (int x = 0; x < 2 * F::pairs; ++x) {
          // in this order: a code times a scale of few bits is exact
          f32 val = (x & 1 ? I::hi_of(pair[x / 2]) : I::lo_of(pair[x / 2])) * sc;
          if constexpr (has_factor<F>()) val *= factor;
          for (int i = 0; i < L && k + x < s.k; ++i)
            if (p * kPanel + j * L + i < s.n) out[(j * L + i) * s.k + k + x] = val[i];
        }
      }
  }
};

}  // namespace
}  // namespace kt
