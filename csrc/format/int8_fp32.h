// bits: 8
// int8 as it is published elsewhere: fp32 scales, which bf16 need not hold, and codes of -128 too.
#pragma once
#include "format/int8.h"

namespace kt {
namespace {
struct Format_int8_fp32 : Format_int8 {
  static constexpr const char* name = "int8_fp32";
  static constexpr const char* codes = "int8";
  using Scale = float;
  static constexpr int groups[] = {128, 0}, default_group = 128;

  template <class I>
  KT_OP void decode(typename I::u32 x, typename I::B (&out)[pairs]) {
    I::byte_pairs(x, out, I{});
  }
  KT_OP bool valid(uint16_t) { return true; }
};
}  // namespace
}  // namespace kt
