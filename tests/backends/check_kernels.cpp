// Compares one instruction set's kernels with the plain ones on random data, without Python: so that those of another
// machine can run under an emulator. Usage: check_kernels NAME; exit 1 and a line for each kernel that differs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "pack.h"

using namespace mill;

static std::mt19937 rng(1);
static int failures = 0;

static std::vector<float> randoms(size_t n, float size = 1) {
  std::normal_distribution<float> d(0, size);
  std::vector<float> v(n);
  for (float& x : v) x = d(rng);
  return v;
}

static void compare(const std::string& what, const std::vector<float>& a, const std::vector<float>& b, double limit) {
  double top = 0, worst = 0;
  for (size_t i = 0; i < a.size(); i++) top = std::max(top, double(std::abs(b[i])));
  for (size_t i = 0; i < a.size(); i++) {
    double off = std::abs(double(a[i]) - b[i]) / (top + 1e-30);
    worst = std::isfinite(a[i]) ? std::max(worst, off) : 1e9;
  }
  if (worst > limit) {
    std::printf("%s differs by %.3g of its largest value\n", what.c_str(), worst);
    failures++;
  }
}

struct Rows {  // QuantRows with its memory
  std::vector<int8_t> q;
  std::vector<float> scale, scaled;
  std::vector<int32_t> neg_sum;
  QuantRows view;
  Rows(const KernelTable& k, const std::vector<float>& x, int tokens, int dim, bool fine)
      : q(size_t(tokens) * dim), scale(q.size() / 16), scaled(q.size() / 16), neg_sum(q.size() / 16) {
    view = {q.data(), scale.data(), neg_sum.data(), scaled.data(), fine};
    for (int t = 0; t < tokens; t++) k.quantise(x.data() + size_t(t) * dim, 0, dim, dim, t, tokens, view);
  }
};

static void check_linear(const KernelTable& k, const KernelTable& plain, const char* format, bool fine) {
  const int rows = 83, cols = 512, tokens = 19;
  Layout layout;
  layout_of(format, &layout);
  std::vector<uint8_t> file(row_bytes(format, cols) * rows);
  for (uint8_t& b : file) b = uint8_t(rng() % 0x30);  // as f16 or f32 any two or four of them are small and finite
  PackedWeight w = plan_weight(layout, rows, cols);
  void* memory = std::aligned_alloc(64, w.panel_bytes * w.panels);
  std::memset(memory, 0, w.panel_bytes * w.panels);
  for (int p = 0; p < w.panels; p++)
    pack_panel(format, w, {file.data(), file.size()}, p, static_cast<uint8_t*>(memory) + p * w.panel_bytes);
  w.data = static_cast<uint8_t*>(memory);
  auto x = randoms(size_t(tokens) * cols), bias = randoms(rows, 1e-3f),
       residual = randoms(size_t(tokens) * rows, 1e-3f);
  w.bias = bias.data();
  std::vector<float> out[2], row[2];
  for (int i = 0; i < 2; i++) {
    const KernelTable& table = i ? plain : k;
    Rows quantised(table, x, tokens, cols, fine);
    out[i].resize(residual.size());
    std::vector<uint8_t> scratch(linear_scratch(cols));
    table.linear({&w, x.data(), quantised.view, residual.data(), out[i].data(), tokens, scratch.data()}, 0, w.panels);
    row[i].resize(cols);
    table.unpack_row(w, 17, 2.0f, row[i].data());
  }
  compare(std::string("linear ") + format, out[0], out[1], 1e-5);
  compare(std::string("unpack_row ") + format, row[0], row[1], 0);
  std::free(memory);
}

