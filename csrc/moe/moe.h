// Forward and backward of one layer's routed experts. Knows no format and no ISA.
//
//   y[t] = sum over slots of w * down(act(gate(x)) * up(x)), each projection W + scaling * B A
//
// Products that reduce over I are computed per slice of the layer (layer.h) and added in the order
// of slices, so their bits depend on the number of slices, but on no number of nodes or threads.
#pragma once
#include <algorithm>
#include <vector>

#include "moe/layer.h"

namespace kt {

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
struct BatchPart {
  int64_t tokens;
  uint64_t seed;  // of its dropout
};

struct Batch {
  int64_t tokens, top_k;
  const bf16* x;                   // [tokens, hidden]
  const int64_t* index;            // [tokens, top_k]
  const float* weight;             // [tokens, top_k]
  const uint8_t* mine = nullptr;   // [experts]: 0 leaves an expert's assignments out; null: none
  std::vector<BatchPart> parts{};  // in order; empty: one, with the seed of the Lora
};

struct Output {  // [tokens, hidden], added up in fp32: as it is, or rounded once; neither: not
                 // wanted
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
void moe_forward(const Layer& l, const Batch& b, const Lora& lora, Compute compute,
                 const Output& out, bf16* saved);

struct Grads {  // null: not wanted
  Output dx;
  float* dw;     // [tokens, top_k]
  float* da[3];  // [E, r, cols]
  float* db[3];  // [E, rows, r]
};
// saved null: gate and up are computed again, to the same bits as in a forward with this `compute`.
void moe_backward(const Layer& l, const Batch& b, const Lora& lora, Compute compute, const bf16* dy,
                  const bf16* saved, const Grads& g);

}  // namespace kt
