// Backward from the same packed bytes: dh_raw -> router gradient, gate backward -> dX, LoRA
// gradients.
//
// dh_raw = dY (W_down + s B A), the adapter's part through its dropout mask, per assignment.
// d(routing weight) = <dh_raw, h>, so expert outputs are never needed.
#include <algorithm>
#include <vector>

#include "moe/sum.h"

namespace kt {
namespace {

struct BackwardBuffers {
  const bf16* dy;
  const bf16* saved;
  const bf16* t[3];  // s (mask o in) A^T, per row: inputs of dB; for down times the routing weight
  bf16* g[3];        // s * dout B, per row: inputs of dA and of the low-rank part of dX and dh_raw
  bf16* gw;          // g[kDown] times the routing weight: input of dA of down
  bf16 *dgate, *dup, *h;
  float* dots;  // [rows][panels of I]
};

// g = scaling * dout B of m rows of one expert, from row i of the route on.
void low_rank_out(const Plan& p, const BackwardBuffers& buf, int w, int64_t e, int proj,
                  const Rows& dout, int64_t i) {
  const int64_t at = i * p.rank_padded[proj];
  bf16* weighted = proj == kDown && buf.gw ? buf.gw + at : nullptr;
  p.project(w, dout, p.factor(e, proj, kBT), p.lora.scaling[proj], i, buf.g[proj] + at, weighted,
            p.rank_padded[proj]);
}

// Two panels of dh_raw for rows [i, i + m), then the gate backward of both.
void gate_panels(const Plan& p, const BackwardBuffers& buf, int w, int64_t e, TurnedRows& turned,
                 const Rows& a, int64_t i, int64_t unit) {
  const int64_t I = p.layer.intermediate, count = panels(I), m = turned.m;
  const Slice& s = p.slice_of(unit * kCols);
  float* c = p.c(w);
  p.base_nn(w, turned, a, e, kDown, s, unit * kCols - s.begin, false, c);
  const int n = 2 * unit + 1 < count ? 2 : 1;
  if (p.lora.r[kDown]) {
    const Matrix at = p.factor(e, kDown, kAT);
    const bf16* g = buf.g[kDown] + i * p.rank_padded[kDown];
    if (p.lora.dropout > 0) {
      float* c2 = p.c(w, kC2);
      std::fill(c2, c2 + m * kCols, 0.f);
      p.add_low_rank(w, g, p.rank_padded[kDown], m, at, 2 * unit, n, false, c2);
      p.kernel.drop_add(p.key(kDown), p.route.mask.data() + i, c2, m, unit * kCols, c);
    } else {
      p.add_low_rank(w, g, p.rank_padded[kDown], m, at, 2 * unit, n, true, c);
    }
  }
  const int64_t col = unit * kCols, o = i * p.inter_padded + col;
  const bf16* gate = buf.saved + i * 2 * I + col;
  p.kernel.gate_backward(p.layer.act, c, m, min64(kCols, I - col), gate, gate + I, 2 * I,
                         p.route.weight.data() + i, buf.dgate + o, buf.dup + o,
                         buf.h ? buf.h + o : nullptr, p.inter_padded,
                         buf.dots + i * count + 2 * unit, count);
}

void gate_stage(const Plan& p, const BackwardBuffers& buf) {
  const int64_t I = p.layer.intermediate, units = (I + kCols - 1) / kCols,
                tail = panels(I) * kPanel;
  const ColumnTasks tasks(p, kCols);
  const bool adapted = p.lora.r[kDown], along = tasks.whole();  // with the rows of the task
  auto dy = [&](int w, int64_t i, int64_t m) {
    return p.rows_of(w, kRows, buf.dy, p.layer.hidden, p.route.token.data() + i, m, p.layer.hidden,
                     p.hidden_padded);
  };
  if (adapted && !along)
    p.per_expert([&](int64_t e, int w) {
      row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1],
                 [&](int64_t i, int64_t m) { low_rank_out(p, buf, w, e, kDown, dy(w, i, m), i); });
    });
  parallel_on_nodes(tasks.counts, [&](int node, int64_t task, int w) {
    const auto [e, u0, u1] = tasks.at(node, task);
    p.weights.calls->fetch_add(1, std::memory_order_relaxed);
    row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1], [&](int64_t i, int64_t m) {
      const Rows a = !p.turns_codes() || (adapted && along) ? dy(w, i, m) : Rows{};
      if (adapted && along) low_rank_out(p, buf, w, e, kDown, a, i);
      TurnedRows turned{buf.dy, p.layer.hidden, p.route.token.data() + i, m, kNormal, kTurned};
      for (int64_t u = u0; u < u1; ++u) gate_panels(p, buf, w, e, turned, a, i, u);
      for (bf16* b : {buf.dgate, buf.dup, buf.h})
        if (b && u1 == units && tail < p.inter_padded)
          for (int64_t r = i; r < i + m; ++r)
            std::fill(b + r * p.inter_padded + tail, b + (r + 1) * p.inter_padded, bf16(0));
    });
  });
}

