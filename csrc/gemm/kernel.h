// The whole ABI out of ISA code: one Kernel per tier and weight format.
//
// Every function runs on the calling thread, touches only what it is given, and writes every
// element of its output. C is always a scratch of fp32 [m][kCols]: two panels of 16 columns side by
// side. Operand A is row-major with element type `a_size` bytes (2: bf16, used in place; 4: fp32,
// gather() converts), zero beyond the true reduction length.
#pragma once
#include "gemm/panel.h"

namespace kt {

struct Rows {
  const void* a;  // [m][ld] elements of a_size bytes
  int64_t ld, m;
};

// Rows in the int8 domain: codes [m][ld] quads of quad_size bytes, scale and start [m][groups].
struct RowScale {
  float scale, shift;  // shift: -kRoundMagic * scale, exactly: scale has 22 bits
};
// A whole number n of less than 22 bits is the float with these bits plus n, less this float. So
// fma(scale, that float, shift) rounds as scale * n does, in one operation instead of two.
constexpr int32_t kRoundMagicBits = 0x4b400000;
constexpr int64_t kRowScaleChannels = 128;  // values per scale of a row in transposed products
KT_OP int64_t padded_channels(const Shape& s) { return round_up(s.n, 64); }
constexpr int64_t kGroupBytes =
    sizeof(RowScale) + sizeof(int32_t);  // of a row's group: scale, start
struct Quantized {
  const void* codes;
  const RowScale* scale;
  const int32_t* start;          // kRoundMagicBits - bias * sum of the codes of the group
  int64_t ld, group, groups, m;  // group: values per scale
};

// A row's dropout mask is named by the seed of its batch plus its place in it, token * top_k +
// slot, times this number (2^64 / golden ratio, which spreads neighbours).
constexpr uint64_t kMaskStep = 0x9E3779B97F4A7C15ull;

struct DropKey {
  int projection;  // 0 gate, 1 up, 2 down
  float p;         // probability of zeroing
};

struct Kernel {
  const char *isa, *cpu, *format;
  const char* slow_on;  // CPU vendor on which this tier is usable but not chosen by itself
  Storage stored;
  const char* codes;  // the published codes that it takes (kt_core/loading/codes.py)
  const int* groups;  // values per scale that the format allows
  int group_count, default_group;
  int a_size;         // bytes of an A element
  int64_t line_size;  // bytes of one unpacked line (16 channels x 1 pair)
  int quad_size;      // bytes of four activation codes in the int8 domain; 0: no such domain
  bool int16_pays;    // products of two-digit rows are faster here than those of bf16

  // -- weights ------------------------------------------------------------------------------------
  // Packs panels [p0, p1) of W, element (i, j) at src[i*rs + j*cs]; false if a value is not finite.
  // scratch: pack_scratch() bytes (panel.h).
  bool (*pack)(const void* src, DType t, int64_t rs, int64_t cs, const Shape& s, int64_t p0,
               int64_t p1, uint8_t* dst, void* scratch);
  // The same from published codes, bit for bit; false if one is no number of the format or a scale
  // is not finite.
  bool (*pack_codes)(const Codes& w, const Shape& s, int64_t p0, int64_t p1, uint8_t* dst,
                     void* scratch);
  // Rows [16 p, 16 p + 16) as fp32 into out [16][k] (only rows < n are written).
  void (*unpack)(const Packed& w, int64_t p, float* out);

  // -- matrix products ----------------------------------------------------------------------------
  // dst[i][0..kp) = src[rows ? rows[i] : i][0..k), zero padded.
  void (*gather)(const bf16* src, int64_t ld, const int32_t* rows, int64_t m, int64_t k, int64_t kp,
                 void* dst);
  // C[:, 16q..] (+)= A W_q[panel p_q]^T for q < count (1 or 2); both weights have the same shape.
  void (*nt)(const Rows& a, const Packed* const* w, const int64_t* p, int count, bool add, float* c,
             void* scratch);
  // As nt for panels `panel`, panel + 1 of a matrix that is rounded to bf16 as it is read (a LoRA
  // factor). lines: 2 line_size bytes per pair of padded_rank(k); rows: pack_scratch() bytes.
  void (*nt_of)(const Rows& a, const Matrix& w, int64_t panel, int count, bool add, float* c,
                void* lines, void* rows);
  // C[:, 0..32) (+)= A W[:, col..col+32): the transposed product from the same bytes; A is [m][n].
  void (*nn)(const Rows& a, const Packed& w, int64_t col, bool add, float* c, void* scratch);
  // at[j][i] = u[i][j] for i < m, zero for m <= i < mp: operand A of tn.
  void (*transpose)(const bf16* u, int64_t ld, int64_t m, int64_t mp, int64_t r, void* at);
  // C[r][0..32) (+)= at [r][mp] x v[rows[i] or i][col .. col+32); columns >= cols read as zero.
  void (*tn)(const Rows& at, const bf16* v, int64_t ldv, const int32_t* rows, int64_t m,
             int64_t col, int64_t cols, bool add, float* c, void* scratch);

