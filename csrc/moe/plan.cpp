// See plan.h.
#include "moe/plan.h"

#include <algorithm>
#include <cstring>

namespace kt {

void check_compute(const Layer& l, Compute compute) {
  if (compute == Compute::kBf16 || find_kernel(l.format).kernel->nt8) return;
  const std::string name = compute == Compute::kInt8 ? "int8" : "int16";
  throw std::invalid_argument("compute='" + name + "' is not possible with weights in format " +
                              l.format + ", which has no int8 domain; use compute='bf16'");
}

Plan::Plan(const Layer& of, const Batch& b, const Lora& lo, Compute compute, Route wave)
    : layer(of),
      batch(b),
      lora(lo),
      weights(find_kernel(of.format)),
      plain(find_kernel("bf16")),
      kernel(*weights.kernel),
      bf16_kernel(*plain.kernel),
      route(std::move(wave)),
      hidden_padded(round_up(of.hidden, kBlock)),
      inter_padded(round_up(of.intermediate, kBlock)),
      slices(slices_of(of)),
      owners(slice_owners(of.slices)),
      digits(int(compute)) {
  for (int p = 0; p < 3; ++p) rank_padded[p] = padded_rank(lo.r[p]);
}

void* Plan::panels(int w) const {
  // nt: kp values of two panels; nn: the padded n of the same matrices; tn: kRowBlock rows
  int64_t reduction =
      max64(max64(hidden_padded, inter_padded),
            max64(kRowBlock, max64(rank_padded[0], max64(rank_padded[1], rank_padded[2]))));
  return scratch(w, kPanels, reduction / 2 * 2 * kernel.line_size);
}

Rows Plan::rows_of(int w, Slot s, const bf16* src, int64_t ld, const int32_t* ids, int64_t m,
                   int64_t kk, int64_t kp) const {
  if (kernel.a_size == 2 && kk == kp && (!ids || m == 1))
    return {src + (ids ? ids[0] * ld : 0), ld, m};
  if (kernel.a_size == 2 && !ids && ld >= kp)
    return {src, ld, m};  // our own buffers: padded with zeros
  void* dst = scratch(w, s, m * kp * kernel.a_size);
  kernel.gather(src, ld, ids, m, kk, kp, dst);
  return {dst, kp, m};
}

Rows Plan::dropped(int w, int p, int64_t first, const bf16* src, int64_t ld, const int32_t* ids,
                   int64_t m, int64_t kk, int64_t kp) const {
  auto* tmp = (bf16*)scratch(w, kDropped, m * kp * 2);
  kernel.drop_rows(key(p), route.mask.data() + first, src, ld, ids, m, kk, tmp, kp);
  return rows_of(w, kSmall, tmp, kp, nullptr, m, kp, kp);
}

Matrix Plan::factor(int64_t active, int p, Side side) const {
  const int64_t r = lora.r[p], in = layer.cols(p), out = layer.rows(p),
                e = route.expert[size_t(active)], size = size_of(lora.type);
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
  bf16_kernel.nt_of(a, f, panel, count, add, c, panels(w),
                    scratch(w, kFactor, pack_scratch(padded_rank(f.k))));
}

void Plan::project(int w, const Rows& a, const Matrix& f, float scale, int64_t first, bf16* plain,
                   bf16* weighted, int64_t ld) const {
  const int64_t count = kt::panels(f.n);
  for (int64_t p = 0; p < count; p += 2) {
    multiply(w, a, f, p, p + 1 < count ? 2 : 1, false, c(w, kC2));
    for (bf16* dst : {plain, weighted})
      if (dst)
        bf16_kernel.narrow_rows(c(w, kC2), a.m, min64(kCols, f.n - p * kPanel), scale,
                                dst == weighted ? route.weight.data() + first : nullptr,
                                dst + p * kPanel, ld);
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
                 const int64_t in = layer.cols(p), kp = padded_rank(in);
                 if (lora.dropout > 0)
                   a = dropped(w, p, i, from, ld, ids, m, in, kp);
                 else if (!a.a)
                   a = rows_of(w, kRows, from, ld, ids, m, in, kp);
                 bf16* dst = t[p] + i * rank_padded[p];
                 project(w, a, factor(active, p, kA), lora.scaling[p], i, weighted ? nullptr : dst,
                         weighted ? dst : nullptr, rank_padded[p]);
               }
             });
}

std::vector<Quantized> Plan::quantized_tokens() const {
  if (!digits) return {};
  return quantize(kXCodes, kGate, batch.x, layer.hidden, batch.tokens);
}

