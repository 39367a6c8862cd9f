// Forward and backward of one layer's routed experts. Knows no format and no ISA.
//
//   y[t] = sum over slots of w * down(act(gate(x)) * up(x)), each projection W + scaling * B A
// Weights of expert e lie one after the other: gate [I, H], up [I, H], down [H, I] (panel.h).
#pragma once
#include <string>

#include "kernel.h"

namespace kt {

enum Projection { kGate = 0, kUp = 1, kDown = 2 };

struct Layer {
  int64_t experts, hidden, intermediate, group;
  std::string format;
  Act act;
  uint8_t* data;  // 64-byte aligned, layer_bytes() long

  int64_t rows(int p) const { return p == kDown ? hidden : intermediate; }
  int64_t cols(int p) const { return p == kDown ? intermediate : hidden; }
  Shape shape(int p) const { return stored_shape(rows(p), cols(p), group); }
};

int64_t layer_bytes(const Layer& l);
uint8_t* matrix_data(const Layer& l, int64_t expert, int projection);
// The same, where the packed bytes of gate or up and of down are known.
inline uint8_t* matrix_at(const Layer& l, int64_t expert, int projection, int64_t up,
                          int64_t down) {
  return l.data + expert * (2 * up + down) + projection * up;
}

struct Lora {             // rank 0: the projection has no adapter
  const void* a[3] = {};  // [E, r, cols]
  const void* b[3] = {};  // [E, rows, r]
  int64_t r[3] = {};
  float scaling[3] = {};
  DType type = DType::kF32;
  float dropout = 0;
  uint64_t seed = 0;
  bool any() const { return r[0] || r[1] || r[2]; }
};

struct Batch {
  int64_t tokens, top_k;
  const bf16* x;         // [tokens, hidden]
  const int64_t* index;  // [tokens, top_k]
  const float* weight;   // [tokens, top_k]
};

// out [tokens, hidden] fp32; saved (may be null) [tokens * top_k, 2, intermediate] in expert order.
// int8: products with base weights in the int8 domain (throws where the format has none).
void moe_forward(const Layer& l, const Batch& b, const Lora& lora, bool int8, float* out,
                 bf16* saved);

struct Grads {   // null: not wanted
  float* dx;     // [tokens, hidden]
  float* dw;     // [tokens, top_k]
  float* da[3];  // [E, r, cols]
  float* db[3];  // [E, rows, r]
};
// saved null: gate and up are computed again, to the same bits.
void moe_backward(const Layer& l, const Batch& b, const Lora& lora, const bf16* dy,
                  const bf16* saved, const Grads& g);

// Packs one matrix, element type t, row-major with `ld` elements per row; false if not finite.
bool pack_matrix(const Layer& l, int64_t expert, int projection, const void* src, DType t,
                 int64_t ld);
void unpack_matrix(const Layer& l, int64_t expert, int projection, float* out);

}  // namespace kt
