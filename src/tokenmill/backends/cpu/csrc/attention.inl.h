// Attention over the paged cache, keys and values read back from the cache's own format (KV: f16 as uint16_t, or f32).
//
// Positions are worked in runs of 64 and segments of 512 at fixed places, so the order of every sum depends on a
// query's own position only: not on the chunk it came in, nor on who else is in the step.
//
//   position  0 ......... 63 | 64 ....... 127 | ... 511 || 512 ...      p
//             one run          one run                 ||  next segment ^ the query sees (p - window, p]
//
// Within a segment: online softmax, a run at a time (Milakov & Gimelshein 2018). Segments are then merged in order.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

constexpr float NEG_INF = -__builtin_inff();
constexpr int RUN_PAGES = RUN / PAGE;
#if TM_AVX512
constexpr int D_BLOCK = 4;  // vectors of the output kept in registers
#else
constexpr int D_BLOCK = 2;
#endif
constexpr int Q_BLOCK = 4;  // heads that share each load

static TM_INLINE vf load_kv(const uint16_t* p) { return load_f16(p); }
static TM_INLINE vf load_kv(const float* p) { return load(p); }
static TM_INLINE void store_kv(uint16_t* p, vf v) { store_f16(p, v); }
static TM_INLINE void store_kv(float* p, vf v) { store(p, v); }

struct Head {  // one (token, head) while its tile is worked
  float *q, *segment_out, *total_out, *scores;
  float max, sum;              // of the segment so far
  float total_max, total_sum;  // of the segments before
  int first, last;             // positions it sees, inclusive
};

// scores of N heads against VB vectors of keys. k: f32 (page, head_dim, PAGE), or f16 pages where RAW
template <int N, int VB, bool RAW, class KV>
static TM_INLINE void score_vectors(Head* const* heads, const float* k, const KV* const* pages, int first,
                                    int head_dim) {
  vf acc[N][VB];
  for (int i = 0; i < N; i++)
    for (int b = 0; b < VB; b++) acc[i][b] = splat(0.0f);
  const float* q[N];
  for (int i = 0; i < N; i++) q[i] = heads[i]->q;
  for (int d = 0; d < head_dim; d++)
    for (int b = 0; b < VB; b++) {
      const int page = (first + b) * W / PAGE, s = (first + b) * W % PAGE;
      vf kd = RAW ? load_kv(pages[page] + d * PAGE + s) : load(k + (size_t(page) * head_dim + d) * PAGE + s);
      for (int i = 0; i < N; i++) acc[i][b] = fma(kd, splat(q[i][d]), acc[i][b]);
    }
  for (int i = 0; i < N; i++)
    for (int b = 0; b < VB; b++) store(heads[i]->scores + (first + b) * W, acc[i][b]);
}

// scores[RUN] of N heads against the pages of a run, some vectors of positions at once so that sums overlap
template <int N, bool RAW, class KV>
static TM_INLINE void run_scores(Head* const* heads, const float* k, const KV* const* pages, int n_pages,
                                 int head_dim) {
  constexpr int VB = W == 16 ? 4 : 2;
  const int n = n_pages * PAGE / W;
  int v = 0;
  for (; v + VB <= n; v += VB) score_vectors<N, VB, RAW>(heads, k, pages, v, head_dim);
  for (; v < n; v++) score_vectors<N, 1, RAW>(heads, k, pages, v, head_dim);
}

// Softmax step of one head over a run: masks, rescales what came before, leaves exp(score - max) in scores.
static TM_INLINE float run_softmax(Head& h, int run_start, int n, float softcap) {
  float* s = h.scores;
  if (softcap > 0)
    for (int i = 0; i < n; i++) s[i] = softcap * std::tanh(s[i] / softcap);
  for (int i = 0; i < h.first - run_start; i++) s[i] = NEG_INF;
  for (int i = h.last + 1 - run_start; i < RUN; i++) s[i] = NEG_INF;
  vf m = load(s);
  for (int i = W; i < RUN; i += W) m = vmax(m, load(s + i));
  float top = reduce_max(m);
  if (h.max > top) top = h.max;
  vf neg = splat(-top), sum = splat(0.0f);
  for (int i = 0; i < RUN; i += W) {
    vf e = vexp(add(load(s + i), neg));
    store(s + i, e);
    sum = add(sum, e);
  }
  float correction = 1.0f;
  if (top != h.max) {
    float t[W];
    store(t, vexp(splat(h.max - top)));
    correction = t[0];
  }
  h.max = top;
  h.sum = h.sum * correction + reduce_add(sum);
  return correction;
}

