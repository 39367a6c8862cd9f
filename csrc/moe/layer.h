// One layer's packed experts: where every matrix lies, packing and unpacking.
//
// A layer is cut into slices of the intermediate dimension I, so that each NUMA node can keep its
// own. Of a slice with I_s values, the matrices of expert e lie one after the other, gate [I_s, H],
// up [I_s, H], down [H, I_s] (gemm/panel.h), expert after expert, slice after slice.
#pragma once
#include <string>
#include <vector>

#include "gemm/kernel.h"

namespace kt {

enum Projection { kGate = 0, kUp = 1, kDown = 2 };

constexpr int64_t kMaxSlices = 8;  // the NUMA nodes of all but the rarest machines

struct Layer {
  int64_t experts, hidden, intermediate, group;
  std::string format;
  Act act;
  uint8_t* data;  // 64-byte aligned, layer_bytes() long
  int64_t slices = 1;

  int64_t rows(int p) const { return p == kDown ? hidden : intermediate; }
  int64_t cols(int p) const { return p == kDown ? intermediate : hidden; }
};

struct Slice {
  int64_t begin, width;  // its values of I: [begin, begin + width)
  int64_t offset;        // of its first byte in the layer
  int64_t up_bytes, down_bytes;
  Shape up, down;  // of gate and up; of down

  const Shape& shape(int p) const { return p == kDown ? down : up; }
  int64_t expert_bytes() const { return 2 * up_bytes + down_bytes; }
  // Where a matrix begins in the layer.
  int64_t matrix(int64_t expert, int p) const {
    return offset + expert * expert_bytes() + p * up_bytes;
  }
};

// The most slices a layer can have. They begin at multiples of the scale group, and at least of 64
// values where there are scales, a channel's whole if 128, and so many too where there are zero
// points or factors: shorter ones would pad these to a cache line too often (the packed bytes stay
// within 1.02 of the format's).
int64_t max_slices(const Layer& l);
std::vector<Slice> slices_of(const Layer& l);
int64_t layer_bytes(const Layer& l);
// Has the pages of every slice come from the node that will work with it. Before they are touched.
void bind_slices(const Layer& l);

// Packs one matrix, element type t, row-major with `ld` elements per row; false if not finite.
bool pack_matrix(const Layer& l, int64_t expert, int projection, const void* src, DType t,
                 int64_t ld);
// The same from published codes, bit for bit; false if one is no number.
bool pack_codes(const Layer& l, int64_t expert, int projection, const Codes& w);
void unpack_matrix(const Layer& l, int64_t expert, int projection, float* out);

}  // namespace kt
