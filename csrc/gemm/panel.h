// The one packed layout of a weight matrix W [n, k], the same for every ISA and for both passes.
//
// W is cut into panels of 16 output channels. A panel is, each part padded to 64 bytes and absent
// in formats that have none of it (Storage),
//   factors: fp32 [16], a second scale of whole channels
//   scales: bf16 or fp32 [groups][16]
//   zeros: bytes [groups][16], zero points as the format keeps them
//   lines:  64 bytes each, 16 channels x 1 dword; a line holds `32 / bits` values of k per channel.
// Order of k inside a dword (chosen so that masks and shifts give whole bf16 pairs (k, k+1)):
//   bf16 : k0 k1                        one pair
//   int8 : bytes   k0 k2 k1 k3          even bytes -> pair (k0,k1), odd bytes -> (k2,k3)
//   4-bit: low nibbles k0 k2 k1 k3, high nibbles k4 k6 k5 k7 of bytes 0..3
//          -> x, x>>8, x>>4, x>>12 hold the pairs (k0,k1) (k2,k3) (k4,k5) (k6,k7) in their low
//          nibbles
// So activations in the bf16 domain keep their natural order; an int8-domain kernel permutes the
// quantized activations by (0 2 1 3) when it quantizes them.
// k is padded to `kp` (a multiple of kBlock for stored weights) and n to a multiple of 16, with
// code 0 and scale 0. Groups are multiples of kBlock; the last one may be short; group 0 = per
// channel.
#pragma once
#include "kt.h"

namespace kt {

// What a format keeps of a value, and beside values.
struct Storage {
  int bits;        // of a code
  int scale_size;  // bytes of a scale: 2 (bf16), 4 (fp32), 0 (none)
  bool zeros, factor;
  bool scaled() const { return scale_size > 0; }
};

struct Shape {
  int64_t n, k, kp;  // channels, reduction, padded reduction
  int64_t group;     // values of k per scale; 0: one scale per channel
};

struct Packed {
  const uint8_t* data;
  Shape shape;
};

KT_OP Shape stored_shape(int64_t n, int64_t k, int64_t group) {
  return {n, k, round_up(k, kBlock), group};
}

// A matrix [n, k] as it lies in memory, such as a LoRA factor: element (i, j) at src[i*rs + j*cs].
struct Matrix {
  const void* src;
  DType type;
  int64_t rs, cs, n, k;
};
// A matrix [n, k] as it is published in codes of a format: strides are of elements, in any order.
// zeros and factor are null in formats without.
struct Codes {
  const uint8_t* codes;  // [n, k], one a byte
  int64_t rs, cs;
  const float* scales;  // [n, groups]
  int64_t scale_rs, scale_cs;
  const uint8_t* zeros;  // [n, groups]
  int64_t zero_rs, zero_cs;
  const float* factor;  // [n]
  int64_t factor_rs;
};
// Reduction lengths of LoRA factors are padded to this: r = 8 must not cost kBlock.
KT_OP int64_t padded_rank(int64_t k) { return round_up(k, 8); }

KT_OP int64_t panels(int64_t n) { return (n + kPanel - 1) / kPanel; }
KT_OP int64_t group_size(const Shape& s) { return s.group ? s.group : s.kp; }
KT_OP int64_t groups(const Shape& s) { return (s.kp + group_size(s) - 1) / group_size(s); }
// Where the parts of a panel begin: its factors at 0.
KT_OP int64_t scales_at(const Storage& f) { return f.factor ? kPanel * 4 : 0; }
KT_OP int64_t zeros_at(const Shape& s, const Storage& f) {
  return scales_at(f) + round_up(groups(s) * kPanel * f.scale_size, kAlign);
}
KT_OP int64_t lines_at(const Shape& s, const Storage& f) {
  return zeros_at(s, f) + (f.zeros ? round_up(groups(s) * kPanel, kAlign) : 0);
}
KT_OP int64_t panel_bytes(const Shape& s, const Storage& f) {
  return lines_at(s, f) + s.kp * kPanel * f.bits / 8;
}
KT_OP int64_t matrix_bytes(const Shape& s, const Storage& f) {
  return panels(s.n) * panel_bytes(s, f);
}

// Of Kernel::pack: a row in fp32, a panel's rows as codes, a vector that is read past them.
KT_OP int64_t pack_scratch(int64_t kp) { return kp * (4 + 2 * kPanel) + kAlign; }

}  // namespace kt
