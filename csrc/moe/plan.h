// What forward and backward share: the operands of a call, and the stage helpers. Everything here
// lives for one call only.
#pragma once
#include <algorithm>
#include <vector>

#include "gemm/registry.h"
#include "machine/parallel.h"
#include "moe/moe.h"
#include "moe/route.h"
#include "moe/slots.h"

namespace kt {

struct BaseRows {  // operand A of a product with base weights: `codes` where rows are quantized
  Rows plain;
  Quantized codes;
};

// Operand A of transposed products with base weights. Where codes are turned (Plan::turns_codes) it
// is quantized for one scale group of columns after the other; elsewhere there are plain rows too.
struct TurnedRows {
  const bf16* src;
  int64_t ld;
  const int32_t* ids;  // row numbers in src, or null for consecutive rows
  int64_t m;
  Slot normal, slot;               // where they go, as fp32 and as codes
  int64_t slice = -1, group = -1;  // what they are for
  Quantized codes{};
};

// A LoRA factor as weights of nt: A [r, in], B [out, r]; A^T [in, r], B^T [r, out] for backward.
enum Side { kA, kAT, kB, kBT };

struct Plan {
  const Layer& layer;
  const Batch& batch;
  const Lora& lora;
  const KernelEntry &weights, &plain;  // kernels of the stored format and of bf16 (LoRA factors)
  const Kernel &kernel, &bf16_kernel;
  Route route;                          // the wave this plan is for
  int64_t hidden_padded, inter_padded;  // to kBlock
  std::vector<Slice> slices;
  std::vector<int64_t> owners;  // node i works with slices [owners[i], owners[i + 1])
  int64_t rank_padded[3];       // of the LoRA factors
  int digits;                   // of a quantized row; 0: rows are not quantized

  Plan(const Layer& of, const Batch& b, const Lora& lo, Compute compute, Route wave);

  Packed weight(int64_t expert, int projection, const Slice& s) const {
    return {layer.data + s.matrix(expert, projection), s.shape(projection)};
  }
  // The slice that holds value `i` of the intermediate dimension.
  const Slice& slice_of(int64_t i) const {
    size_t s = slices.size() - 1;
    while (slices[s].begin > i) --s;
    return slices[s];
  }
  bool on_nodes() const { return owners.size() > 2; }
  int64_t threads_of(size_t node) const { return on_nodes() ? node_threads(node) : threads(); }
  DropKey key(int p) const { return {p, lora.dropout}; }

  float* c(int w, Slot s = kC) const { return (float*)scratch(w, s, kRowBlock * kCols * 4); }
  // Scratch for unpacked panels with up to `reduction` values per channel.
  void* panels(int w) const;
  bf16* shared(Slot s, int64_t rows, int64_t ld) const {
    return (bf16*)scratch(-1, s, rows * ld * 2);
  }

  // f(active expert, worker) for all.
  template <class F>
  void per_expert(F f) const {
    const std::vector<int64_t> order = dealt(route, threads());
    parallel(route.active(), [&](int64_t i, int w) { f(order[size_t(i)], w); });
  }

  // Prefetches the beginning of a panel that is needed soon: reading on from there, few() looks
  // ahead by itself.
  void prefetch_panel(int64_t expert, int projection, int64_t panel) const {
    const Packed m = weight(expert, projection, slices[0]);
    const uint8_t* at = m.data + panel * panel_bytes(m.shape, kernel.stored);
    for (int64_t i = 0; i < 2048; i += kAlign) __builtin_prefetch(at + i);
  }

  // Rows of src as operand A. ids: row numbers in src, or null for consecutive rows.
  Rows rows_of(int w, Slot s, const bf16* src, int64_t ld, const int32_t* ids, int64_t m,
               int64_t kk, int64_t kp) const;
  // Those columns of the rows that begin at `col`.
  Rows columns_of(const Rows& a, int64_t col) const {
    return {(const uint8_t*)a.a + col * kernel.a_size, a.ld, a.m};
  }
  // Rows through the dropout mask of projection p (when there is one); `first` = row of the
  // route.
  Rows dropped(int w, int p, int64_t first, const bf16* src, int64_t ld, const int32_t* ids,
               int64_t m, int64_t kk, int64_t kp) const;

  // Of projection p of an active expert, where it lies.
  Matrix factor(int64_t active, int p, Side side) const;
  // C (+)= A F^T for `count` panels of a factor, from `panel` on.
  void multiply(int w, const Rows& a, const Matrix& f, int64_t panel, int count, bool add,
                float* c) const;
  // bf16(scale * A W^T), the narrow product with a LoRA factor, rows [0, a.m) of `plain`; of
  // `weighted` with the rows' routing weights (either may be null). One rounding each.
  void project(int w, const Rows& a, const Matrix& f, float scale, int64_t first, bf16* plain,
               bf16* weighted, int64_t ld) const;
  // C (+)= t factor^T for panel pair at column `col` (one panel when `single`).
  void add_low_rank(int w, const bf16* t, int64_t ld, int64_t m, const Matrix& f, int64_t panel,
                    int count, bool add, float* c) const;

  // T_p = scaling * (mask o in) A^T for all rows of one active expert, times the routing weights if
  // `weighted`; `src` as in rows_of.
  void low_rank_in(int w, int64_t active, std::initializer_list<int> ps, const bf16* src,
                   int64_t ld, bool by_token, bool weighted, bf16* const* t) const;