void router_grad(const Plan& p, const BackwardBuffers& buf, float* dw) {
  const int64_t count = panels(p.layer.intermediate);
  for (int64_t i = 0; i < p.route.rows(); ++i) {
    float sum = 0;
    for (int64_t q = 0; q < count; ++q) sum += buf.dots[i * count + q];
    dw[p.route.assignment[size_t(i)]] = sum;
  }
}

// dX: gate before up in every slice, and in the adapter's part.
struct DxSum {
  const Plan& p;
  const BackwardBuffers& buf;

  struct Operand {  // of dgate and dup
    TurnedRows turned[2];
    Rows rows[2];
    int64_t first;
  };
  Operand operand(int w, int64_t i, int64_t m, int64_t col, int64_t n) const {
    const bf16 *gate = buf.dgate + i * p.inter_padded, *up = buf.dup + i * p.inter_padded;
    Operand a{{{gate, p.inter_padded, nullptr, m, kNormal, kTurned},
               {up, p.inter_padded, nullptr, m, kNormalUp, kTurnedUp}},
              {},
              col};
    if (p.turns_codes()) return a;
    a.rows[kGate] = p.rows_of(w, kRows, gate + col, p.inter_padded, nullptr, m, n, n);
    a.rows[kUp] = p.rows_of(w, kUpRows, up + col, p.inter_padded, nullptr, m, n, n);
    return a;
  }
  void product(int w, Operand& a, int64_t e, int64_t slice, int64_t u, float* c) const {
    const Slice& s = p.slices[size_t(slice)];
    for (int q : {kGate, kUp})
      p.base_nn(w, a.turned[q], p.columns_of(a.rows[q], s.begin - a.first), e, q, s, u * kCols,
                q == kUp, c);
  }
  bool adapts() const { return p.lora.r[kGate] || p.lora.r[kUp]; }
  void adapt(int w, int64_t e, int64_t i, int64_t m, int64_t u, float* c) const {
    const int n = 2 * u + 1 < panels(p.layer.hidden) ? 2 : 1;
    for (int q : {kGate, kUp}) {
      if (!p.lora.r[q]) continue;
      const bf16* g = buf.g[q] + i * p.rank_padded[q];
      if (p.lora.dropout > 0) {
        float* c2 = p.c(w, kC2);
        std::fill(c2, c2 + m * kCols, 0.f);
        p.add_low_rank(w, g, p.rank_padded[q], m, p.factor(e, q, kAT), 2 * u, n, false, c2);
        p.kernel.drop_add(p.key(q), p.route.mask.data() + i, c2, m, u * kCols, c);
      } else {
        p.add_low_rank(w, g, p.rank_padded[q], m, p.factor(e, q, kAT), 2 * u, n, true, c);
      }
    }
  }
  void begin(int64_t, int64_t) const {}
  const float* weight() const { return nullptr; }
};

