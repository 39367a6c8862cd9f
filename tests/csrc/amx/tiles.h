// Software model of AMX tiles, after the pseudo-code of Intel's instruction manual: palette 1,
// eight tiles of 16 rows x 64 bytes. Used by trap.cpp; tests only.
//
// Every operation checks what hardware checks and says how it faults. bf16 products are fp32
// multiply-adds in two chains (even and odd elements), denormals are zero, rounding to nearest.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace amx {

enum class Fault { kNone, kUndefined, kProtection };

struct State {
  alignas(64) uint8_t tile[8][16][64];
  int bytes[8], rows[8];  // configured shape of each tile
  int palette;            // 0: not configured, everything is zero
};

inline void release(State& s) { s = State{}; }

inline Fault load_config(State& s, const uint8_t* from) {
  uint8_t m[64];
  std::memcpy(m, from, 64);
  State next{};
  if (m[0] == 0) return s = next, Fault::kNone;
  bool reserved = m[0] != 1 || m[1] != 0;  // start_row != 0 only resumes interrupted loads
  for (int i = 2; i < 64; ++i)
    if (i < 16 || (i >= 32 && i < 48) || i >= 56) reserved |= m[i] != 0;
  if (reserved) return Fault::kProtection;
  next.palette = 1;
  for (int t = 0; t < 8; ++t) {
    const int bytes = m[16 + 2 * t] | m[17 + 2 * t] << 8, rows = m[48 + t];
    if (bytes > 64 || rows > 16 || (bytes == 0) != (rows == 0)) return Fault::kProtection;
    next.bytes[t] = bytes, next.rows[t] = rows;
  }
  s = next;
  return Fault::kNone;
}

inline void store_config(const State& s, uint8_t* to) {
  uint8_t m[64] = {};
  m[0] = uint8_t(s.palette);
  for (int t = 0; t < 8; ++t) m[16 + 2 * t] = uint8_t(s.bytes[t]), m[48 + t] = uint8_t(s.rows[t]);
  std::memcpy(to, m, 64);
}

inline bool usable(const State& s, int t) { return s.palette && s.rows[t] && s.bytes[t] % 4 == 0; }

inline Fault zero(State& s, int t) {
  if (!s.palette || !s.rows[t]) return Fault::kUndefined;
  std::memset(s.tile[t], 0, sizeof s.tile[t]);
  return Fault::kNone;
}

inline Fault load(State& s, int t, const uint8_t* p, int64_t stride) {
  if (!usable(s, t)) return Fault::kUndefined;
  std::memset(s.tile[t], 0, sizeof s.tile[t]);
  for (int r = 0; r < s.rows[t]; ++r) std::memcpy(s.tile[t][r], p + r * stride, size_t(s.bytes[t]));
  return Fault::kNone;
}

inline Fault store(const State& s, int t, uint8_t* p, int64_t stride) {
  if (!usable(s, t)) return Fault::kUndefined;
  for (int r = 0; r < s.rows[t]; ++r) std::memcpy(p + r * stride, s.tile[t][r], size_t(s.bytes[t]));
  return Fault::kNone;
}

// C [m][n] += A [m][k] B [k][n], in dwords; three different tiles whose shapes agree.
inline bool agree(const State& s, int c, int a, int b) {
  return c != a && c != b && a != b && usable(s, c) && usable(s, a) && usable(s, b) &&
         s.rows[c] == s.rows[a] && s.bytes[c] == s.bytes[b] && s.bytes[a] == 4 * s.rows[b];
}

// What an instruction leaves of its destination: nothing beyond the configured shape.
template <class T>
void put(State& s, int t, int row, const T (&v)[16]) {
  std::memset(s.tile[t][row], 0, 64);
  std::memcpy(s.tile[t][row], v, size_t(s.bytes[t]));
}

template <class TA, class TB>
Fault multiply_bytes(State& s, int c, int a, int b) {
  if (!agree(s, c, a, b)) return Fault::kUndefined;
  for (int m = 0; m < s.rows[c]; ++m) {
    int32_t sum[16];
    std::memcpy(sum, s.tile[c][m], 64);
    for (int k = 0; k < s.rows[b]; ++k)
      for (int j = 0; j < 4; ++j) {
        const int32_t x = TA(s.tile[a][m][4 * k + j]);
        for (int n = 0; n < 16; ++n)
          sum[n] = int32_t(uint32_t(sum[n]) + uint32_t(x * int32_t(TB(s.tile[b][k][4 * n + j]))));
      }
    put(s, c, m, sum);
  }
  return Fault::kNone;
}

inline float widen(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// The host's own multiply-add under the rounding of the instruction (the signal handler's MXCSR is
// its own: the kernel restores the program's).
inline Fault multiply_bf16(State& s, int c, int a, int b) {
  if (!agree(s, c, a, b)) return Fault::kUndefined;
  _mm_setcsr(0x9fc0);  // nearest, flush to zero, denormals are zero, all exceptions masked
  for (int m = 0; m < s.rows[c]; ++m) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int k = 0; k < s.rows[b]; ++k) {
      uint32_t x, y[16];
      std::memcpy(&x, &s.tile[a][m][4 * k], 4);
      std::memcpy(y, s.tile[b][k], 64);
      const float x0 = widen(x << 16), x1 = widen(x & 0xffff0000u);
      for (int n = 0; n < 16; ++n) {
        even[n] = __builtin_fmaf(x0, widen(y[n] << 16), even[n]);
        odd[n] = __builtin_fmaf(x1, widen(y[n] & 0xffff0000u), odd[n]);
      }
    }
    std::memcpy(sum, s.tile[c][m], 64);
    for (int n = 0; n < 16; ++n) sum[n] += even[n] + odd[n];
    put(s, c, m, sum);
  }
  return Fault::kNone;
}

}  // namespace amx
