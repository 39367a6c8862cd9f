// Every tier that this CPU offers against plain loops in double, without Python: for emulators of
// other CPUs, on which an instruction the CPU lacks ends the program.
//
// Prints "chosen TIER", then "TIER FORMAT ROWS ERROR..." per case: errors of the output, dx, dw, dA
// and dB (largest of the three projections), and of the int8 domain's output where there is one,
// each divided by its bar (docs/kernels.md). Exits with 1 when one is above 1. With the name of a
// tier it runs that one alone, whatever the CPU offers.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "gemm/registry.h"
#include "machine/parallel.h"
#include "moe/moe.h"

namespace kt {
namespace {

// H, I and the rank divide neither a panel nor a block.
constexpr int64_t E = 3, K = 2, H = 100, I = 72, R = 7;
constexpr float kScaling = 0.5f;
constexpr double kForwardBar = 4e-3, kGradBar = 6e-3, kInt8Bar = 2e-2;
using Vec = std::vector<double>;

// -- the specification
// ------------------------------------------------------------------------------

struct Model {
  Vec w[3], a[3], b[3];  // [E, rows, cols], [E, R, cols], [E, rows, R]
  static int64_t rows(int p) { return p == kDown ? H : I; }
  static int64_t cols(int p) { return p == kDown ? I : H; }