// sum over rows of small[row][j] * wide[row][col..]: out[j][...] for dA, transposed for dB.
// `small` [rows][rp] bf16.
struct LowRankGrad {
  int proj;
  const bf16* small;
  const bf16* wide;
  int64_t ld, width;
  bool by_token, drop, transposed;
  float* out;
};

void low_rank_grad(const Plan& p, int w, int64_t e, const LowRankGrad& j) {
  const int64_t r = p.lora.r[j.proj], rp = p.rank_padded[j.proj], begin = p.route.start[size_t(e)],
                end = p.route.start[size_t(e) + 1];
  const int64_t expert = p.route.expert[size_t(e)];
  float* out = j.out + expert * r * j.width;
  for (int64_t j0 = 0; j0 < r; j0 += kRowBlock) {  // C holds kRowBlock rows
    const int64_t jr = min64(kRowBlock, r - j0);
    for (int64_t i = begin; i < end; i += kRowBlock) {
      const int64_t m = min64(kRowBlock, end - i), mp = round_up(m, 2);
      Rows at{scratch(w, kAt, jr * mp * p.bf16_kernel.a_size), mp, jr};
      p.bf16_kernel.transpose(j.small + i * rp + j0, rp, m, mp, jr, (void*)at.a);
      const int32_t* ids = j.by_token ? p.route.token.data() + i : nullptr;
      const bf16* wide = j.by_token ? j.wide : j.wide + i * j.ld;
      int64_t ld = j.ld;
      if (j.drop) {
        auto* masked = (bf16*)scratch(w, kDropped, m * j.width * 2);
        p.kernel.drop_rows(p.key(j.proj), p.route.mask.data() + i, wide, j.ld, ids, m, j.width,
                           masked, j.width);
        wide = masked, ld = j.width, ids = nullptr;
      }
      for (int64_t col = 0; col < j.width; col += kCols) {
        float* c = p.c(w);
        p.bf16_kernel.tn(at, wide, ld, ids, m, col, j.width, false, c, p.panels(w));
        const int64_t cols = min64(kCols, j.width - col);
        float* to = j.transposed ? out + col * r + j0 : out + j0 * j.width + col;
        p.kernel.put_block(c, jr, cols, j.transposed, i > begin, to, j.transposed ? r : j.width);
      }
    }
  }
  p.kernel.settle();
}

void lora_grads(const Plan& p, const BackwardBuffers& buf, const Grads& g) {
  std::vector<LowRankGrad> jobs;
  const bool drop = p.lora.dropout > 0;
  const bf16* dout[3] = {buf.dgate, buf.dup, buf.dy};
  for (int q = 0; q < 3; ++q) {
    if (!p.lora.r[q]) continue;
    const bool down = q == kDown;
    if (g.da[q])
      jobs.push_back({q, down ? buf.gw : buf.g[q], down ? buf.h : p.batch.x,
                      down ? p.inter_padded : p.layer.hidden, p.layer.cols(q), !down, drop, false,
                      g.da[q]});
    if (g.db[q])
      jobs.push_back({q, buf.t[q], dout[q], down ? p.layer.hidden : p.inter_padded, p.layer.rows(q),
                      down, false, true, g.db[q]});
  }
  const int64_t n = int64_t(jobs.size());
  parallel(n * p.route.active(),
           [&](int64_t i, int w) { low_rank_grad(p, w, i / n, jobs[size_t(i % n)]); });
}

// LoRA gradients of experts that no token chose are zero.
void clear_unused(const Layer& l, const Lora& lora, const Grads& g, const Routing& routing) {
  std::vector<char> hit(size_t(l.experts), 0);
  for (int32_t e : routing.expert) hit[size_t(e)] = 1;
  for (int q = 0; q < 3; ++q)
    for (int64_t e = 0; e < l.experts; ++e) {
      if (hit[size_t(e)]) continue;
      const int64_t a = lora.r[q] * l.cols(q), b = lora.r[q] * l.rows(q);
      if (g.da[q]) std::fill_n(g.da[q] + e * a, a, 0.f);
      if (g.db[q]) std::fill_n(g.db[q] + e * b, b, 0.f);
    }
}