// segment_out of N heads += probabilities x values, positions [t0, t1) of the run.
template <int N, bool RAW, class KV>
static TM_INLINE void run_values(Head* const* heads, const float* corrections, const float* v, const KV* const* pages,
                                 int t0, int t1, int v_stride) {
  for (int d = 0; d < v_stride; d += D_BLOCK * W) {
    const int blocks = v_stride - d < D_BLOCK * W ? (v_stride - d) / W : D_BLOCK;
    if (blocks == D_BLOCK) {
      vf acc[N][D_BLOCK];
      for (int i = 0; i < N; i++)
        for (int b = 0; b < D_BLOCK; b++)
          acc[i][b] = mul(load(heads[i]->segment_out + d + b * W), splat(corrections[i]));
      for (int t = t0; t < t1; t++) {
        vf vt[D_BLOCK];
        for (int b = 0; b < D_BLOCK; b++)
          vt[b] = RAW ? load_kv(pages[t / PAGE] + size_t(t % PAGE) * v_stride + d + b * W)
                      : load(v + size_t(t) * v_stride + d + b * W);
        for (int i = 0; i < N; i++) {
          vf p = splat(heads[i]->scores[t]);
          for (int b = 0; b < D_BLOCK; b++) acc[i][b] = fma(p, vt[b], acc[i][b]);
        }
      }
      for (int i = 0; i < N; i++)
        for (int b = 0; b < D_BLOCK; b++) store(heads[i]->segment_out + d + b * W, acc[i][b]);
    } else {
      for (int b = 0; b < blocks; b++)
        for (int i = 0; i < N; i++) {
          float* out = heads[i]->segment_out + d + b * W;
          vf acc = mul(load(out), splat(corrections[i]));
          for (int t = t0; t < t1; t++) {
            vf vt = RAW ? load_kv(pages[t / PAGE] + size_t(t % PAGE) * v_stride + d + b * W)
                        : load(v + size_t(t) * v_stride + d + b * W);
            acc = fma(splat(heads[i]->scores[t]), vt, acc);
          }
          store(out, acc);
        }
    }
  }
}

template <bool RAW, class KV>
static TM_INLINE void run_heads(const AttentionArgs& a, Head* const* heads, int n, int run_start, int n_pages,
                                const float* k, const float* v, const KV* const* k_pages, const KV* const* v_pages) {
  // All n heads belong to one token, so they see the same positions.
  int t0 = heads[0]->first > run_start ? heads[0]->first - run_start : 0;
  int t1 = heads[0]->last - run_start + 1 < RUN ? heads[0]->last - run_start + 1 : RUN;
  float corrections[Q_BLOCK];
#define TM_HEADS(N)                                                                                            \
  {                                                                                                            \
    run_scores<N, RAW>(heads, k, k_pages, n_pages, a.head_dim);                                                \
    for (int i = 0; i < N; i++) corrections[i] = run_softmax(*heads[i], run_start, n_pages * PAGE, a.softcap); \
    run_values<N, RAW>(heads, corrections, v, v_pages, t0, t1, a.v_stride);                                    \
  }
  switch (n) {
    case 1: TM_HEADS(1) break;
    case 2: TM_HEADS(2) break;
    case 3: TM_HEADS(3) break;
    default: TM_HEADS(4) break;
  }
#undef TM_HEADS
}

static TM_INLINE void see(Head& h, const AttentionArgs& a, int position) {
  h.last = position;
  h.first = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
}

static TM_INLINE void begin_segment(Head& h, int v_stride) {
  h.max = NEG_INF;
  h.sum = 0;
  std::memset(h.segment_out, 0, sizeof(float) * v_stride);
}

static TM_INLINE float exp1(float x) {
  float t[W];
  store(t, vexp(splat(x)));
  return t[0];
}

// (max, sum, out) of the total and of the next segment become one.
static TM_INLINE void merge(float& max, float& sum, float* out, float next_max, float next_sum, const float* next,
                            int n) {
  float top = max > next_max ? max : next_max, c0 = exp1(max - top), c1 = exp1(next_max - top);
  sum = sum * c0 + next_sum * c1;
  for (int d = 0; d < n; d += W) store(out + d, fma(load(next + d), splat(c1), mul(load(out + d), splat(c0))));
  max = top;
}

