// Counting sort of the (token, slot) assignments by expert, and its cut into waves.
//
// A wave is as many whole experts as have about `rows` assignments together: forward and backward
// go through a batch wave by wave, so what they hold between their stages (h, dgate, dup, packed
// LoRA factors) is bounded whatever the number of tokens. Experts stay in ascending order, so sums
// over experts have the same bits for any wave size.
#pragma once
#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "moe/moe.h"

namespace kt {

struct Route {                          // one wave
  std::span<const int32_t> expert;      // experts that got at least one assignment, ascending
  std::vector<int64_t> start;           // rows of expert[i]: [start[i], start[i + 1])
  std::span<const int32_t> assignment;  // token * top_k + slot, by expert, then ascending
  std::span<const int32_t> token;       // row -> token
  std::span<const uint64_t> mask;       // row -> name of its dropout mask (kMaskStep)
  std::span<const float> weight;        // row -> routing weight
  int64_t first_row;                    // of the wave in the whole batch

  int64_t rows() const { return int64_t(token.size()); }
  int64_t active() const { return int64_t(expert.size()); }
};

struct Routing {  // a whole batch; members as in Route
  std::vector<int32_t> expert;
  std::vector<int64_t> start;
  std::vector<int32_t> assignment, token;
  std::vector<uint64_t> mask;
  std::vector<float> weight;

  std::vector<Route> waves(int64_t rows) const {
    std::vector<Route> out;
    for (size_t e = 0; e < expert.size();) {
      size_t end = e + 1;
      while (end < expert.size() && start[end + 1] - start[e] <= rows) ++end;
      const size_t at = size_t(start[e]), n = size_t(start[end]) - at;
      Route r{std::span(expert).subspan(e, end - e),
              {},
              std::span(assignment).subspan(at, n),
              std::span(token).subspan(at, n),
              std::span(mask).subspan(at, n),
              std::span(weight).subspan(at, n),
              start[e]};
      for (size_t i = e; i <= end; ++i) r.start.push_back(start[i] - start[e]);
      out.push_back(std::move(r));
      e = end;
    }
    return out;
  }
};

// Active experts, dealt out to `workers` that will each begin with an equal number of them: to the
// one with the fewest rows so far the expert with the most that is left. So they get done together,
// and what may have to be stolen at the end are the smallest.
inline std::vector<int64_t> dealt(const Route& route, int64_t workers) {
  const int64_t n = route.active(), hands = std::min(workers, n);
  auto rows = [&](int64_t e) { return route.start[size_t(e) + 1] - route.start[size_t(e)]; };
  std::vector<int64_t> order(static_cast<size_t>(n)), out(order.size()), next, sum;
  for (int64_t e = 0; e < n; ++e) order[size_t(e)] = e;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return rows(a) > rows(b); });
  for (int64_t w = 0; w < hands; ++w) next.push_back(n * w / hands), sum.push_back(0);
  for (int64_t e : order) {
    int64_t best = -1;
    for (int64_t w = 0; w < hands; ++w)
      if (next[size_t(w)] < n * (w + 1) / hands && (best < 0 || sum[size_t(w)] < sum[size_t(best)]))
        best = w;
    out[size_t(next[size_t(best)]++)] = e;
    sum[size_t(best)] += rows(e);
  }
  return out;
}

// seed: names the dropout masks of a batch without parts.
inline Routing make_route(const Batch& b, int64_t experts, uint64_t seed) {
  Routing r;
  const int64_t n = b.tokens * b.top_k, *index = b.index;
  auto counts = [&](int64_t i) { return !b.mine || b.mine[index[i]]; };
  std::vector<int64_t> at(size_t(experts) + 1, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] < 0 || index[i] >= experts)
      throw std::invalid_argument("top_k_index holds " + std::to_string(index[i]) + " for token " +
                                  std::to_string(i / b.top_k) + "; this layer has experts 0.." +
                                  std::to_string(experts - 1));
    if (counts(i)) ++at[size_t(index[i]) + 1];
  }
  r.start.push_back(0);
  for (int64_t e = 0; e < experts; ++e) {
    if (at[size_t(e) + 1]) {
      r.expert.push_back(int32_t(e));
      r.start.push_back(r.start.back() + at[size_t(e) + 1]);
    }
    at[size_t(e) + 1] += at[size_t(e)];
  }
  const size_t rows = size_t(r.start.back());
  r.assignment.resize(rows), r.token.resize(rows), r.mask.resize(rows), r.weight.resize(rows);
  const std::vector<BatchPart> whole{{b.tokens, seed}};
  int64_t i = 0;
  for (const BatchPart& part : b.parts.empty() ? whole : b.parts)
    for (int64_t place = 0; place < part.tokens * b.top_k; ++place, ++i) {
      if (!counts(i)) continue;
      const size_t p = size_t(at[size_t(index[i])]++);
      r.assignment[p] = int32_t(i), r.token[p] = int32_t(i / b.top_k), r.weight[p] = b.weight[i];
      r.mask[p] = part.seed + uint64_t(place) * kMaskStep;
    }
  return r;
}

}  // namespace kt