  // -- int8 domain (null without one) -------------------------------------------------------------
  // Quantizes m rows for weights of shape s: codes [m][kp / 4] quads, scale and start [m][groups].
  // digits 2: a value is 256 a + b, with rows a and b one after the other in all three.
  void (*quantize)(const bf16* src, int64_t ld, int64_t m, const Shape& s, int64_t group,
                   int digits, void* codes, RowScale* scale, int32_t* start);
  // As nt, without `add`.
  void (*nt8)(const Quantized& a, const Packed* const* w, const int64_t* p, int count, float* c,
              void* scratch);
  // Rows as fp32 in [-1, 1], zero from n to np, times `top` [m][groups of kRowScaleChannels].
  void (*normalize)(const bf16* src, int64_t ld, const int32_t* rows, int64_t m, int64_t n,
                    int64_t np, float* out, float* top);
  // Such rows times the scales of W's channels for the group of column `col`, quantized to two
  // digits with a scale per kRowScaleChannels: codes [2 m][np / 4] quads, np = padded_channels().
  // factors: scratch, fp32 [2 np].
  void (*quantize_across)(const float* rows, const float* top, int64_t m, const Packed& w,
                          int64_t col, void* codes, RowScale* scale, int32_t* start,
                          float* factors);
  // As nn for such rows, without `add`.
  void (*nn8)(const Quantized& a, const Packed& w, int64_t col, float* c, void* scratch);

  // -- elementwise --------------------------------------------------------------------------------
  // C = [gate | up]; h = act(gate) * up from the unrounded values, 16 columns;
  // gate/up (may be null) receive `cols` rounded pre-activations.
  void (*gate_forward)(Act act, const float* c, int64_t m, int64_t cols, bf16* gate, bf16* up,
                       int64_t ld, bf16* h, int64_t ldh);
  // dh_raw = C[:, 0 .. cols), cols <= kCols. Writes dgate, dup (x weight) and h (may be null) in
  // whole panels, dot[i*ldd + q] = <dh_raw_i, h_i> over panel q.
  void (*gate_backward)(Act act, const float* c, int64_t m, int64_t cols, const bf16* gate,
                        const bf16* up, int64_t ld, const float* weight, bf16* dgate, bf16* dup,
                        bf16* h, int64_t ldo, float* dot, int64_t ldd);
  // dst[i][0..cols) = bf16(scale * (weight ? weight[i] : 1) * C[i][...]).
  void (*narrow_rows)(const float* c, int64_t m, int64_t cols, float scale, const float* weight,
                      bf16* dst, int64_t ld);
  // acc[rows[i]][0..32) += (weight ? weight[i] : 1) * C[i][...].
  void (*scatter)(const float* c, int64_t m, const int32_t* rows, const float* weight, float* acc,
                  int64_t ld);
  // C [m][0..cols), or its transpose, written to out, or added if `onto`. Whole vectors are written
  // past the caches: other threads may read them after settle().
  void (*put_block)(const float* c, int64_t m, int64_t cols, bool transposed, bool onto, float* out,
                    int64_t ld);
  void (*settle)();
  // C += src, both [m][kCols].
  void (*add_rows)(const float* src, int64_t m, float* c);
  // C[i] (+)= src[2 i] + src[2 i + 1], rows of kCols.
  void (*add_pairs)(const float* src, int64_t m, bool add, float* c);
  // dst = mask o src over [m][k], kept values x 1/(1-p); keyed by (masks[i], projection, element).
  void (*drop_rows)(const DropKey& key, const uint64_t* masks, const bf16* src, int64_t ld,
                    const int32_t* rows, int64_t m, int64_t k, bf16* dst, int64_t ldd);
  // acc += mask o C over [m][32], elements col..col+32.
  void (*drop_add)(const DropKey& key, const uint64_t* masks, const float* c, int64_t m,
                   int64_t col, float* acc);
};

}  // namespace kt