  // Tokens quantized for gate and up, or nothing where rows are not.
  std::vector<Quantized> quantized_tokens() const;
  // Rows [0, rows) of src quantized for projection p, in shared scratch: once for gate and up, per
  // slice for down.
  std::vector<Quantized> quantize(Slot s, int p, const bf16* src, int64_t ld, int64_t rows) const;
  // Rows ids[i] (or first + i) of `all`, side by side, each with its digits.
  Quantized quantized_rows(int w, const Quantized& all, const int32_t* ids, int64_t first,
                           int64_t m) const;

  // C = A W^T.
  void base_nt(int w, const BaseRows& a, const Packed* const* weight, const int64_t* panel,
               int count, float* c) const;

  // Whether transposed products take codes as they are: rows of two digits, and scale groups of
  // columns long enough for quantizing them anew.
  bool turns_codes() const;
  void turn(int w, TurnedRows& a, const Packed& from, int proj, const Slice& s, int64_t col) const;
  // C[:, 0..32) (+)= A W[:, col .. col + 32) for the slice's part of a matrix of active expert e.
  void base_nn(int w, TurnedRows& a, const Rows& plain, int64_t e, int proj, const Slice& s,
               int64_t col, bool add, float* c) const;

  // Stage 1 for all experts: h and/or saved pre-activations. x: tokens quantized, or null.
  void gate_up(const Quantized* x, bf16* h, bf16* saved);
  // Its panels [p0, p1), rows [i, i + m) of active expert e; t: low-rank inputs of gate and up.
  void gate_up_rows(int w, const Quantized* x, bf16* const* t, bool along, int64_t e, int64_t i,
                    int64_t m, int64_t p0, int64_t p1, bf16* h, bf16* saved) const;
};

// Tasks (expert, some columns of the intermediate dimension), each on the node that has their
// slice. ColumnSums are counted in units that divide the slices.
struct ColumnTasks {
  struct OfNode {
    int64_t begin, end, step, per_expert;  // units; units per task; tasks per expert
  };
  struct Task {
    int64_t expert, begin, end;  // active expert; units
  };
  std::vector<OfNode> nodes{};
  std::vector<int64_t> counts{};                // tasks of a node
  std::vector<std::vector<int64_t>> experts{};  // in what order a node does them

  bool whole() const { return nodes.size() == 1 && nodes[0].per_expert == 1; }  // one per expert
  ColumnTasks(const Plan& p, int64_t unit);
  Task at(int node, int64_t task) const {
    const OfNode& n = nodes[size_t(node)];
    const int64_t first = n.begin + task % n.per_expert * n.step;
    return {experts[size_t(node)][size_t(task / n.per_expert)], first,
            min64(n.end, first + n.step)};
  }
};

// Where a stage's sums are while waves add to them, and where they go after the last one. They are
// kept by units of 32 columns, [units][tokens][32]: a unit's rows lie side by side.
struct ColumnSums {
  float* kept;  // null: one wave only, so a worker's scratch holds what it works on
  bool first, last;
  Output out;
  // Tokens [t0, ..) of unit u, in `kept` or else in `own`; zero in the first wave.
  float* begin(float* own, int64_t tokens, int64_t u, int64_t t0, int64_t values) const {
    float* acc = kept ? kept + (u * tokens + t0) * kCols : own;
    if (first) std::fill_n(acc, values, 0.f);
    return acc;
  }
  void end(const Kernel& kernel, const float* acc, int64_t hidden, int64_t u, int64_t t0,
           int64_t n) const {
    const int64_t at = t0 * hidden + u * kCols, cols = min64(kCols, hidden - u * kCols);
    if (!last) return;
    if (out.rounded) kernel.narrow_rows(acc, n, cols, 1.f, nullptr, out.rounded + at, hidden);
    if (out.whole)
      for (int64_t t = 0; t < n; ++t)
        std::copy_n(acc + t * kCols, cols, out.whole + at + t * hidden);
  }
};
inline ColumnSums column_sums(const Output& sum, int64_t tokens, int64_t hidden, bool first,
                              bool last) {
  const bool one = first && last;
  const int64_t values = tokens * round_up(hidden, kCols);
  return {one ? nullptr : (float*)scratch(-1, kCarry, values * 4), first, last, sum};
}

// f(block begin, rows) over [begin, end) in blocks of nearly equal height, kRowBlock at most.
template <class F>
void row_blocks(int64_t begin, int64_t end, F f) {
  const int64_t rows = end - begin, blocks = (rows + kRowBlock - 1) / kRowBlock;
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t from = begin + rows * n / blocks;
    f(from, begin + rows * (n + 1) / blocks - from);
  }
}

// How many of `units` column blocks one task takes, for each of `groups` experts, so that every
// thread gets several tasks: enough to steal from, and more where the rows are so few that a task
// gathers next to nothing. Of such numbers the one with which threads get done together: 18 blocks
// in tasks of 3 instead of 2 took 7 % off the passes of two threads.
inline int64_t units_per_task(int64_t units, int64_t groups, int64_t rows, int64_t threads) {
  const int64_t want = max64(1, threads * (rows <= 64 ? 8 : 4) / max64(1, groups));
  auto longest = [&](int64_t n) {  // units of the thread that has most
    return ((units + n - 1) / n * groups + threads - 1) / threads * n;
  };
  int64_t best = max64(1, (units + want - 1) / want);
  for (int64_t n = best - 1; 2 * n > best; --n)
    if (longest(n) < longest(best)) best = n;
  return best;
}

}  // namespace kt
