// Compiled once per ISA with that ISA's flags; KT_ISA_* and formats.inc come from CMake.
// Emits one strong symbol: the table of this tier's kernels, one per weight format.
#include "kernel.h"

#include "across8.h"
#include "ops.h"
#include KT_ISA_HEADER
#include "formats.inc"

namespace kt {
namespace {

template <class I, class F>
constexpr Kernel make() {
  using D = Driver<I, F>;
  using O = Ops<I>;
  Kernel k = {};
  k.isa = I::name, k.cpu = KT_ISA_CPU, k.format = F::name, k.slow_on = I::slow_on;
  k.bits = F::bits, k.scaled = F::scaled;
  k.a_size = sizeof(typename I::A), k.line_size = sizeof(Line<I, 1>);
  k.pack = D::pack, k.unpack = D::unpack_panel;
  k.gather = D::gather, k.nt = D::nt, k.nt_of = D::nt_of, k.nn = D::nn, k.transpose = D::transpose,
  k.tn = D::tn;
  if constexpr (F::quads > 0) {
    k.quad_size = sizeof(typename I::Quad);
    k.int16_pays = I::int16_pays;
    k.quantize = Driver8<I, F>::quantize, k.nt8 = Driver8<I, F>::nt;
    k.normalize = Across8<I, F>::normalize;
    k.quantize_across = Across8<I, F>::quantize, k.nn8 = Across8<I, F>::nn;
  }
  k.gate_forward = O::gate_forward, k.gate_backward = O::gate_backward;
  k.narrow_rows = O::narrow_rows, k.scatter = O::scatter;
  k.put_block = O::put_block, k.settle = O::settle, k.add_rows = O::add_rows,
  k.add_pairs = O::add_pairs, k.drop_rows = O::drop_rows, k.drop_add = O::drop_add;
  return k;
}

}  // namespace

extern const Kernel KT_ISA_TABLE[];
const Kernel KT_ISA_TABLE[] = {
#define KT_FORMAT(stem) make<KT_ISA_STRUCT, Format_##stem>(),
#include "formats.list"
#undef KT_FORMAT
};

}  // namespace kt
