// The border between the executor and the kernels: packed weights, quantised activations, and the table of functions
// that each instruction set fills.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mill {

constexpr int PANEL = 16;     // rows of a weight interleaved so that one SIMD lane is one output feature
constexpr int GROUP = 32;     // features that share an activation scale
constexpr int PAGE = 16;      // positions of a KV page
constexpr int RUN = 64;       // positions that share one step of the online softmax
constexpr int SEGMENT = 512;  // positions summed on their own, then merged in order: what two threads may split

enum class Codes : uint8_t { U4, U8, F16, BF16, F32 };

// How a weight is packed. Quantised: w = scale * (code - zero) + min, scale and min per row and group of 32 / halves.
struct Layout {
  Codes codes;
  bool scale_f32;  // scales and mins are f32, else f16 (as most files keep them)
  bool has_min;
  uint8_t halves;  // 1: a scale for each 32 features, 2: for each 16
  uint8_t zero;    // 0, 8, 16, 32 or 128
  bool quantised() const { return codes == Codes::U4 || codes == Codes::U8; }
};

// (rows, cols) weight as ceil(rows / 16) panels. A panel of a quantised weight: codes of all groups, then scales, then
// mins.
//   U4: byte 64 j + 4 row + b of a group (j < 4, b < 4) holds feature 4 j + b in its low nibble, 16 + 4 j + b in its
//   high U8: byte 64 j + 4 row + b of a group (j < 8, b < 4) holds feature 4 j + b scales, mins: [group][half][row]
// A panel of a float weight: [feature][row].
struct PackedWeight {
  Layout layout;
  int rows, cols, panels;
  size_t panel_bytes, scale_offset, min_offset;  // within a panel
  const uint8_t* data;                           // 64-byte aligned
  const float* bias;                             // (rows,) or null
};

// Activations quantised: x ~ scale * q, q in [-127, 127]. A scale for each 16 features; where `fine` is not set both
// halves of a group of 32 have the same one, and the products need half the float work.
struct QuantRows {
  int8_t* q;      // (rows, dim)
  float* scale;   // (rows, dim / 16)
  int32_t* sums;  // (rows, dim / 16): sums of q
  float* scaled;  // (rows, dim / 16): scale * sum
  bool fine;
};

struct LinearArgs {
  const PackedWeight* weight;
  const float* x;         // (tokens, cols), for float weights
  QuantRows xq;           // for quantised weights
  const float* residual;  // (tokens, rows) or null
  float* out;             // (tokens, rows)
  int tokens;
};

// One request's part of an attention op.
struct AttentionArgs {
  const float* q;             // (tokens of the step, n_heads * head_dim)
  float* out;                 // same
  const uint16_t* k_pages;    // f16 [page][kv_head][head_dim][PAGE]
  const uint16_t* v_pages;    // f16 [page][kv_head][PAGE][v_stride]
  const int32_t* page_table;  // of this request
  int n_heads, n_kv_heads, head_dim, v_stride;
  int window;
  float scale, softcap;
};

// What a segment of positions gives one (token, head): softmax maximum, sum of exponentials, unnormalised output.
struct SegmentState {
  float max, sum;
};

struct KernelTable {
  const char* name;
  // rows of the output: panels [panel0, panel1) of the weight, all tokens
  void (*linear)(const LinearArgs&, int panel0, int panel1);
  void (*unpack_row)(const PackedWeight&, int row, float scale, float* out);
  void (*quantise)(const float* x, int n, const QuantRows& out, size_t at);  // out from feature `at` on
  void (*rms_norm)(const float* x, const float* weight, float* out, int dim, int group, float eps);
  void (*add)(const float* x, const float* y, float* out, size_t n);
  void (*act_mul)(const float* gate, const float* up, float* out, size_t n, int act);
  void (*rope)(const float* x, float* out, const float* cos, const float* sin, int heads, int head_dim, int half);
  void (*kv_write)(const float* k, const float* v, uint16_t* k_pages, uint16_t* v_pages, int slot, int n_kv_heads,
                   int head_dim, int v_stride);
  // tokens [row0, row1) of the step at positions position0.., all heads of kv_head, all segments; scratch as below
  void (*attention)(const AttentionArgs&, int row0, int row1, int position0, int kv_head, float* scratch);
  // one token, one segment of positions, heads of kv_head: partial result (heads, head_dim) and their states
  void (*attention_segment)(const AttentionArgs&, int row, int position, int kv_head, int segment, float* partial,
                            SegmentState* states, float* scratch);
  void (*attention_merge)(const AttentionArgs&, int row, int kv_head, const float* const* partials,
                          const SegmentState* const* states, int n);
  float (*max_finite)(const float* x, int n);  // not a number if any x is not finite
  float (*max)(const float* x, int n);
  double (*sum_exp)(const float* x, int n, float max);                               // sum exp(x - max)
  void (*weights)(const float* x, int n, float max, double temperature, double* w);  // exp((x - max) / temperature)
};

constexpr int ATTENTION_TOKENS = 16;  // tokens of a request that share each K and V page once converted
// floats of scratch a thread needs for attention
inline size_t attention_scratch(int group, int head_dim, int v_stride) {
  size_t rows = size_t(group) * ATTENTION_TOKENS;
  return size_t(RUN) * head_dim + size_t(RUN) * v_stride        // K and V of a run, f32
         + rows * (2 * size_t(v_stride) + head_dim + RUN + 8);  // segment and total outputs, scaled q, scores, states
}

const KernelTable* select_kernels(const char* isa);  // null isa: the best of this machine; null if it cannot run
int list_kernels(const char** names, int capacity);  // compiled and runnable here

}  // namespace mill