static TM_INLINE void end_segment(Head& h, int v_stride) {
  if (h.max == NEG_INF) return;
  if (h.total_max == NEG_INF) {
    h.total_max = h.max;
    h.total_sum = h.sum;
    std::memcpy(h.total_out, h.segment_out, sizeof(float) * v_stride);
  } else {
    merge(h.total_max, h.total_sum, h.total_out, h.max, h.sum, h.segment_out, v_stride);
  }
}

// Pointers to the pages of a run for one kv head; how many of them exist up to `last`.
template <class KV>
static TM_INLINE int run_pages(const AttentionArgs& a, int kv_head, int run_start, int last, const KV** k,
                               const KV** v) {
  int n = (last - run_start) / PAGE + 1;
  if (n > RUN_PAGES) n = RUN_PAGES;
  for (int i = 0; i < n; i++) {
    size_t page = size_t(a.page_table[run_start / PAGE + i]) * a.n_kv_heads + kv_head;
    k[i] = static_cast<const KV*>(a.k_pages) + page * a.head_dim * PAGE;
    v[i] = static_cast<const KV*>(a.v_pages) + page * PAGE * a.v_stride;
  }
  return n;
}

static void write_out(const AttentionArgs& a, float* out, const float* total, float sum) {
  float inverse = 1.0f / sum;
  for (int d = 0; d < a.head_dim; d++) out[d] = total[d] * inverse;
}

template <class KV>
static void attention(const AttentionArgs& a, int row0, int row1, int position0, int kv_head, float* scratch) {
  const int group = a.n_heads / a.n_kv_heads, tokens = row1 - row0;
  float* k_run = scratch;
  float* v_run = k_run + size_t(RUN) * a.head_dim;
  float* p = v_run + size_t(RUN) * a.v_stride;
  Head heads[ATTENTION_TOKENS * 16];
  // Groups of more than 16 heads are worked 16 at a time.
  for (int g0 = 0; g0 < group; g0 += 16) {
    const int g_n = group - g0 < 16 ? group - g0 : 16;
    float* at = p;
    int first = 1 << 30;
    for (int t = 0; t < tokens; t++)
      for (int g = 0; g < g_n; g++) {
        Head& h = heads[t * g_n + g];
        const float* q = a.q + (size_t(row0 + t) * a.n_heads + kv_head * group + g0 + g) * a.head_dim;
        h.q = at, at += a.head_dim;
        h.segment_out = at, at += a.v_stride;
        h.total_out = at, at += a.v_stride;
        h.scores = at, at += RUN;
        for (int d = 0; d < a.head_dim; d++) h.q[d] = q[d] * a.scale;
        h.total_max = NEG_INF;
        h.total_sum = 0;
        std::memset(h.total_out, 0, sizeof(float) * a.v_stride);
        see(h, a, position0 + t);
        if (h.first < first) first = h.first;
      }
    const int last = position0 + tokens - 1;
    for (int segment = first / SEGMENT * SEGMENT; segment <= last; segment += SEGMENT) {
      for (int i = 0; i < tokens * g_n; i++) begin_segment(heads[i], a.v_stride);
      for (int run = segment; run < segment + SEGMENT && run <= last; run += RUN) {
        if (run + RUN <= first) continue;
        const KV *k_pages[RUN_PAGES], *v_pages[RUN_PAGES];
        int n_pages = run_pages(a, kv_head, run, last, k_pages, v_pages);
        if (tokens > 1) {
          for (int page = 0; page < n_pages; page++) {
            for (int i = 0; i < a.head_dim * PAGE; i += W)
              store(k_run + size_t(page) * a.head_dim * PAGE + i, load_kv(k_pages[page] + i));
            for (int i = 0; i < a.v_stride * PAGE; i += W)
              store(v_run + size_t(page) * a.v_stride * PAGE + i, load_kv(v_pages[page] + i));
          }
        }
        for (int t = 0; t < tokens; t++) {
          Head* row = heads + t * g_n;
          if (row->last < run || row->first >= run + RUN) continue;
          for (int g = 0; g < g_n; g += Q_BLOCK) {
            Head* block[Q_BLOCK];
            int b = g_n - g < Q_BLOCK ? g_n - g : Q_BLOCK;
            for (int i = 0; i < b; i++) block[i] = row + g + i;
            if (tokens > 1)
              run_heads<false, KV>(a, block, b, run, n_pages, k_run, v_run, nullptr, nullptr);
            else
              run_heads<true>(a, block, b, run, n_pages, nullptr, nullptr, k_pages, v_pages);
          }
        }
      }
      for (int i = 0; i < tokens * g_n; i++) end_segment(heads[i], a.v_stride);
    }
    for (int t = 0; t < tokens; t++)
      for (int g = 0; g < g_n; g++) {
        Head& h = heads[t * g_n + g];
        write_out(a, a.out + (size_t(row0 + t) * a.n_heads + kv_head * group + g0 + g) * a.head_dim, h.total_out,
                  h.total_sum);
      }
  }
}

