// bits: 4
// NVFP4: e2m1 codes, an fp8 e4m3 scale per 16 values (exact in bf16) and an fp32 factor, which
// publishers choose per tensor and encode() per channel.
#pragma once
#include "format/mxfp4.h"

namespace kt {
namespace {
struct Format_nvfp4 : Format_mxfp4 {
  static constexpr const char* name = "nvfp4";
  static constexpr int groups[] = {16}, default_group = 16;

  // The largest group scale becomes 448, its largest code 6.
  KT_OP float factor(const float* v, int64_t count) {
    return largest_magnitude(v, count) / (448.f * 6.f);
  }
  KT_OP float encode(const float* v, int64_t count, uint16_t* code) {
    const uint16_t rounded = Format_fp8::round(largest_magnitude(v, count) / 6.f);
    const float scale = widen(kFp8Values.at[rounded]), inv = scale > 0 ? 1.f / scale : 0.f;
    for (int64_t i = 0; i < count; ++i) code[i] = round(v[i] * inv);
    return scale * scale_of_code;
  }
};
}  // namespace
}  // namespace kt
