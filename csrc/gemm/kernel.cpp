// Compiled once per ISA with that ISA's flags; KT_ISA_* and formats.inc come from CMake.
// Emits one strong symbol: the table of this tier's kernels, one per weight format.
#include "gemm/kernel.h"

#include "gemm/elementwise.h"
#include "gemm/quantized_transposed.h"
#include KT_ISA_HEADER
#include "formats.inc"

namespace kt {
namespace {

template <class I, class F>
constexpr Kernel make() {
  static_assert(Format<F, I>, "a file in format/ does not satisfy Format (contracts.h)");
  static_assert(groups_fit<F>(), "groups are multiples of 16, and the default is one of them");
  using D = Driver<I, F>;
  using E = Elementwise<I>;
  Kernel k = {};
  k.isa = I::name, k.cpu = KT_ISA_CPU, k.format = F::name, k.slow_on = I::slow_on;
  k.stored = kStorage<F>, k.codes = codes_of<F>();
  k.groups = F::groups, k.group_count = int(std::extent_v<decltype(F::groups)>);
  k.default_group = F::default_group;
  k.a_size = sizeof(typename I::A), k.line_size = sizeof(Line<I, 1>);
  k.pack = D::pack, k.pack_codes = D::pack_codes, k.unpack = D::unpack_panel;
  k.gather = D::gather, k.nt = D::nt, k.nt_of = D::nt_of, k.nn = D::nn, k.transpose = D::transpose,
  k.tn = D::tn;
  if constexpr (F::quads > 0) {
    k.quad_size = sizeof(typename I::Quad);
    k.int16_pays = I::int16_pays;
    k.quantize = QuantizedDriver<I, F>::quantize, k.nt8 = QuantizedDriver<I, F>::nt;
    k.normalize = QuantizedTransposed<I, F>::normalize;
    k.quantize_across = QuantizedTransposed<I, F>::quantize, k.nn8 = QuantizedTransposed<I, F>::nn;
  }
  k.gate_forward = E::gate_forward, k.gate_backward = E::gate_backward;
  k.narrow_rows = E::narrow_rows, k.scatter = E::scatter;
  k.put_block = E::put_block, k.settle = E::settle, k.add_rows = E::add_rows,
  k.add_pairs = E::add_pairs, k.drop_rows = E::drop_rows, k.drop_add = E::drop_add;
  return k;
}

static_assert(Isa<KT_ISA_STRUCT>, "a file in isa/ does not satisfy Isa (contracts.h)");

}  // namespace

extern const Kernel KT_ISA_TABLE[];
const Kernel KT_ISA_TABLE[] = {
#define KT_FORMAT(stem) make<KT_ISA_STRUCT, Format_##stem>(),
#include "formats.list"
#undef KT_FORMAT
};

}  // namespace kt
