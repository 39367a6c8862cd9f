// The stage whose reduction runs over the intermediate dimension: columns of y and of dX.
//
// A row (token, slot) gets, in this order, the product of every slice, each on its own in fp32, and
// the adapter's part; rows are then added per token, experts ascending. The order is the same
// whoever computes what: on one node a task owns columns and does it all; on several, each node
// computes the products of its slices into a buffer, and after a join tasks that own tokens and
// columns add them. So is every product's block of rows, since matrix tiles round by its height.
//
// A stage S offers (i, m: rows of the route; e: active expert; u: 32 columns; c: [m][32])
//   operand(w, i, m, col, n)       rows [i, i + m), values [col, col + n) of I, ready to multiply
//   product(w, operand, e, slice, u, c)   c = the slice's part; may prepare the operand further
//   adapts(), adapt(w, e, i, m, u, c)     c += the adapter's part
//   begin(e, u)                    a task's columns of expert e are next
//   weight()                       per row, or null
#pragma once
#include "moe/plan.h"

namespace kt {

// What the buffer of several nodes may hold, but 32 columns at least: more columns take further
// turns. Well within the last-level caches of the machines that have several nodes.
constexpr int64_t kPartialBytes = 32 << 20;

template <class S>
void sum_row_block(const Plan& p, const S& s, int w, typename S::Operand& a, int64_t e, int64_t i,
                   int64_t m, int64_t u, float* c) {
  const int64_t slices = int64_t(p.slices.size());
  s.product(w, a, e, 0, u, c);
  float* part = slices > 1 ? p.c(w, kSummand) : nullptr;
  for (int64_t n = 1; n < slices; ++n) {
    s.product(w, a, e, n, u, part);
    p.kernel.add_rows(part, m, c);
  }
  if (!s.adapts()) return;
  if (!part) return s.adapt(w, e, i, m, u, c);
  std::fill(part, part + m * kCols, 0.f);
  s.adapt(w, e, i, m, u, part);
  p.kernel.add_rows(part, m, c);
}

// Column blocks per task where one task converts the rows of all experts: of up to 16, what gets
// done first when converting the rows costs half a block (it writes more than an L2 cache holds
// beside the sums). Few rows cost next to nothing: more tasks, to steal from.
inline int64_t units_per_sum(int64_t units, int64_t rows, int64_t threads) {
  if (rows <= 64) return min64(8, units_per_task(units, 1, rows, threads));
  auto halves = [&](int64_t n) {  // of the thread that has most
    return ((units + n - 1) / n + threads - 1) / threads * (2 * n + 1);
  };
  int64_t best = 1;
  for (int64_t n = 2; n <= 16; ++n)
    if (halves(n) < halves(best)) best = n;
  return best;
}

template <class S>
void sum_on_one_node(const Plan& p, const S& s, const ColumnSums& out) {
  const int64_t H = p.layer.hidden, tokens = p.batch.tokens, units = (H + kCols - 1) / kCols,
                step = units_per_sum(units, p.route.rows(), threads()), block = tokens * kCols;
  parallel((units + step - 1) / step, [&](int64_t task, int w) {
    const int64_t u0 = task * step, u1 = min64(units, u0 + step), values = (u1 - u0) * block;
    auto* own = out.kept ? nullptr : (float*)scratch(w, kAcc, values * 4);
    float* acc = out.begin(own, tokens, u0, 0, values);
    p.weights.calls->fetch_add(1, std::memory_order_relaxed);
    for (int64_t e = 0; e < p.route.active(); ++e) {
      s.begin(e, u0);
      row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1], [&](int64_t i, int64_t m) {
        typename S::Operand a = s.operand(w, i, m, 0, p.inter_padded);
        for (int64_t u = u0; u < u1; ++u) {
          float* c = p.c(w);
          sum_row_block(p, s, w, a, e, i, m, u, c);
          p.kernel.scatter(c, m, p.route.token.data() + i, s.weight() ? s.weight() + i : nullptr,
                           acc + (u - u0) * block, kCols);
        }
      });
    }
    for (int64_t u = u0; u < u1; ++u) out.end(p.kernel, acc + (u - u0) * block, H, u, 0, tokens);
  });
}

// Summands of all rows for columns [u0, u0 + n) x 32, in tiles [summand][unit][row][32].
struct Partial {
  int64_t summands, width, rows;  // width: units
  float* data;
  float* tile(int64_t summand, int64_t u, int64_t row) const {
    return data + ((summand * width + u) * rows + row) * kCols;
  }
};

