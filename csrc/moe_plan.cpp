// See moe_plan.h.
#include "moe_plan.h"

#include <algorithm>
#include <cstring>

namespace kt {

namespace {

// Slices begin at multiples of this many values; see max_slices.
int64_t slice_unit(const Layer& l, const Kernel& k) {
  if (!k.scaled) return kBlock;
  return l.group ? max64(64, l.group) : 128;
}

}  // namespace

int64_t max_slices(const Layer& l) {
  const int64_t unit = slice_unit(l, *find_kernel(l.format).kernel);
  return min64(kMaxSlices, (l.intermediate + unit - 1) / unit);
}

std::vector<Slice> slices_of(const Layer& l) {
  const Kernel& k = *find_kernel(l.format).kernel;
  const int64_t unit = slice_unit(l, k), units = (l.intermediate + unit - 1) / unit;
  std::vector<Slice> out(size_t(l.slices));
  int64_t offset = 0;
  for (int64_t i = 0; i < l.slices; ++i) {
    Slice& s = out[size_t(i)];
    s.begin = units * i / l.slices * unit;
    s.width = min64(l.intermediate, units * (i + 1) / l.slices * unit) - s.begin;
    s.up = stored_shape(s.width, l.hidden, l.group);
    s.down = stored_shape(l.hidden, s.width, l.group);
    s.up_bytes = matrix_bytes(s.up, k.bits, k.scaled);
    s.down_bytes = matrix_bytes(s.down, k.bits, k.scaled);
    s.offset = offset;
    offset = s.matrix(l.experts, 0);
  }
  return out;
}

int64_t layer_bytes(const Layer& l) { return slices_of(l).back().matrix(l.experts, 0); }

void bind_slices(const Layer& l) {
  const std::vector<int64_t> owners = slice_owners(l.slices);
  const std::vector<Slice> slices = slices_of(l);
  if (owners.size() == 2) return;
  for (size_t node = 0; node + 1 < owners.size(); ++node) {
    const int64_t begin = slices[size_t(owners[node])].offset,
                  end = slices[size_t(owners[node + 1] - 1)].matrix(l.experts, 0);
    bind_to_node(l.data + begin, end - begin, node);
  }
}

bool pack_matrix(const Layer& l, int64_t expert, int projection, const void* src, DType t,
                 int64_t ld) {
  const Kernel& k = *find_kernel(l.format).kernel;
  std::atomic<bool> finite{true};
  const int64_t step = 4;  // 4 panels of 2048 bf16 are 256 KB of input: about 0.1 ms
  Entry lock;
  for (const Slice& slice : slices_of(l)) {
    const Shape& s = slice.shape(projection);
    const int64_t count = panels(s.n), first = slice.begin * (projection == kDown ? 1 : ld);
    const auto* from = (const uint8_t*)src + first * size_of(t);
    parallel((count + step - 1) / step, [&](int64_t i, int w) {
      if (!k.pack(from, t, ld, 1, s, i * step, min64(count, (i + 1) * step),
                  l.data + slice.matrix(expert, projection), scratch(w, kRows, pack_scratch(s.kp))))
        finite = false;
    });
  }
  return finite;
}

void unpack_matrix(const Layer& l, int64_t expert, int projection, float* out) {
  const Kernel& k = *find_kernel(l.format).kernel;
  const int64_t ld = l.cols(projection);
  Entry lock;
  for (const Slice& slice : slices_of(l)) {
    const Packed w{l.data + slice.matrix(expert, projection), slice.shape(projection)};
    float* to = out + slice.begin * (projection == kDown ? 1 : ld);
    parallel(panels(w.shape.n), [&](int64_t p, int worker) {
      if (w.shape.k == ld) return k.unpack(w, p, to + p * kPanel * ld);
      auto* part = (float*)scratch(worker, kC, kPanel * w.shape.k * 4);
      k.unpack(w, p, part);
      for (int64_t r = p * kPanel; r < min64(w.shape.n, (p + 1) * kPanel); ++r, part += w.shape.k)
        std::copy_n(part, w.shape.k, to + r * ld);
    });
  }
}

void check_compute(const Layer& l, Compute compute) {
  if (compute == Compute::kBf16 || find_kernel(l.format).kernel->nt8) return;
  const std::string name = compute == Compute::kInt8 ? "int8" : "int16";
  throw std::invalid_argument("compute='" + name + "' needs int8 or int4 weights, but these are " +
                              l.format + "; use compute='bf16'");
}

Plan::Plan(const Layer& layer, const Batch& b, const Lora& lo, Compute compute, Route wave)
    : l(layer),
      batch(b),
      lora(lo),
      weights(find_kernel(layer.format)),
      plain(find_kernel("bf16")),
      k(*weights.kernel),
      kb(*plain.kernel),
      route(std::move(wave)),
      hp(round_up(layer.hidden, kBlock)),
      ip(round_up(layer.intermediate, kBlock)),
      slices(slices_of(layer)),
      owners(slice_owners(layer.slices)),
      digits(int(compute)) {
  for (int p = 0; p < 3; ++p) rp[p] = padded_rank(lo.r[p]);
}

void* Plan::panels(int w) const {
  // nt: kp values of two panels; nn: the padded n of the same matrices; tn: kRowBlock rows
  int64_t reduction = max64(max64(hp, ip), max64(kRowBlock, max64(rp[0], max64(rp[1], rp[2]))));
  return scratch(w, kPanels, reduction / 2 * 2 * k.line_size);
}

Rows Plan::rows_of(int w, Slot s, const bf16* src, int64_t ld, const int32_t* ids, int64_t m,
                   int64_t kk, int64_t kp) const {
  if (k.a_size == 2 && kk == kp && (!ids || m == 1)) return {src + (ids ? ids[0] * ld : 0), ld, m};
  if (k.a_size == 2 && !ids && ld >= kp) return {src, ld, m};  // our own buffers: padded with zeros
  void* dst = scratch(w, s, m * kp * k.a_size);
  k.gather(src, ld, ids, m, kk, kp, dst);
  return {dst, kp, m};
}

Rows Plan::dropped(int w, int p, int64_t first, const bf16* src, int64_t ld, const int32_t* ids,
                   int64_t m, int64_t kk, int64_t kp) const {
  auto* tmp = (bf16*)scratch(w, kDropped, m * kp * 2);
  k.drop_rows(key(p), route.mask.data() + first, src, ld, ids, m, kk, tmp, kp);
  return rows_of(w, kSmall, tmp, kp, nullptr, m, kp, kp);
}

Matrix Plan::factor(int64_t active, int p, Side side) const {
  const int64_t r = lora.r[p], in = l.cols(p), out = l.rows(p), e = route.expert[size_t(active)],
                size = size_of(lora.type);
  const auto* a = (const uint8_t*)lora.a[p] + e * r * in * size;
  const auto* b = (const uint8_t*)lora.b[p] + e * out * r * size;
  switch (side) {
    case kA:
      return {a, lora.type, in, 1, r, in};
    case kAT:
      return {a, lora.type, 1, in, in, r};
    case kB:
      return {b, lora.type, r, 1, out, r};
    default:
      return {b, lora.type, 1, r, r, out};
  }
}

void Plan::multiply(int w, const Rows& a, const Matrix& f, int64_t panel, int count, bool add,
                    float* c) const {
  kb.nt_of(a, f, panel, count, add, c, panels(w),
           scratch(w, kFactor, pack_scratch(padded_rank(f.k))));
}

void Plan::project(int w, const Rows& a, const Matrix& f, float scale, int64_t first, bf16* plain,
                   bf16* weighted, int64_t ld) const {
  const int64_t count = kt::panels(f.n);
  for (int64_t p = 0; p < count; p += 2) {
    multiply(w, a, f, p, p + 1 < count ? 2 : 1, false, c(w, kC2));
    for (bf16* dst : {plain, weighted})
      if (dst)
        kb.narrow_rows(c(w, kC2), a.m, min64(kCols, f.n - p * kPanel), scale,
                       dst == weighted ? route.weight.data() + first : nullptr, dst + p * kPanel,
                       ld);
  }
  for (bf16* dst : {plain, weighted})
    for (int64_t i = 0; dst && i < a.m; ++i)
      std::fill(dst + i * ld + f.n, dst + (i + 1) * ld, bf16(0));
}

void Plan::add_low_rank(int w, const bf16* t, int64_t ld, int64_t m, const Matrix& f, int64_t panel,
                        int count, bool add, float* c) const {
  const int64_t kp = padded_rank(f.k);
  multiply(w, rows_of(w, kSmall, t, ld, nullptr, m, kp, kp), f, panel, count, add, c);
}

void Plan::low_rank_in(int w, int64_t active, std::initializer_list<int> ps, const bf16* src,
                       int64_t ld, bool by_token, bool weighted, bf16* const* t) const {
  row_blocks(route.start[size_t(active)], route.start[size_t(active) + 1],
             [&](int64_t i, int64_t m) {
               const int32_t* ids = by_token ? route.token.data() + i : nullptr;
               const bf16* from = by_token ? src : src + i * ld;
               Rows a{};
               for (int p : ps) {
                 if (!lora.r[p]) continue;
                 const int64_t in = l.cols(p), kp = padded_rank(in);
                 if (lora.dropout > 0)
                   a = dropped(w, p, i, from, ld, ids, m, in, kp);
                 else if (!a.a)
                   a = rows_of(w, kRows, from, ld, ids, m, in, kp);
                 bf16* dst = t[p] + i * rp[p];
                 project(w, a, factor(active, p, kA), lora.scaling[p], i, weighted ? nullptr : dst,
                         weighted ? dst : nullptr, rp[p]);
               }
             });
}

std::vector<Quantized> Plan::quantized_tokens() const {
  if (!digits) return {};
  return quantize(kXCodes, kGate, batch.x, l.hidden, batch.tokens);
}

std::vector<Quantized> Plan::quantize(Slot slot, int p, const bf16* src, int64_t ld,
                                      int64_t rows) const {
  struct Part {
    Shape shape;
    int64_t begin, group, count, quads, offset;
  };
  std::vector<Part> parts;
  int64_t bytes = 0;
  const int64_t all = rows * digits;
  for (const Slice& slice : slices) {
    const Shape& s = slice.shape(p);
    // h has a heavier tail than x (a product of two normals): with 128 values per scale its
    // rounding alone would be 1.4 %, with 32 it is 0.8 %.
    const int64_t group = min64(group_size(s), p == kDown ? 64 : 128),
                  count = (s.kp + group - 1) / group, quads = s.kp / 4;
    parts.push_back({s, slice.begin, group, count, quads, bytes});
    bytes +=
        round_up(all * quads * k.quad_size, kAlign) + round_up(all * count * kGroupBytes, kAlign);
    if (p != kDown) break;  // x is the same for all slices
  }
  auto* base = (uint8_t*)scratch(-1, slot, bytes);
  std::vector<Quantized> out;
  for (const Part& part : parts) {
    auto* scale =
        (RowScale*)(base + part.offset + round_up(all * part.quads * k.quad_size, kAlign));
    out.push_back({base + part.offset, scale, (int32_t*)(scale + all * part.count), part.quads,
                   part.group, part.count, all});
  }
  const int64_t step = 16;  // 16 rows of 2048: about 30 us, well above what a task costs
  const int64_t blocks = (rows + step - 1) / step;
  parallel(int64_t(parts.size()) * blocks, [&](int64_t t, int) {
    const Part& part = parts[size_t(t / blocks)];
    const Quantized& q = out[size_t(t / blocks)];
    const int64_t i = t % blocks * step, at = i * digits;
    k.quantize(src + i * ld + part.begin, ld, min64(step, rows - i), part.shape, part.group, digits,
               (uint8_t*)q.codes + at * part.quads * k.quad_size,
               (RowScale*)q.scale + at * part.count, (int32_t*)q.start + at * part.count);
  });
  return out;
}

Quantized Plan::quantized_rows(int w, const Quantized& all, const int32_t* ids, int64_t first,
                               int64_t m) const {
  const int64_t bytes = digits * all.ld * k.quad_size, groups = digits * all.groups;
  auto* codes = (const uint8_t*)all.codes;
  if (!ids || m == 1) {
    const int64_t i = ids ? ids[0] : first;
    return {codes + i * bytes,
            all.scale + i * groups,
            all.start + i * groups,
            all.ld,
            all.group,
            all.groups,
            m * digits};
  }
  auto* dst = (uint8_t*)scratch(w, kCodes, m * (bytes + groups * kGroupBytes));
  auto* scale = (RowScale*)(dst + m * bytes);
  auto* start = (int32_t*)(scale + m * groups);
  for (int64_t i = 0; i < m; ++i) {
    std::memcpy(dst + i * bytes, codes + ids[i] * bytes, size_t(bytes));
    std::memcpy(scale + i * groups, all.scale + ids[i] * groups, size_t(groups) * sizeof(RowScale));
    std::memcpy(start + i * groups, all.start + ids[i] * groups, size_t(groups) * 4);
  }
  return {dst, scale, start, all.ld, all.group, all.groups, m * digits};
}

void Plan::base_nt(int w, const BaseRows& a, const Packed* const* weight, const int64_t* panel,
                   int count, float* c) const {
  if (!a.codes.m) return k.nt(a.plain, weight, panel, count, false, c, panels(w));
  if (digits == 1) return k.nt8(a.codes, weight, panel, count, c, panels(w));
  auto* both = (float*)scratch(w, kDigits, 2 * kRowBlock * kCols * 4);
  k.nt8(a.codes, weight, panel, count, both, panels(w));
  k.add_pairs(both, a.codes.m / 2, false, c);
}

bool Plan::turns_codes() const { return digits == 2 && group_size(slices[0].up) >= 64; }

// Operand A of one scale group of columns of `from`, whose first is `col`.
void Plan::turn(int w, TurnedRows& a, const Packed& from, int proj, const Slice& s,
                int64_t col) const {
  const int64_t n = padded_channels(from.shape), quads = n / 4, rows = 2 * a.m,
                count = (n + kChannels - 1) / kChannels, group = col / group_size(from.shape);
  if (a.slice == s.begin && a.group == group) return;
  auto* normal = (float*)scratch(w, a.normal, a.m * (n + count) * 4);
  float* top = normal + a.m * n;
  if (a.slice != s.begin)
    k.normalize(a.src + (proj == kDown ? 0 : s.begin), a.ld, a.ids, a.m, from.shape.n, n, normal,
                top);
  auto* codes = (uint8_t*)scratch(w, a.slot, rows * (quads * k.quad_size + count * kGroupBytes));
  auto* scale = (RowScale*)(codes + rows * quads * k.quad_size);
  auto* start = (int32_t*)(scale + rows * count);
  k.quantize_across(normal, top, a.m, from, col, codes, scale, start,
                    (float*)scratch(w, kFactor, 2 * n * 4));
  a.codes = {codes, scale, start, quads, kChannels, count, rows};
  a.slice = s.begin, a.group = group;
}

void Plan::base_nn(int w, TurnedRows& a, const Rows& plain, int64_t e, int proj, const Slice& s,
                   int64_t col, bool add, float* c) const {
  const Packed from = weight(route.expert[size_t(e)], proj, s);
  if (!turns_codes()) return k.nn(plain, from, col, add, c, panels(w));
  turn(w, a, from, proj, s, col);
  auto* both = (float*)scratch(w, kDigits, 2 * kRowBlock * kCols * 4);
  k.nn8(a.codes, from, col, both, panels(w));
  k.add_pairs(both, a.m, add, c);
}

void Plan::gate_up(const Quantized* x, bf16* h, bf16* saved) {
  const bool need_low_rank = lora.r[kGate] || lora.r[kUp];
  bf16* t[2] = {};
  for (int p : {kGate, kUp})
    if (lora.r[p]) t[p] = shared(p == kGate ? kGateT : kUpT, route.rows(), rp[p]);
  const ColumnTasks tasks(*this, kPanel);
  const bool along = tasks.whole() && lora.dropout == 0;  // with the rows of the task
  if (need_low_rank && !along)
    per_expert([&](int64_t e, int w) {
      low_rank_in(w, e, {kGate, kUp}, batch.x, l.hidden, true, false, t);
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
  const int64_t I = l.intermediate, count = kt::panels(I), expert = route.expert[size_t(e)];
  const int32_t* ids = route.token.data() + i;
  BaseRows a{};
  if (x) a.codes = quantized_rows(w, *x, ids, i, m);
  if (!x || (along && (lora.r[kGate] || lora.r[kUp])))
    a.plain = rows_of(w, kRows, batch.x, l.hidden, ids, m, l.hidden, hp);
  for (int q : {kGate, kUp})
    if (along && lora.r[q])
      project(w, a.plain, factor(e, q, kA), lora.scaling[q], i, t[q] + i * rp[q], nullptr, rp[q]);
  for (int64_t p = p0; p < p1; ++p) {
    const Slice& s = slice_of(p * kPanel);
    const Packed gate = weight(expert, kGate, s), up = weight(expert, kUp, s);
    const Packed* both[2] = {&gate, &up};
    const int64_t q0 = p - s.begin / kPanel, at[2] = {q0, q0}, cols = min64(kPanel, I - p * kPanel);
    base_nt(w, a, both, at, 2, c(w));
    for (int q : {kGate, kUp})
      if (lora.r[q])
        add_low_rank(w, t[q] + i * rp[q], rp[q], m, factor(e, q, kB), p, 1, true,
                     c(w) + q * kPanel);
    bf16* to = saved ? saved + i * 2 * I + p * kPanel : nullptr;
    k.gate_forward(l.act, c(w), m, cols, to, to ? to + I : nullptr, 2 * I,
                   h ? h + i * ip + p * kPanel : nullptr, ip);
  }
  if (h && p1 == count && ip > count * kPanel)
    for (int64_t r = i; r < i + m; ++r)
      std::fill(h + r * ip + count * kPanel, h + (r + 1) * ip, bf16(0));
}

ColumnTasks::ColumnTasks(const Plan& p, int64_t unit) {
  const int64_t I = p.l.intermediate, rows = p.route.rows(), active = p.route.active();
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
