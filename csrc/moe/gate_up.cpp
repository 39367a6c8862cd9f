// Stage 1 of a forward, and of a backward that recomputes it: gate, up and h, by columns of the
// intermediate dimension.
#include <algorithm>

#include "moe/plan.h"

namespace kt {

void Plan::gate_up(const Quantized* x, bf16* h, bf16* saved) {
  const bool need_low_rank = lora.r[kGate] || lora.r[kUp];
  bf16* t[2] = {};
  for (int p : {kGate, kUp})
    if (lora.r[p]) t[p] = shared(p == kGate ? kGateT : kUpT, route.rows(), rank_padded[p]);
  const ColumnTasks tasks(*this, kPanel);
  const bool along = tasks.whole() && lora.dropout == 0;  // with the rows of the task
  if (need_low_rank && !along)
    per_expert([&](int64_t e, int w) {
      low_rank_in(w, e, {kGate, kUp}, batch.x, layer.hidden, true, false, t);
    });
  parallel_on_nodes(tasks.counts, [&](int node, int64_t task, int w) {
    const auto [e, p0, p1] = tasks.at(node, task);
    weights.calls->fetch_add(1, std::memory_order_relaxed);
    row_blocks(route.start[size_t(e)], route.start[size_t(e) + 1], [&](int64_t i, int64_t m) {
      gate_up_rows(w, x, t, along, e, i, m, p0, p1, h, saved);
    });
  });
}

void Plan::gate_up_rows(int w, const Quantized* x, bf16* const* t, bool along, int64_t e, int64_t i,
                        int64_t m, int64_t p0, int64_t p1, bf16* h, bf16* saved) const {
  const int64_t I = layer.intermediate, count = kt::panels(I), expert = route.expert[size_t(e)];
  const int32_t* ids = route.token.data() + i;
  BaseRows a{};
  if (x) a.codes = quantized_rows(w, *x, ids, i, m);
  if (!x || (along && (lora.r[kGate] || lora.r[kUp])))
    a.plain = rows_of(w, kRows, batch.x, layer.hidden, ids, m, layer.hidden, hidden_padded);
  for (int q : {kGate, kUp})
    if (along && lora.r[q])
      project(w, a.plain, factor(e, q, kA), lora.scaling[q], i, t[q] + i * rank_padded[q], nullptr,
              rank_padded[q]);
  for (int64_t p = p0; p < p1; ++p) {
    const Slice& s = slice_of(p * kPanel);
    const Packed gate = weight(expert, kGate, s), up = weight(expert, kUp, s);
    const Packed* both[2] = {&gate, &up};
    const int64_t q0 = p - s.begin / kPanel, at[2] = {q0, q0}, cols = min64(kPanel, I - p * kPanel);
    base_nt(w, a, both, at, 2, c(w));
    for (int q : {kGate, kUp})
      if (lora.r[q])
        add_low_rank(w, t[q] + i * rank_padded[q], rank_padded[q], m, factor(e, q, kB), p, 1, true,
                     c(w) + q * kPanel);
    bf16* to = saved ? saved + i * 2 * I + p * kPanel : nullptr;
    kernel.gate_forward(layer.act, c(w), m, cols, to, to ? to + I : nullptr, 2 * I,
                        h ? h + i * inter_padded + p * kPanel : nullptr, inter_padded);
  }
  if (h && p1 == count && inter_padded > count * kPanel)
    for (int64_t r = i; r < i + m; ++r)
      std::fill(h + r * inter_padded + count * kPanel, h + (r + 1) * inter_padded, bf16(0));
}

ColumnTasks::ColumnTasks(const Plan& p, int64_t unit) {
  const int64_t I = p.layer.intermediate, rows = p.route.rows(), active = p.route.active();
  for (size_t n = 0; n + 1 < p.owners.size(); ++n) {
    const Slice& last = p.slices[size_t(p.owners[n + 1] - 1)];
    const int64_t begin = p.slices[size_t(p.owners[n])].begin / unit,
                  end = (min64(I, last.begin + last.width) + unit - 1) / unit,
                  step = units_per_task(end - begin, active, rows, p.threads_of(n));
    nodes.push_back({begin, end, step, (end - begin + step - 1) / step});
    counts.push_back(active * nodes.back().per_expert);
    experts.push_back(dealt(p.route, p.threads_of(n)));
  }
}

}  // namespace kt