// First half: every node its slices' products; of the adapter, every node some experts.
template <class S>
void summands_on_nodes(const Plan& p, const S& s, const Partial& part, int64_t u0, int64_t n) {
  const int64_t nodes = int64_t(p.owners.size()) - 1, active = p.route.active(),
                slices = int64_t(p.slices.size());
  std::vector<int64_t> counts, steps;
  for (int64_t node = 0; node < nodes; ++node) {
    const int64_t own = p.owners[size_t(node) + 1] - p.owners[size_t(node)],
                  adapted = s.adapts() ? (active - node + nodes - 1) / nodes : 0,
                  step =
                      units_per_task(n, own * active, p.route.rows(), p.threads_of(size_t(node)));
    steps.push_back(step);
    counts.push_back((own * active + adapted) * ((n + step - 1) / step));
  }
  parallel_on_nodes(counts, [&](int node, int64_t task, int w) {
    const int64_t step = steps[size_t(node)], blocks = (n + step - 1) / step, item = task / blocks,
                  first = p.owners[size_t(node)], own = p.owners[size_t(node) + 1] - first,
                  begin = task % blocks * step, end = min64(n, begin + step);
    const bool base = item < own * active;
    const int64_t summand = base ? first + item / active : slices,
                  e = base ? item % active : node + (item - own * active) * nodes;
    const Slice& slice = p.slices[size_t(base ? summand : 0)];
    p.weights.calls->fetch_add(1, std::memory_order_relaxed);
    row_blocks(p.route.start[size_t(e)], p.route.start[size_t(e) + 1], [&](int64_t i, int64_t m) {
      typename S::Operand a{};
      if (base) a = s.operand(w, i, m, slice.begin, slice.down.kp);
      for (int64_t u = begin; u < end; ++u) {
        float* c = part.tile(summand, u, i);
        if (base) {
          s.product(w, a, e, summand, u0 + u, c);
        } else {
          std::fill(c, c + m * kCols, 0.f);
          s.adapt(w, e, i, m, u0 + u, c);
        }
      }
    });
  });
}

// Rows [i, i + m) of one expert, columns of unit u: their sum to acc, the columns of tokens from t0
// on.
inline void add_summands(const Plan& p, const Partial& part, int w, int64_t i, int64_t m, int64_t u,
                         const float* weight, int64_t t0, float* acc) {
  float* c = p.c(w);
  std::copy_n(part.tile(0, u, i), m * kCols, c);
  for (int64_t n = 1; n < part.summands; ++n) p.kernel.add_rows(part.tile(n, u, i), m, c);
  auto* ids = (int32_t*)scratch(w, kTokens, kRowBlock * 4);
  for (int64_t r = 0; r < m; ++r) ids[r] = int32_t(p.route.token[size_t(i + r)] - t0);
  p.kernel.scatter(c, m, ids, weight ? weight + i : nullptr, acc, kCols);
}

// Second half: tasks own some tokens and 32 columns.
template <class S>
void add_on_nodes(const Plan& p, const S& s, const Partial& part, int64_t u0, int64_t n,
                  const ColumnSums& out) {
  const int64_t H = p.layer.hidden, tokens = p.batch.tokens,
                want = max64(1, 4 * threads() / n),  // blocks of tokens, so that all have work
      block = max64(16, (tokens + want - 1) / want), blocks = (tokens + block - 1) / block;
  const auto token = p.route.token.begin();
  parallel(n * blocks, [&](int64_t task, int w) {
    const int64_t u = task / blocks, t0 = task % blocks * block, t1 = min64(tokens, t0 + block),
                  values = (t1 - t0) * kCols;
    auto* own = out.kept ? nullptr : (float*)scratch(w, kAcc, values * 4);
    float* acc = out.begin(own, tokens, u0 + u, t0, values);
    for (int64_t e = 0; e < p.route.active(); ++e) {
      const auto from = token + p.route.start[size_t(e)], to = token + p.route.start[size_t(e) + 1];
      row_blocks(
          std::lower_bound(from, to, t0) - token, std::lower_bound(from, to, t1) - token,
          [&](int64_t i, int64_t m) { add_summands(p, part, w, i, m, u, s.weight(), t0, acc); });
    }
    out.end(p.kernel, acc, H, u0 + u, t0, t1 - t0);
  });
}

// Adds the stage's sum over this wave.
template <class S>
void sum_stage(const Plan& p, const S& s, const ColumnSums& out) {
  if (!p.on_nodes()) return sum_on_one_node(p, s, out);
  const int64_t units = (p.layer.hidden + kCols - 1) / kCols, rows = p.route.rows(),
                summands = int64_t(p.slices.size()) + s.adapts(),
                bytes = summands * rows * kCols * 4,  // of one unit
      width = max64(1, min64(units, kPartialBytes / bytes));
  const Partial part{summands, width, rows, (float*)scratch(-1, kPartial, width * bytes)};
  for (int64_t u0 = 0; u0 < units; u0 += width) {
    const int64_t n = min64(width, units - u0);
    summands_on_nodes(p, s, part, u0, n);
    add_on_nodes(p, s, part, u0, n, out);
  }
}

}  // namespace kt