// One wave: `saved` its rows of gate and up, or null; x: tokens quantized to compute those again.
void backward_wave(Plan& p, const Quantized* x, const bf16* dy, const bf16* saved, const Grads& g,
                   bool want_lora, const ColumnSums& dx) {
  const Layer& l = p.layer;
  const Lora& lora = p.lora;
  const int64_t rows = p.route.rows();
  BackwardBuffers buf{dy,
                      saved,
                      {},
                      {},
                      nullptr,
                      p.shared(kDGate, rows, p.inter_padded),
                      p.shared(kDUp, rows, p.inter_padded),
                      nullptr,
                      (float*)scratch(-1, kDots, rows * panels(l.intermediate) * 4)};
  if (!saved) {
    bf16* again = p.shared(kSaved, rows, 2 * l.intermediate);
    p.gate_up(x, nullptr, again);
    buf.saved = again;
  }
  if (want_lora && lora.r[kDown]) buf.h = p.shared(kH, rows, p.inter_padded);
  static constexpr Slot gs[3] = {kGateG, kUpG, kDownG}, ts[3] = {kGateT, kUpT, kDownT};
  bf16* t[3] = {};
  for (int q = 0; q < 3; ++q)
    if (lora.r[q]) {
      buf.g[q] = p.shared(gs[q], rows, p.rank_padded[q]);
      if (want_lora) t[q] = p.shared(ts[q], rows, p.rank_padded[q]);
      buf.t[q] = t[q];
    }
  if (want_lora && lora.r[kDown]) buf.gw = p.shared(kDownW, rows, p.rank_padded[kDown]);
  gate_stage(p, buf);
  if (g.dw) router_grad(p, buf, g.dw);
  p.per_expert([&](int64_t e, int w) {
    for (int q : {kGate, kUp})
      if (lora.r[q])
        row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1],
                   [&](int64_t i, int64_t m) {
                     const bf16* dout = (q == kGate ? buf.dgate : buf.dup) + i * p.inter_padded;
                     low_rank_out(p, buf, w, e, q,
                                  p.rows_of(w, kRows, dout, p.inter_padded, nullptr, m,
                                            p.inter_padded, p.inter_padded),
                                  i);
                   });
  });
  if (g.dx.wanted()) sum_stage(p, DxSum{p, buf}, dx);
  if (!want_lora) return;
  p.per_expert([&](int64_t e, int w) {
    p.low_rank_in(w, e, {kGate, kUp}, p.batch.x, l.hidden, true, false, t);
    p.low_rank_in(w, e, {kDown}, buf.h, p.inter_padded, false, true, t);
  });
  lora_grads(p, buf, g);
}

}  // namespace

void moe_backward(const Layer& l, const Batch& b, const Lora& lora, Compute compute, const bf16* dy,
                  const bf16* saved, const Grads& g) {
  check_compute(l, compute);
  CallLock lock;
  const Routing routing = make_route(b, l.experts, lora.seed);
  if (b.mine && g.dw) std::fill_n(g.dw, b.tokens * b.top_k, 0.f);
  if (routing.expert.empty()) g.dx.clear(b.tokens * l.hidden);
  bool want_lora = false;
  for (int q = 0; q < 3; ++q) want_lora |= lora.r[q] && (g.da[q] || g.db[q]);
  if (want_lora) clear_unused(l, lora, g, routing);
  std::vector<Quantized> x;
  std::vector<Route> waves = routing.waves(kWaveRows);
  for (Route& wave : waves) {
    const int64_t first = wave.first_row;
    const ColumnSums dx = column_sums(g.dx, b.tokens, l.hidden, first == 0, &wave == &waves.back());
    Plan p(l, b, lora, compute, std::move(wave));
    if (!saved && !first) x = p.quantized_tokens();
    backward_wave(p, x.empty() ? nullptr : &x[0], dy,
                  saved ? saved + first * 2 * l.intermediate : nullptr, g, want_lora, dx);
  }
}

}  // namespace kt