template <class KV>
static void attention_segment(const AttentionArgs& a, int row, int position, int kv_head, int segment, float* partial,
                              SegmentState* states, float* scratch) {
  const int group = a.n_heads / a.n_kv_heads;
  for (int g0 = 0; g0 < group; g0 += Q_BLOCK) {
    const int b = group - g0 < Q_BLOCK ? group - g0 : Q_BLOCK;
    Head heads[Q_BLOCK];
    Head* block[Q_BLOCK];
    float* at = scratch;
    for (int i = 0; i < b; i++) {
      Head& h = heads[i];
      block[i] = &h;
      const float* q = a.q + (size_t(row) * a.n_heads + kv_head * group + g0 + i) * a.head_dim;
      h.q = at, at += a.head_dim;
      h.scores = at, at += RUN;
      h.segment_out = partial + size_t(g0 + i) * a.v_stride;
      for (int d = 0; d < a.head_dim; d++) h.q[d] = q[d] * a.scale;
      see(h, a, position);
      begin_segment(h, a.v_stride);
    }
    int start = segment * SEGMENT, last = position;
    for (int run = start; run < start + SEGMENT && run <= last; run += RUN) {
      if (run + RUN <= heads[0].first) continue;
      const KV *k_pages[RUN_PAGES], *v_pages[RUN_PAGES];
      int n_pages = run_pages(a, kv_head, run, last, k_pages, v_pages);
      run_heads<true>(a, block, b, run, n_pages, nullptr, nullptr, k_pages, v_pages);
    }
    for (int i = 0; i < b; i++) states[g0 + i] = {heads[i].max, heads[i].sum};
  }
}

// Joins the segments of one token: partials[s] (group, v_stride), states[s] (group,). Works in the first partial.
static void attention_merge(const AttentionArgs& a, int row, int kv_head, const float* const* partials,
                            const SegmentState* const* states, int n) {
  const int group = a.n_heads / a.n_kv_heads;
  for (int g = 0; g < group; g++) {
    float* total = const_cast<float*>(partials[0]) + size_t(g) * a.v_stride;
    float max = states[0][g].max, sum = states[0][g].sum;
    for (int s = 1; s < n; s++) {
      float* part = const_cast<float*>(partials[s]) + size_t(g) * a.v_stride;
      SegmentState st = states[s][g];
      if (st.max == NEG_INF) continue;
      if (max == NEG_INF) {
        total = part, max = st.max, sum = st.sum;
      } else {
        merge(max, sum, total, st.max, st.sum, part, a.v_stride);
      }
    }
    write_out(a, a.out + (size_t(row) * a.n_heads + kv_head * group + g) * a.head_dim, total, sum);
  }
}

template <class KV>
static void kv_write(const float* k, const float* v, void* k_pages, void* v_pages, int slot, int n_kv_heads,
                     int head_dim, int v_stride) {
  const int page = slot / PAGE, offset = slot % PAGE;
  for (int h = 0; h < n_kv_heads; h++) {
    const size_t head = size_t(page) * n_kv_heads + h;
    KV* kp = static_cast<KV*>(k_pages) + head * head_dim * PAGE + offset;
    KV* vp = static_cast<KV*>(v_pages) + (head * PAGE + offset) * v_stride;
    vectors(head_dim, [&](size_t d, int n) {
      KV t[W];
      store_kv(t, load_n(k + h * head_dim + d, n));
      for (int i = 0; i < n; i++) kp[(d + i) * PAGE] = t[i];
      store_kv(t, load_n(v + h * head_dim + d, n));
      std::memcpy(vp + d, t, n * sizeof(KV));
    });
  }
}

}  // namespace mill::TM_NS
