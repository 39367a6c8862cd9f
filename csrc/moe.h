// Forward and backward of one layer's routed experts. Knows no format and no ISA.
//
//   y[t] = sum over slots of w * down(act(gate(x)) * up(x)), each projection W + scaling * B A
//
// A layer is cut into slices of the intermediate dimension I, so that each NUMA node can keep its
// own. Of a slice with I_s values, the matrices of expert e lie one after the other, gate [I_s, H],
// up [I_s, H], down [H, I_s] (panel.h), expert after expert, slice after slice. Products that
// reduce over I are computed per slice and added in the order of slices, so their bits depend on
// the number of slices, but on no number of nodes or threads.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "kernel.h"

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
// values where there are scales, a channel's whole if 128: shorter ones would pad scales to a cache
// line too often (the packed bytes stay within 1.02 of the format's).
int64_t max_slices(const Layer& l);
std::vector<Slice> slices_of(const Layer& l);
int64_t layer_bytes(const Layer& l);
// Has the pages of every slice come from the node that will work with it. Before they are touched.
void bind_slices(const Layer& l);

struct Lora {             // rank 0: the projection has no adapter
  const void* a[3] = {};  // [E, r, cols]
  const void* b[3] = {};  // [E, rows, r]
  int64_t r[3] = {};
  float scaling[3] = {};
  DType type = DType::kF32;
  float dropout = 0;
  uint64_t seed = 0;
};

// Of a batch that several processes have put together: what one of them gave.
struct Part {
  int64_t tokens;
  uint64_t seed;  // of its dropout
};

struct Batch {
  int64_t tokens, top_k;
  const bf16* x;                  // [tokens, hidden]
  const int64_t* index;           // [tokens, top_k]
  const float* weight;            // [tokens, top_k]
  const uint8_t* mine = nullptr;  // [experts]: 0 leaves an expert's assignments out; null: none
  std::vector<Part> parts{};      // in order; empty: one, with the seed of the Lora
};

struct Sum {  // [tokens, hidden], added up in fp32: as it is, or rounded once; neither: not wanted
  float* whole = nullptr;
  bf16* rounded = nullptr;
  bool wanted() const { return whole || rounded; }
  void clear(int64_t values) const {
    if (whole) std::fill_n(whole, values, 0.f);
    if (rounded) std::fill_n(rounded, values, bf16(0));
  }
};

// Rows of the products with base weights: bf16 values, or codes of so many bits per row and group
// (int16: two int8 digits), multiplied exactly.
enum class Compute : int { kBf16 = 0, kInt8 = 1, kInt16 = 2 };

// Throws if there is no such computing for the layer's format.
void check_compute(const Layer& l, Compute compute);

// saved (may be null) [rows, 2, intermediate] in expert order; rows: tokens * top_k less what is
// left out.
void moe_forward(const Layer& l, const Batch& b, const Lora& lora, Compute compute, const Sum& out,
                 bf16* saved);

struct Grads {  // null: not wanted
  Sum dx;
  float* dw;     // [tokens, top_k]
  float* da[3];  // [E, r, cols]
  float* db[3];  // [E, rows, r]
};
// saved null: gate and up are computed again, to the same bits as in a forward with this `compute`.
void moe_backward(const Layer& l, const Batch& b, const Lora& lora, Compute compute, const bf16* dy,
                  const bf16* saved, const Grads& g);

// Packs one matrix, element type t, row-major with `ld` elements per row; false if not finite.
bool pack_matrix(const Layer& l, int64_t expert, int projection, const void* src, DType t,
                 int64_t ld);
void unpack_matrix(const Layer& l, int64_t expert, int projection, float* out);

}  // namespace kt
