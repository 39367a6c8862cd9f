// Forward: [LoRA factors] -> gate, up, h -> [low-rank input of down] -> down by column blocks.
#include <algorithm>

#include "moe_plan.h"

namespace kt {
namespace {

// codes: h quantized (int8 domain), else empty.
// acc [tokens][cols] += sum over experts, ascending, of w * down(h): this task's columns of the
// output.
void down_columns(const Plan& p, int w, const bf16* h, const Quantized& codes, const bf16* t,
                  int64_t u0, int64_t u1, float* acc) {
  const int64_t ld = (u1 - u0) * kCols, count = panels(p.l.hidden);
  for (int64_t e = 0; e < p.route.active(); ++e) {
    const Packed down = p.weight(p.route.expert[size_t(e)], kDown);
    const Packed* two[2] = {&down, &down};
    if (e + 1 < p.route.active()) p.ask_for(p.route.expert[size_t(e + 1)], kDown, 2 * u0);
    row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1], [&](int64_t i, int64_t m) {
      const BaseRows a =
          codes.codes
              ? BaseRows{true, {}, p.quantized_rows(w, codes, nullptr, i, m)}
              : BaseRows{
                    false, p.rows_of(w, kRows, h + i * p.ip, p.ip, nullptr, m, p.ip, p.ip), {}};
      for (int64_t u = u0; u < u1; ++u) {
        const int64_t at[2] = {2 * u, 2 * u + 1};
        const int n = 2 * u + 1 < count ? 2 : 1;
        float* c = p.c(w);
        if (n == 1) std::fill(c, c + m * kCols, 0.f);
        p.base_nt(w, a, two, at, n, c);
        if (t)
          p.add_low_rank(w, t + i * p.rp[kDown], p.rp[kDown], m, p.factor(e, kDown).b, 2 * u, n,
                         true, c);
        p.k.scatter(c, m, p.route.token.data() + i, p.route.weight.data() + i,
                    acc + (u - u0) * kCols, ld);
      }
    });
  }
}

void forward_wave(Plan& p, const Quantized* x, float* out, bf16* saved) {
  const Layer& l = p.l;
  const int64_t tokens = p.batch.tokens;
  if (p.lora.any()) p.pack_factors(true, false);
  bf16* h = p.shared(kH, p.route.rows(), p.ip);
  p.gate_up(x, h, saved);
  Quantized codes{};
  if (x) codes = p.quantize(kHCodes, kDown, h, p.ip, p.route.rows());
  bf16* t = nullptr;
  if (p.lora.r[kDown]) {
    t = p.shared(kDownT, p.route.rows(), p.rp[kDown]);
    parallel(p.route.active(),
             [&](int64_t e, int w) { p.low_rank_in(w, e, kDown, h, p.ip, false, false, t); });
  }
  const float* before = p.route.first_row ? out : nullptr;
  const int64_t units = (l.hidden + kCols - 1) / kCols,
                step = min64(8, units_per_task(units, 1, p.route.rows()));
  parallel((units + step - 1) / step, [&](int64_t task, int w) {
    const int64_t u0 = task * step, u1 = min64(units, u0 + step), ld = (u1 - u0) * kCols;
    auto* acc = (float*)scratch(w, kAcc, tokens * ld * 4);
    p.weights.calls->fetch_add(1, std::memory_order_relaxed);
    begin_columns(acc, tokens, ld, before, l.hidden, u0 * kCols);
    down_columns(p, w, h, codes, t, u0, u1, acc);
    end_columns(acc, tokens, ld, out, l.hidden, u0 * kCols);
  });
}

}  // namespace

void moe_forward(const Layer& l, const Batch& b, const Lora& lora, bool int8, float* out,
                 bf16* saved) {
  if (int8 && !find_kernel(l.format).kernel->nt8)
    throw std::invalid_argument("compute='int8' needs int8 or int4 weights, but these are " +
                                l.format + "; use compute='bf16'");
  Entry lock;
  const Routing routing = make_route(b.tokens, b.top_k, l.experts, b.index, b.weight);
  Quantized x{};
  for (Route& wave : routing.waves(kWaveRows)) {
    const int64_t first = wave.first_row;
    Plan p(l, b, lora, std::move(wave));
    if (int8 && !first) x = p.quantize(kXCodes, kGate, b.x, l.hidden, b.tokens);
    forward_wave(p, int8 ? &x : nullptr, out, saved ? saved + first * 2 * l.intermediate : nullptr);
  }
}

}  // namespace kt
