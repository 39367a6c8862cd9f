// Forward: gate, up, h -> [low-rank input of down] -> down by column blocks.
#include <algorithm>

#include "moe/sum.h"

namespace kt {
namespace {

// The down projection: w * down(h), summed per token.
struct DownSum {
  const Plan& p;
  const bf16* h;
  const std::vector<Quantized>& codes;  // h of every slice, or none
  const bf16* t;                        // low-rank input, or null

  struct Operand {
    int64_t row, m, first;  // rows [row, row + m), values from `first` on
    Rows plain;
  };
  Operand operand(int w, int64_t i, int64_t m, int64_t col, int64_t n) const {
    Operand a{i, m, col, {}};
    if (codes.empty())
      a.plain = p.rows_of(w, kRows, h + i * p.inter_padded + col, p.inter_padded, nullptr, m, n, n);
    return a;
  }
  void product(int w, const Operand& a, int64_t e, int64_t slice, int64_t u, float* c) const {
    const Slice& s = p.slices[size_t(slice)];
    const Packed down = p.weight(p.route.expert[size_t(e)], kDown, s);
    const Packed* two[2] = {&down, &down};
    const int64_t at[2] = {2 * u, 2 * u + 1};
    if (width(u) == 1) std::fill(c, c + a.m * kCols, 0.f);
    const BaseRows rows =
        codes.empty()
            ? BaseRows{p.columns_of(a.plain, s.begin - a.first), {}}
            : BaseRows{{}, p.quantized_rows(w, codes[size_t(slice)], nullptr, a.row, a.m)};
    p.base_nt(w, rows, two, at, width(u), c);
  }
  bool adapts() const { return t; }
  void adapt(int w, int64_t e, int64_t i, int64_t m, int64_t u, float* c) const {
    p.add_low_rank(w, t + i * p.rank_padded[kDown], p.rank_padded[kDown], m, p.factor(e, kDown, kB),
                   2 * u, width(u), true, c);
  }
  void begin(int64_t e, int64_t u) const {
    if (e + 1 < p.route.active()) p.prefetch_panel(p.route.expert[size_t(e + 1)], kDown, 2 * u);
  }
  const float* weight() const { return p.route.weight.data(); }
  int width(int64_t u) const { return 2 * u + 1 < panels(p.layer.hidden) ? 2 : 1; }  // panels
};

void forward_wave(Plan& p, const Quantized* x, const ColumnSums& out, bf16* saved) {
  bf16* h = p.shared(kH, p.route.rows(), p.inter_padded);
  p.gate_up(x, h, saved);
  std::vector<Quantized> codes;
  if (x) codes = p.quantize(kHCodes, kDown, h, p.inter_padded, p.route.rows());
  bf16* t[3] = {};
  if (p.lora.r[kDown]) {
    t[kDown] = p.shared(kDownT, p.route.rows(), p.rank_padded[kDown]);
    p.per_expert([&](int64_t e, int w) {
      p.low_rank_in(w, e, {kDown}, h, p.inter_padded, false, false, t);
    });
  }
  sum_stage(p, DownSum{p, h, codes, t[kDown]}, out);
}

}  // namespace

void moe_forward(const Layer& l, const Batch& b, const Lora& lora, Compute compute,
                 const Output& out, bf16* saved) {
  check_compute(l, compute);
  CallLock lock;
  const Routing routing = make_route(b, l.experts, lora.seed);
  if (routing.expert.empty()) out.clear(b.tokens * l.hidden);
  std::vector<Quantized> x;
  std::vector<Route> waves = routing.waves(kWaveRows);
  for (Route& wave : waves) {
    const int64_t first = wave.first_row;
    const ColumnSums columns =
        column_sums(out, b.tokens, l.hidden, first == 0, &wave == &waves.back());
    Plan p(l, b, lora, compute, std::move(wave));
    if (!first) x = p.quantized_tokens();
    forward_wave(p, x.empty() ? nullptr : &x[0], columns,
                 saved ? saved + first * 2 * l.intermediate : nullptr);
  }
}

}  // namespace kt