std::vector<Quantized> Plan::quantize(Slot slot, int p, const bf16* src, int64_t ld,
                                      int64_t rows) const {
  struct OfSlice {
    Shape shape;
    int64_t begin, group, count, quads, offset;
  };
  std::vector<OfSlice> parts;
  int64_t bytes = 0;
  const int64_t all = rows * digits;
  for (const Slice& slice : slices) {
    const Shape& s = slice.shape(p);
    // h has a heavier tail than x (a product of two normals): with 128 values per scale its
    // rounding alone would be 1.4 %, with 32 it is 0.8 %.
    const int64_t group = min64(group_size(s), p == kDown ? 64 : 128),
                  count = (s.kp + group - 1) / group, quads = s.kp / 4;
    parts.push_back({s, slice.begin, group, count, quads, bytes});
    bytes += round_up(all * quads * kernel.quad_size, kAlign) +
             round_up(all * count * kGroupBytes, kAlign);
    if (p != kDown) break;  // x is the same for all slices
  }
  auto* base = (uint8_t*)scratch(-1, slot, bytes);
  std::vector<Quantized> out;
  for (const OfSlice& part : parts) {
    auto* scale =
        (RowScale*)(base + part.offset + round_up(all * part.quads * kernel.quad_size, kAlign));
    out.push_back({base + part.offset, scale, (int32_t*)(scale + all * part.count), part.quads,
                   part.group, part.count, all});
  }
  const int64_t step = 16;  // 16 rows of 2048: about 30 us, well above what a task costs
  const int64_t blocks = (rows + step - 1) / step;
  parallel(int64_t(parts.size()) * blocks, [&](int64_t t, int) {
    const OfSlice& part = parts[size_t(t / blocks)];
    const Quantized& q = out[size_t(t / blocks)];
    const int64_t i = t % blocks * step, at = i * digits;
    kernel.quantize(src + i * ld + part.begin, ld, min64(step, rows - i), part.shape, part.group,
                    digits, (uint8_t*)q.codes + at * part.quads * kernel.quad_size,
                    (RowScale*)q.scale + at * part.count, (int32_t*)q.start + at * part.count);
  });
  return out;
}

Quantized Plan::quantized_rows(int w, const Quantized& all, const int32_t* ids, int64_t first,
                               int64_t m) const {
  const int64_t bytes = digits * all.ld * kernel.quad_size, groups = digits * all.groups;
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
  if (!a.codes.m) return kernel.nt(a.plain, weight, panel, count, false, c, panels(w));
  if (digits == 1) return kernel.nt8(a.codes, weight, panel, count, c, panels(w));
  auto* both = (float*)scratch(w, kDigits, 2 * kRowBlock * kCols * 4);
  kernel.nt8(a.codes, weight, panel, count, both, panels(w));
  kernel.add_pairs(both, a.codes.m / 2, false, c);
}

bool Plan::turns_codes() const { return digits == 2 && group_size(slices[0].up) >= 64; }

// Operand A of one scale group of columns of `from`, whose first is `col`.
void Plan::turn(int w, TurnedRows& a, const Packed& from, int proj, const Slice& s,
                int64_t col) const {
  const int64_t n = padded_channels(from.shape), quads = n / 4, rows = 2 * a.m,
                count = (n + kRowScaleChannels - 1) / kRowScaleChannels,
                group = col / group_size(from.shape);
  if (a.slice == s.begin && a.group == group) return;
  auto* normal = (float*)scratch(w, a.normal, a.m * (n + count) * 4);
  float* top = normal + a.m * n;
  if (a.slice != s.begin)
    kernel.normalize(a.src + (proj == kDown ? 0 : s.begin), a.ld, a.ids, a.m, from.shape.n, n,
                     normal, top);
  auto* codes =
      (uint8_t*)scratch(w, a.slot, rows * (quads * kernel.quad_size + count * kGroupBytes));
  auto* scale = (RowScale*)(codes + rows * quads * kernel.quad_size);
  auto* start = (int32_t*)(scale + rows * count);
  kernel.quantize_across(normal, top, a.m, from, col, codes, scale, start,
                         (float*)scratch(w, kScaleFactors, 2 * n * 4));
  a.codes = {codes, scale, start, quads, kRowScaleChannels, count, rows};
  a.slice = s.begin, a.group = group;
}

void Plan::base_nn(int w, TurnedRows& a, const Rows& plain, int64_t e, int proj, const Slice& s,
                   int64_t col, bool add, float* c) const {
  const Packed from = weight(route.expert[size_t(e)], proj, s);
  if (!turns_codes()) return kernel.nn(plain, from, col, add, c, panels(w));
  turn(w, a, from, proj, s, col);
  auto* both = (float*)scratch(w, kDigits, 2 * kRowBlock * kCols * 4);
  kernel.nn8(a.codes, from, col, both, panels(w));
  kernel.add_pairs(both, a.m, add, c);
}

}  // namespace kt
