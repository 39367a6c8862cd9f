// flags:
// cpu:
// A tier as somebody else would add it: eight lanes without any instruction of its own.
// tests/csrc/test_toys.py compiles it from outside of csrc/.
#pragma once
#include "isa/base.h"

namespace kt {
namespace {
struct Isa_toy_isa : Lanes<8> {
  static constexpr const char* name = "toy_isa";
  static constexpr int mr = 3;
  static constexpr int mr8 = 2;
  static constexpr int few = 2;
};
}  // namespace
}  // namespace kt