  // W + scaling B A, element (i, j) of expert e
  double weight(int p, int64_t e, int64_t i, int64_t j, bool lora) const {
    double v = w[p][size_t((e * rows(p) + i) * cols(p) + j)];
    for (int64_t r = 0; lora && r < R; ++r)
      v += kScaling * b[p][size_t((e * rows(p) + i) * R + r)] *
           a[p][size_t((e * R + r) * cols(p) + j)];
    return v;
  }
  Vec product(int p, int64_t e, const Vec& x, bool lora) const {
    Vec y(size_t(rows(p)));
    for (int64_t i = 0; i < rows(p); ++i)
      for (int64_t j = 0; j < cols(p); ++j) y[size_t(i)] += weight(p, e, i, j, lora) * x[size_t(j)];
    return y;
  }
};

struct Result {
  Vec out, dx, dw, da[3], db[3];
};

// dx += W^T dy, and the gradients of the factors of W x.
void product_backward(const Model& m, int p, int64_t e, const Vec& x, const Vec& dy, Vec& dx,
                      Result& g) {
  const int64_t rows = Model::rows(p), cols = Model::cols(p);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) dx[size_t(j)] += m.weight(p, e, i, j, true) * dy[size_t(i)];
  for (int64_t r = 0; r < R; ++r) {
    double ax = 0, dyb = 0;
    for (int64_t j = 0; j < cols; ++j) ax += m.a[p][size_t((e * R + r) * cols + j)] * x[size_t(j)];
    for (int64_t i = 0; i < rows; ++i) {
      dyb += dy[size_t(i)] * m.b[p][size_t((e * rows + i) * R + r)];
      g.db[p][size_t((e * rows + i) * R + r)] += kScaling * dy[size_t(i)] * ax;
    }
    for (int64_t j = 0; j < cols; ++j)
      g.da[p][size_t((e * R + r) * cols + j)] += kScaling * dyb * x[size_t(j)];
  }
}

// One (token, slot): adds to out, and with dy to the gradients.
void assignment(const Model& m, int64_t e, const Vec& x, double weight, bool lora, double* out,
                const double* dy, double* dx, double* dw, Result& g) {
  Vec gate = m.product(kGate, e, x, lora), up = m.product(kUp, e, x, lora), h(I);
  for (size_t i = 0; i < h.size(); ++i) h[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  Vec y = m.product(kDown, e, h, lora);
  for (size_t i = 0; i < y.size(); ++i) out[i] += weight * y[i];
  if (!dy) return;
  Vec dyw(H), dh(I), dgate(I), dup(I), into(H);
  for (size_t i = 0; i < y.size(); ++i) *dw += dy[i] * y[i], dyw[i] = weight * dy[i];
  product_backward(m, kDown, e, h, dyw, dh, g);
  for (size_t i = 0; i < h.size(); ++i) {
    const double s = 1 / (1 + std::exp(-gate[i]));
    dup[i] = dh[i] * gate[i] * s;
    dgate[i] = dh[i] * up[i] * s * (1 + gate[i] * (1 - s));
  }
  product_backward(m, kGate, e, x, dgate, into, g);
  product_backward(m, kUp, e, x, dup, into, g);
  for (size_t i = 0; i < into.size(); ++i) dx[i] += into[i];
}

// -- one case
// ---------------------------------------------------------------------------------------

struct Random {
  std::mt19937 engine{1};
  // n values of N(0, 1) / sqrt(width) that bf16 holds, as bf16 and as they are
  std::vector<bf16> values(int64_t n, int64_t width) {
    std::normal_distribution<float> normal;
    std::vector<bf16> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(narrow(normal(engine) / std::sqrt(float(width))));
    return v;
  }
};

Vec widened(const std::vector<bf16>& v) {
  Vec out;
  for (bf16 x : v) out.push_back(widen(x));
  return out;
}

double error(const std::vector<float>& got, const Vec& want) {
  double distance = 0, length = 0;
  for (size_t i = 0; i < want.size(); ++i)
    distance += (got[i] - want[i]) * (got[i] - want[i]), length += want[i] * want[i];
  return std::isfinite(distance) ? std::sqrt(distance / length) : INFINITY;
}

struct Case {
  Random random;
  std::vector<uint8_t> memory;
  std::vector<bf16> a[3], b[3], x, dy;
  std::vector<int64_t> index;
  std::vector<float> weight;
  Layer layer;
  Model model;
  int64_t tokens;

  Case(const char* format, int64_t group, int64_t rows)
      : layer{E, H, I, group, format, Act::kSilu, nullptr}, tokens(rows) {
    memory.resize(size_t(layer_bytes(layer) + kAlign));
    layer.data = (uint8_t*)round_up(int64_t(memory.data()), kAlign);
    for (int p = 0; p < 3; ++p) {
      const int64_t out = Model::rows(p), in = Model::cols(p);
      std::vector<float> dense(size_t(16 * round_up(out, 16) * in));
      for (int64_t e = 0; e < E; ++e) {
        const auto w = random.values(out * in, in);
        if (!pack_matrix(layer, e, p, w.data(), DType::kBf16, in)) std::abort();
        unpack_matrix(layer, e, p, dense.data());
        model.w[p].insert(model.w[p].end(), dense.begin(), dense.begin() + out * in);
      }
      a[p] = random.values(E * R * in, in), b[p] = random.values(E * out * R, R);
      model.a[p] = widened(a[p]), model.b[p] = widened(b[p]);
    }
    x = random.values(tokens * H, 1), dy = random.values(tokens * H, 1);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t k = 0; k < K; ++k) {
        index.push_back((t + k) % E);
        weight.push_back(0.1f + float(random.engine() % 1000) / 1000);
      }
  }

  Result reference(bool lora, bool backward) const {
    Result g;
    g.out.resize(x.size()), g.dx.resize(x.size()), g.dw.resize(weight.size());
    for (int p = 0; p < 3; ++p) g.da[p].resize(a[p].size()), g.db[p].resize(b[p].size());
    const Vec xs = widened(x), dys = widened(dy);
    for (size_t t = 0; t < size_t(tokens); ++t)
      for (size_t k = 0; k < K; ++k) {
        const size_t s = t * K + k;
        assignment(model, index[s], Vec(&xs[t * H], &xs[t * H] + H), weight[s], lora, &g.out[t * H],
                   backward ? &dys[t * H] : nullptr, &g.dx[t * H], &g.dw[s], g);
      }
    return g;
  }

  // Errors of a forward and a backward as shares of their bars, where larger than they were.
  void train(const Batch& batch, const Lora& lora, Compute compute, const Result& g,
             std::vector<double>& shares) const {
    std::vector<float> out(x.size(), NAN), dx(x.size(), NAN), dw(weight.size(), NAN), da[3], db[3];
    std::vector<bf16> saved(size_t(tokens * K * 2 * I), 0x7fc0);
    Grads grads{{dx.data()}, dw.data(), {}, {}};
    for (int p = 0; p < 3; ++p) {
      da[p].assign(a[p].size(), NAN), db[p].assign(b[p].size(), NAN);
      grads.da[p] = da[p].data(), grads.db[p] = db[p].data();
    }
    moe_forward(layer, batch, lora, compute, Output{out.data()}, saved.data());
    moe_backward(layer, batch, lora, compute, dy.data(), saved.data(), grads);
    auto found = [&](size_t i, double share) { shares[i] = std::max(shares[i], share); };
    found(0, error(out, g.out) / kForwardBar);
    found(1, error(dx, g.dx) / kGradBar);
    found(2, error(dw, g.dw) / kGradBar);
    for (int p = 0; p < 3; ++p) {
      found(3, error(da[p], g.da[p]) / kGradBar);
      found(4, error(db[p], g.db[p]) / kGradBar);
    }
  }

  // Prints the line of one tier; false if an error is above its bar.
  bool check(const KernelEntry& entry) {
    const Batch batch{tokens, K, x.data(), index.data(), weight.data()};
    Lora lora;
    for (int p = 0; p < 3; ++p)
      lora.a[p] = a[p].data(), lora.b[p] = b[p].data(), lora.r[p] = R, lora.scaling[p] = kScaling;
    lora.type = DType::kBf16;

    // a loss's gradient has a component along the output; pure noise would nearly cancel in dw
    const Vec want = reference(true, false).out;
    for (size_t i = 0; i < dy.size(); ++i) dy[i] = narrow(widen(dy[i]) + float(want[i]));
    const Result g = reference(true, true);
    std::vector<double> shares(5);
    train(batch, lora, Compute::kBf16, g, shares);
    if (entry.kernel->quad_size) {
      train(batch, lora, Compute::kInt16, g, shares);
      std::vector<float> out(x.size(), NAN);
      moe_forward(layer, batch, {}, Compute::kInt8, Output{out.data()}, nullptr);
      shares.push_back(error(out, reference(false, false).out) / kInt8Bar);
    }
    std::printf("%s %s %d", entry.kernel->isa, entry.kernel->format, int(tokens));
    bool good = true;
    for (double s : shares) std::printf(" %.2f", s), good &= s <= 1;
    std::printf("\n");
    return good;
  }
};

int run(const char* only) {
  constexpr uint32_t kAll = ~0u;
  if (only) use_cpu(CpuRegisters{kAll, kAll, kAll, kAll, kAll, kAll, true, ""});
  std::printf("chosen %s\n", only ? only : current_isa().c_str());
  set_threads(2, true);
  bool good = true;
  for (auto& entry : registry()) {
    if (!entry.usable || (only && std::string(only) != entry.kernel->isa)) continue;
    force_isa(entry.kernel->isa);
    const Kernel& k = *entry.kernel;  // the smallest group: it ends most often
    int64_t group = k.default_group;
    for (int i = 0; i < k.group_count; ++i)
      if (k.groups[i]) group = min64(group, k.groups[i]);
    for (int64_t tokens : {2, 20}) good &= Case(entry.kernel->format, group, tokens).check(entry);
  }
  return good ? 0 : 1;
}

}  // namespace
}  // namespace kt

int main(int argc, char** argv) { return kt::run(argc > 1 ? argv[1] : nullptr); }
