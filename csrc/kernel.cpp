// Compiled once per ISA with that ISA's flags; KT_ISA_* and formats.inc come from CMake.
// Emits one strong symbol: the table of this tier's kernels, one per weight format.
#include "kernel.h"

#include "gemm.h"
#include "ops.h"
#include KT_ISA_HEADER
#include "formats.inc"

namespace kt {
namespace {

template <class I, class F>
constexpr Kernel make() {
  using D = Driver<I, F>;
  using O = Ops<I>;
  return {I::name,
          KT_ISA_CPU,
          F::name,
          F::bits,
          F::scaled,
          sizeof(typename I::A),
          sizeof(Line<I, 1>),
          D::pack,
          D::unpack_panel,
          D::gather,
          D::nt,
          D::nn,
          D::transpose,
          D::tn,
          O::gate_forward,
          O::gate_backward,
          O::narrow_rows,
          O::scatter,
          O::drop_rows,
          O::drop_add};
}

}  // namespace

extern const Kernel KT_ISA_TABLE[];
const Kernel KT_ISA_TABLE[] = {
#define KT_FORMAT(stem) make<KT_ISA_STRUCT, Format_##stem>(),
#include "formats.list"
#undef KT_FORMAT
};

}  // namespace kt