static void check_attention(const KernelTable& k, const KernelTable& plain, int head_dim, int window, float softcap,
                            bool f32) {
  const int heads = 6, kv_heads = 2, pages = 50, tokens = 19, length = 700;
  const int v_stride = (head_dim + PAGE - 1) / PAGE * PAGE;
  std::vector<int32_t> table(pages);
  for (int i = 0; i < pages; i++) table[i] = (i * 7) % pages;
  auto keys = randoms(size_t(length) * kv_heads * head_dim), values = randoms(keys.size());
  auto q = randoms(size_t(tokens) * heads * head_dim);
  std::vector<float> out[2], split[2];
  for (int i = 0; i < 2; i++) {
    const KernelTable& t = i ? plain : k;
    std::vector<float> kp(size_t(pages) /* f16 takes the first half */ * kv_heads * head_dim * PAGE),
        vp(size_t(pages) * kv_heads * v_stride * PAGE);
    for (int p = 0; p < length; p++)
      t.attention[f32].write(keys.data() + size_t(p) * kv_heads * head_dim,
                             values.data() + size_t(p) * kv_heads * head_dim, kp.data(), vp.data(),
                             table[p / PAGE] * PAGE + p % PAGE, kv_heads, head_dim, v_stride);
    std::vector<float> scratch(attention_scratch(heads / kv_heads, head_dim, v_stride));
    out[i].resize(q.size());
    split[i].resize(size_t(heads) * head_dim);
    AttentionArgs a{q.data(), out[i].data(), kp.data(), vp.data(), table.data(), heads,
                    kv_heads, head_dim,      v_stride,  window,    0.125f,       softcap};
    for (int h = 0; h < kv_heads; h++) {
      t.attention[f32].rows(a, 0, 16, length - tokens, h, scratch.data());
      t.attention[f32].rows(a, 16, tokens, length - tokens + 16, h, scratch.data());
    }
    // The last row again, in segments: the same bits.
    AttentionArgs last = a;
    std::vector<float> whole(out[i].end() - size_t(heads) * head_dim, out[i].end());
    const int group = heads / kv_heads, segments = (length - 1) / SEGMENT + 1;
    for (int h = 0; h < kv_heads; h++) {
      std::vector<std::vector<float>> parts(segments, std::vector<float>(size_t(group) * v_stride));
      std::vector<std::vector<SegmentState>> states(segments, std::vector<SegmentState>(group));
      std::vector<const float*> pp;
      std::vector<const SegmentState*> sp;
      for (int s = 0; s < segments; s++) {
        t.attention[f32].segment(last, tokens - 1, length - 1, h, s, parts[s].data(), states[s].data(), scratch.data());
        pp.push_back(parts[s].data()), sp.push_back(states[s].data());
      }
      t.attention_merge(last, tokens - 1, h, pp.data(), sp.data(), segments);
    }
    if (std::memcmp(whole.data(), out[i].data() + size_t(tokens - 1) * heads * head_dim, whole.size() * 4)) {
      std::printf("%s: segments apart give other bits than together\n", t.name);
      failures++;
    }
  }
  compare("attention", out[0], out[1], 2e-5);
}

static void check_rows(const KernelTable& k, const KernelTable& plain, int n) {
  auto x = randoms(n, 2), y = randoms(n), cos = randoms(n / 4), sin = randoms(n / 4);
  std::vector<float> out[2][6];
  for (int i = 0; i < 2; i++) {
    const KernelTable& t = i ? plain : k;
    for (auto& o : out[i]) o.resize(n);
    t.rms_norm(x.data(), y.data(), out[i][0].data(), n, n / 2, 1e-5f);
    t.add(x.data(), y.data(), out[i][1].data(), n);
    for (int act = 0; act < 3; act++) t.act_mul(x.data(), y.data(), out[i][2 + act].data(), n, act);
    t.rope(x.data(), out[i][5].data(), cos.data(), sin.data(), 2, n / 2, n / 4);
    std::vector<double> w(n);
    float top = t.max(x.data(), n);
    t.weights(x.data(), n, top, 0.7, w.data());
    for (int j = 0; j < n; j++)
      if (std::abs(w[j] - std::exp((double(x[j]) - top) / 0.7)) > 1e-14) std::printf("weights differ\n"), failures++;
    double sum = 0;
    for (float v : x) sum += std::exp(double(v) - top);
    if (std::abs(t.sum_exp(x.data(), n, top) / sum - 1) > 1e-6) std::printf("sum_exp differs\n"), failures++;
    float kept = std::exchange(x[n / 3], NAN);
    if (!std::isnan(t.max_finite(x.data(), n))) std::printf("max_finite misses a not-a-number\n"), failures++;
    x[n / 3] = kept;
  }
  const char* names[] = {"rms_norm", "add", "silu", "gelu", "gelu_tanh", "rope"};
  for (int i = 0; i < 6; i++) compare(names[i], out[0][i], out[1][i], 2e-6);
}

int main(int argc, char** argv) {
  const KernelTable *k = select_kernels(argc > 1 ? argv[1] : nullptr), *plain = select_kernels("plain");
  if (!k) {
    std::printf("%s cannot run here\n", argv[1]);
    return 2;
  }
  for (const char* f :
       {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL", "IQ4_XS"})
    check_linear(*k, *plain, f, false);
  for (const char* f : {"Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K"}) check_linear(*k, *plain, f, true);
  for (bool f32 : {false, true})
    for (int head_dim : {64, 24}) {
      check_attention(*k, *plain, head_dim, 0, 0, f32);
      check_attention(*k, *plain, head_dim, 100, 0, f32);
      check_attention(*k, *plain, head_dim, 0, 5, f32);
    }
  for (int n : {64, 576, 1000}) check_rows(*k, *plain, n);
  std::printf("%s: %d differences\n", k->name, failures);
  return failures > 0;
}
