// The border between the executor and the kernels: packed weights, quantised activations, and the table of functions
// that each instruction set fills.
#pragma once
#include <cstddef>
#include <cstdint>

namespace mill {

constexpr int PANEL = 16;     // rows of a weight interleaved so that one SIMD lane is one output feature
constexpr int GROUP = 32;     // features of a quantised group
constexpr int PAGE = 16;      // positions of a KV page
constexpr int RUN = 64;       // positions that share one step of the online softmax
constexpr int SEGMENT = 512;  // positions summed on their own, then merged in order: what two threads may split

enum class Codes : uint8_t { U4, U8, F16, BF16, F32 };
// F16: a scale is one, as in most files. I8: an integer times an f16 of its row's 256 features, as in K-quants.
enum class Scales : uint8_t { F16, I8, F32 };

// How a weight is packed. Quantised: w = scale * (code - zero) + min, scale and min per row and group of 32 / halves.
struct Layout {
  Codes codes;
  Scales scales;  // and mins
  bool has_min;
  uint8_t halves;  // 1: a scale for each 32 features, 2: for each 16
  uint8_t zero;    // 0, 4, 8, 16, 32 or 128
  bool quantised() const { return codes == Codes::U4 || codes == Codes::U8; }
};

// (rows, cols) weight as ceil(rows / 16) panels, one after the other, so that a thread reads one stream of memory.
// A panel of a quantised weight is its groups, each: codes, then scales [half][row], then mins [half][row].
//   U4: byte 64 j + 4 row + b of the codes, j and b < 4: low nibble feature 4 j + b, high nibble feature 16 + 4 j + b
//   U8: byte 64 j + 4 row + b of the codes, j < 8, b < 4: feature 4 j + b
// With I8 scales, what they multiply stands before every 8 groups: f16 [row], and f16 [row] again for mins.
// A panel of a float weight is [feature][row].
struct PackedWeight {
  Layout layout;
  int rows, cols, panels;
  size_t panel_bytes;
  const uint8_t* data;  // 64-byte aligned
  const float* bias;    // (rows,) or null
};

constexpr size_t codes_bytes(Codes c) { return c == Codes::U4 ? PANEL * GROUP / 2 : PANEL * GROUP; }
constexpr int SUPER = 8;  // groups that share what I8 scales multiply
constexpr size_t scale_bytes(Scales s, int halves) {
  return size_t(halves) * PANEL * (s == Scales::F32 ? 4 : s == Scales::F16 ? 2 : 1);
}
constexpr size_t group_bytes(Codes c, Scales s, int halves, bool has_min) {
  return codes_bytes(c) + scale_bytes(s, halves) * (has_min ? 2 : 1);
}
constexpr size_t super_bytes(Scales s, bool has_min) { return s == Scales::I8 ? (has_min ? 2 : 1) * PANEL * 2 : 0; }
// Of `groups` groups, and of where group g begins.
constexpr size_t groups_bytes(const Layout& l, size_t groups) {
  return groups * group_bytes(l.codes, l.scales, l.halves, l.has_min) +
         (groups + SUPER - 1) / SUPER * super_bytes(l.scales, l.has_min);
}
constexpr size_t group_offset(const Layout& l, size_t g) {
  return groups_bytes(l, g) + (g % SUPER == 0 ? super_bytes(l.scales, l.has_min) : 0);
}

// Activations quantised by groups of 32 features, or 16 where `fine`: x ~ scale * q, q in [-127, 127].
// Tokens stand in tiles of the kernels' width (the last one ragged), so that a kernel walks one pointer:
//   q        [tile][feature / 32][token of the tile][32]
//   others   [tile][group][token of the tile]
struct QuantRows {
  int8_t* q;
  float* scale;
  int32_t* neg_sum;  // - sum of the group's q
  float* scaled;     // scale * sum of the group's q
  bool fine;
};

struct LinearArgs {
  const PackedWeight* weight;
  const float* x;         // (tokens, cols), for float weights
  QuantRows xq;           // for quantised weights
  const float* residual;  // (tokens, rows) or null
  float* out;             // (tokens, rows)
  int tokens;
  uint8_t* scratch;  // linear_scratch(cols) bytes of this thread's own, 64-byte aligned
};

// A panel of 8-bit codes with f32 scales and mins.
constexpr size_t linear_scratch(int cols) {
  return size_t(cols) / GROUP * group_bytes(Codes::U8, Scales::F32, 1, true);
}

// One request's part of an attention op.
struct AttentionArgs {
  const float* q;             // (tokens of the step, n_heads * head_dim)
  float* out;                 // same
  const void* k_pages;        // f16 or f32 [page][kv_head][head_dim][PAGE]
  const void* v_pages;        // f16 or f32 [page][kv_head][PAGE][v_stride]
  const int32_t* page_table;  // of this request
  int n_heads, n_kv_heads, head_dim, v_stride;
  int window;
  float scale, softcap;
};

// What a segment of positions gives one (token, head), beside the unnormalised output: what its exponentials are
// relative to, and their sum.
struct SegmentState {
  float max, sum;
};

// A loop of pure arithmetic, for measuring: `ops` operations a round. seed: 32 floats.
struct Recipe {
  const char* name;
  double ops;
  double (*run)(int64_t rounds, const float* seed);
};

struct KernelTable {
  const char* name;
  int tile;  // tokens that share one unpacking of a weight panel, and stand together in QuantRows
  // rows of the output: panels [panel0, panel1) of the weight, all tokens
  void (*linear)(const LinearArgs&, int panel0, int panel1);
  void (*unpack_row)(const PackedWeight&, int row, float scale, float* out);
  // features [k0, k0 + n) of one token of a step of `tokens`, dim features wide
  void (*quantise)(const float* x, int k0, int n, int dim, int token, int tokens, const QuantRows& out);
  void (*rms_norm)(const float* x, const float* weight, float* out, int dim, int group, float eps);
  void (*add)(const float* x, const float* y, float* out, size_t n);
  void (*act_mul)(const float* gate, const float* up, float* out, size_t n, int act);
  void (*rope)(const float* x, float* out, const float* cos, const float* sin, int heads, int head_dim, int half);
  struct Attention {
    void (*write)(const float* k, const float* v, void* k_pages, void* v_pages, int slot, int n_kv_heads, int head_dim,
                  int v_stride);
    // tokens [row0, row1) of the step at positions position0.., all heads of kv_head, all segments; scratch as below
    void (*rows)(const AttentionArgs&, int row0, int row1, int position0, int kv_head, float* scratch);
    // one token, one segment of positions, heads of kv_head: partial result (heads, head_dim) and their states
    void (*segment)(const AttentionArgs&, int row, int position, int kv_head, int segment, float* partial,
                    SegmentState* states, float* scratch);
  } attention[2];  // by the cache's format: f16, f32
  void (*attention_merge)(const AttentionArgs&, int row, int kv_head, const float* const* partials,
                          const SegmentState* const* states, int n);
  float (*max_finite)(const float* x, int n);  // not a number if any x is not finite
  float (*max)(const float* x, int n);
  double (*sum_exp)(const float* x, int n, float max);                               // sum exp(x - max)
  void (*weights)(const float* x, int n, float max, double temperature, double* w);  // exp((x - max) / temperature)
  struct Ceilings {
    uint64_t (*read)(const uint8_t* p, size_t n);
    Recipe fma, dot;
  } ceilings;
};

constexpr int ATTENTION_TOKENS = 32;  // tokens of a request that share each K and V page once converted
constexpr int ATTENTION_HEADS = 16;   // heads of a group worked at once
constexpr int ATTENTION_BLOCK = 6;    // (token, head) rows whose sums stand in registers together
// floats of scratch a thread needs for attention
inline size_t attention_scratch(int group, int head_dim, int v_stride) {
  size_t rows = size_t(group < ATTENTION_HEADS ? group : ATTENTION_HEADS) * ATTENTION_TOKENS + ATTENTION_BLOCK;
  return size_t(RUN) * (head_dim + v_stride)  // K and V of a run, f32
         + rows * (2 * size_t(v_stride) + head_dim + PANEL) + size_t(ATTENTION_BLOCK) * RUN;
}

const KernelTable* select_kernels(const char* isa);  // null isa: the best of this machine; null if it cannot run
int list_kernels(const char** names, int capacity);  // compiled and runnable here

}  // namespace mill
