// Vocabulary shared by every file of the core: element types, padding rules, dtype and activation
// codes.
//
// Invariants
//  - everything an ISA object sees here is a type, an enum, a constexpr or a static always-inline
//    function: ISA objects must not emit weak symbols, or the linker could pick AVX-512 code for
//    all.
//  - rows are row-major; `ld*` counts elements; sizes are int64_t.
#pragma once
#include <cstddef>
#include <cstdint>

#define KT_OP static inline __attribute__((always_inline))

namespace kt {

using bf16 = uint16_t;

constexpr int64_t kPanel = 16;  // output channels per panel: one zmm of fp32, one AMX tile row
constexpr int64_t kBlock =
    32;  // reduction padding of stored weights: one AMX bf16 tile, 4 int4 lines
constexpr int64_t kCols =
    32;  // columns of the fp32 scratch C that every matmul call fills: two panels
constexpr int64_t kRowBlock =
    192;  // rows per matmul call: 192 x 2048 bf16 (768 KB) stay in a 1 MB L2
constexpr int64_t kWaveRows = 4096;  // assignments per wave (route.h): 32 rows of each of 128
                                     // experts; h, dgate and dup of 768 values are then 19 MB
constexpr int64_t kAlign = 64;       // a cache line

enum class DType : int { kBf16 = 0, kF16 = 1, kF32 = 2 };
// Adding it to a float rounds that to a whole number, ties even, and leaves it in the low bits.
constexpr float kRoundMagic = 12582912.f;  // 1.5 * 2^23
// The largest code of two int8 digits, 256 a + b with both in [-127, 127].
constexpr float kTwoDigits = 127.f * 256.f + 127.f;

constexpr int64_t size_of(DType t) { return t == DType::kF32 ? 4 : 2; }  // bytes

// Gate activations: out = act(gate) * up.
enum class Act : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSigmoid = 4 };

KT_OP int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
KT_OP int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
KT_OP int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

KT_OP float widen(bf16 x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

// Round to nearest even; NaN stays NaN (adding the rounding bias could otherwise wrap it to zero).
KT_OP bf16 narrow(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  if (f != f) return bf16(0x7fc0 | (u >> 16 & 0x8000));
  return bf16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

KT_OP float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 1023, u;
  float f;
  if (exp == 31) {
    u = sign | 0x7f800000 | man << 13;
  } else if (exp) {
    u = sign | (exp + 112) << 23 | man << 13;
  } else {  // subnormal: man * 2^-24 is exact in fp32
    f = float(man) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  __builtin_memcpy(&f, &u, 4);
  return f;
}

KT_OP float load_as_float(const void* p, DType t, int64_t i) {
  if (t == DType::kBf16) return widen(static_cast<const bf16*>(p)[i]);
  if (t == DType::kF16) return half_to_float(static_cast<const uint16_t*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

}  // namespace kt
