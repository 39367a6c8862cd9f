// See layer.h.
#include "moe/layer.h"

#include <algorithm>
#include <atomic>

#include "gemm/registry.h"
#include "machine/parallel.h"
#include "moe/slots.h"

namespace kt {

namespace {

// Slices begin at multiples of this many values; see max_slices.
int64_t slice_unit(const Layer& l, const Kernel& k) {
  if (!k.stored.scaled()) return kBlock;
  return l.group ? max64(k.stored.zeros || k.stored.factor ? 128 : 64, l.group) : 128;
}

// f(kernel, its slice, matrix of the slice, first and last panel, scratch) for all of a matrix, on
// all threads; whether it was true every time.
bool pack_slices(const Layer& l, int64_t expert, int projection, auto f) {
  const Kernel& k = *find_kernel(l.format).kernel;
  std::atomic<bool> good{true};
  const int64_t step = 4;  // 4 panels of 2048 bf16 are 256 KB of input: about 0.1 ms
  CallLock lock;
  for (const Slice& slice : slices_of(l)) {
    const Shape& s = slice.shape(projection);
    const int64_t count = panels(s.n);
    parallel((count + step - 1) / step, [&](int64_t i, int w) {
      if (!f(k, slice, s, i * step, min64(count, (i + 1) * step),
             l.data + slice.matrix(expert, projection), scratch(w, kRows, pack_scratch(s.kp))))
        good = false;
    });
  }
  return good;
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
    s.up_bytes = matrix_bytes(s.up, k.stored);
    s.down_bytes = matrix_bytes(s.down, k.stored);
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
  return pack_slices(l, expert, projection,
                     [&](const Kernel& k, const Slice& slice, const Shape& s, int64_t p0,
                         int64_t p1, uint8_t* dst, void* scratch) {
                       const int64_t first = slice.begin * (projection == kDown ? 1 : ld);
                       return k.pack((const uint8_t*)src + first * size_of(t), t, ld, 1, s, p0, p1,
                                     dst, scratch);
                     });
}

bool pack_codes(const Layer& l, int64_t expert, int projection, const Codes& w) {
  return pack_slices(l, expert, projection,
                     [&](const Kernel& k, const Slice& slice, const Shape& s, int64_t p0,
                         int64_t p1, uint8_t* dst, void* scratch) {
                       Codes part = w;  // slices begin at groups
                       if (projection == kDown) {
                         const int64_t g = l.group ? slice.begin / l.group : 0;
                         part.codes += slice.begin * w.cs;
                         part.scales += g * w.scale_cs;
                         if (w.zeros) part.zeros += g * w.zero_cs;
                       } else {
                         part.codes += slice.begin * w.rs;
                         part.scales += slice.begin * w.scale_rs;
                         if (w.zeros) part.zeros += slice.begin * w.zero_rs;
                         if (w.factor) part.factor += slice.begin * w.factor_rs;
                       }
                       return k.pack_codes(part, s, p0, p1, dst, scratch);
                     });
}

void unpack_matrix(const Layer& l, int64_t expert, int projection, float* out) {
  const Kernel& k = *find_kernel(l.format).kernel;
  const int64_t ld = l.cols(projection);
  CallLock lock;
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

}  // namespace kt
