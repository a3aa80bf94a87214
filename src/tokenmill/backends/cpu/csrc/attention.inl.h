// Attention over the paged cache, keys and values read back from the cache's own format (KV: f16 as uint16_t, or f32).
//
// Positions are worked in runs of 64 and segments of 512 at fixed places, so the order of every sum depends on a
// query's own position only: not on the chunk it came in, nor on who else is in the step.
//
//   position  0 ......... 63 | 64 ....... 127 | ... 511 || 512 ...      p
//             one run          one run                 ||  next segment ^ the query sees (p - window, p]
//
// Within a segment: online softmax, a run at a time (Milakov & Gimelshein 2018), with a reference that lags behind the
// maximum. Segments are then merged in order.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

constexpr float NEG_INF = -__builtin_inff();
constexpr int RUN_PAGES = RUN / PAGE;
constexpr int BLOCK = ATTENTION_BLOCK;  // rows, each a head of a token, that share every load of a key or a value
#if TM_AVX2
constexpr int VECTORS = 2;  // of a row's sums held in registers: BLOCK x VECTORS and a few more must fit
#else
constexpr int VECTORS = 4;
#endif
// A run's scores are taken relative to a reference that is raised only when one of them stands this far above it:
// e^16 is far inside what a float sums exactly enough, and most runs need no rescaling of what came before.
constexpr float SLACK = 16.0f;
constexpr int LINE = 32;  // f16 numbers of a cache line

static TM_INLINE vf load_kv(const uint16_t* p) { return load_f16(p); }
static TM_INLINE vf load_kv(const float* p) { return load(p); }
static TM_INLINE void store_kv(uint16_t* p, vf v) { store_f16(p, v); }
static TM_INLINE void store_kv(float* p, vf v) { store(p, v); }

struct Row {                   // one head of one token while its tile is worked
  float reference;             // of the exponentials of the segment so far
  float total_max, total_sum;  // of the segments before
  int first, last;             // positions it sees, inclusive
};

// Rows of one kv head, tokens ascending. Arrays by row:
struct Rows {
  Row* row;
  float* q;       // [block][head_dim][BLOCK], scaled
  float* scores;  // [BLOCK][RUN] of the block being worked
  float* sums;    // [row][PANEL]: sums of exponentials, lane by lane
  float* out;     // [row][v_stride] of the segment
  float* total;   // [row][v_stride] of the segments before
};

// A run of positions of one kv head: its pages as they stand (f16 or f32), or converted to [page][head_dim][PAGE] and
// [position][v_stride] in f32.
// While one stands in memory, what is next is brought near line by line: pages are too short for the hardware to
// foresee.
template <class KV, bool AHEAD>
struct Run {
  int start, pages;
  const KV *k[RUN_PAGES], *v[RUN_PAGES], *next_k[RUN_PAGES], *next_v[RUN_PAGES];
};

// scores of N rows against VB vectors of keys
template <int N, int VB, class KV, bool AHEAD>
static TM_INLINE void score_vectors(const float* q, float* scores, const Run<KV, AHEAD>& run, int first, int head_dim) {
  vf acc[N][VB];
  for (int i = 0; i < N; i++)
    for (int b = 0; b < VB; b++) acc[i][b] = splat(0.0f);
  const KV *k[VB], *next[VB];
  for (int b = 0; b < VB; b++) {
    const int page = (first + b) * W / PAGE;
    k[b] = run.k[page] + (first + b) * W % PAGE, next[b] = run.next_k[page];
  }
  for (int d = 0; d < head_dim; d++) {
    vf kd[VB];
    for (int b = 0; b < VB; b++) kd[b] = load_kv(k[b] + d * PAGE);
    if constexpr (AHEAD)
      for (int b = 0; b < VB; b += PAGE / W) __builtin_prefetch(next[b] + d * PAGE);
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
      const vf qd = splat(q[d * BLOCK + i]);
      for (int b = 0; b < VB; b++) acc[i][b] = fma(kd[b], qd, acc[i][b]);
    }
  }
  for (int i = 0; i < N; i++)
    for (int b = 0; b < VB; b++) store(scores + i * RUN + (first + b) * W, acc[i][b]);
}

// Exponentials of one row's scores over a run, in place; its sums and, where the reference rises, its output follow.
static TM_INLINE void run_softmax(Row& row, float* s, float* sums, float* out, int run_start, int n, int v_stride,
                                  float softcap) {
  if (softcap > 0)
    for (int i = 0; i < n; i++) s[i] = softcap * std::tanh(s[i] / softcap);
  for (int i = 0; i < row.first - run_start; i++) s[i] = NEG_INF;
  for (int i = row.last + 1 - run_start; i < RUN; i++) s[i] = NEG_INF;
  vf m = load(s);
  for (int i = W; i < RUN; i += W) m = vmax(m, load(s + i));
  if (any_above(m, row.reference + SLACK)) {
    const float top = reduce_max(m);
    if (row.reference != NEG_INF) {
      const vf factor = vexp(splat(row.reference - top));
      for (int i = 0; i < PANEL; i += W) store(sums + i, mul(load(sums + i), factor));
      for (int i = 0; i < v_stride; i += W) store(out + i, mul(load(out + i), factor));
    }
    row.reference = top;
  }
  const vf neg = splat(-row.reference);
  vf sum[PANEL / W];
  for (int i = 0; i < PANEL / W; i++) sum[i] = load(sums + i * W);
  for (int i = 0; i < RUN / W; i++) {
    const vf e = vexp(add(load(s + i * W), neg));
    store(s + i * W, e);
    sum[i % (PANEL / W)] = add(sum[i % (PANEL / W)], e);
  }
  for (int i = 0; i < PANEL / W; i++) store(sums + i * W, sum[i]);
}

// out of N rows, DB vectors of it, += probabilities x values of positions [t0, t1) of the run
template <int N, int DB, class KV, bool AHEAD>
static TM_INLINE void value_vectors(const float* p, float* out, const Run<KV, AHEAD>& run, int t0, int t1, int v_stride,
                                    int d) {
  vf acc[N][DB];
  for (int i = 0; i < N; i++)
    for (int b = 0; b < DB; b++) acc[i][b] = load(out + size_t(i) * v_stride + d + b * W);
  for (int page = t0 / PAGE; page * PAGE < t1; page++) {
    const int begin = page * PAGE < t0 ? t0 - page * PAGE : 0, end = t1 - page * PAGE < PAGE ? t1 - page * PAGE : PAGE;
    const KV* v = run.v[page] + size_t(begin) * v_stride + d;
    const KV* next = run.next_v[page] + size_t(begin) * v_stride + d;
    const float* pt = p + page * PAGE;
    for (int t = begin; t < end; t++, v += v_stride, next += v_stride) {
      vf vt[DB];
      for (int b = 0; b < DB; b++) vt[b] = load_kv(v + b * W);
      if constexpr (AHEAD)
        for (int b = 0; b < DB; b += LINE / W) __builtin_prefetch(next + b * W);
#pragma GCC unroll 8
      for (int i = 0; i < N; i++) {
        const vf pi = splat(pt[i * RUN + t]);
        for (int b = 0; b < DB; b++) acc[i][b] = fma(pi, vt[b], acc[i][b]);
      }
    }
  }
  for (int i = 0; i < N; i++)
    for (int b = 0; b < DB; b++) store(out + size_t(i) * v_stride + d + b * W, acc[i][b]);
}

template <int N, class KV, bool AHEAD>
static TM_INLINE void run_values(const float* p, float* out, const Run<KV, AHEAD>& run, int t0, int t1, int v_stride) {
  int d = 0;
  for (; d + VECTORS * W <= v_stride; d += VECTORS * W) value_vectors<N, VECTORS>(p, out, run, t0, t1, v_stride, d);
  for (; d < v_stride; d += W) value_vectors<N, 1>(p, out, run, t0, t1, v_stride, d);
}

// Rows [r, r + N), all in one block, over one run.
template <int N, class KV, bool AHEAD>
static TM_INLINE void run_block(const AttentionArgs& a, const Rows& rows, int r, const Run<KV, AHEAD>& run) {
  const float* q = rows.q + size_t(r / BLOCK) * BLOCK * a.head_dim + r % BLOCK;
  const int n = run.pages * PAGE;
  int v = 0;
  for (; v + VECTORS <= n / W; v += VECTORS) score_vectors<N, VECTORS>(q, rows.scores, run, v, a.head_dim);
  for (; v < n / W; v++) score_vectors<N, 1>(q, rows.scores, run, v, a.head_dim);
  float* out = rows.out + size_t(r) * a.v_stride;
  int t0[N], t1[N], all0 = 0, all1 = RUN;  // positions that each row sees, and that all of them see
  for (int i = 0; i < N; i++) {
    Row& row = rows.row[r + i];
    run_softmax(row, rows.scores + i * RUN, rows.sums + size_t(r + i) * PANEL, out + size_t(i) * a.v_stride, run.start,
                n, a.v_stride, a.softcap);
    t0[i] = row.first > run.start ? row.first - run.start : 0;
    t1[i] = row.last - run.start < RUN ? row.last + 1 - run.start : RUN;
    all0 = t0[i] > all0 ? t0[i] : all0, all1 = t1[i] < all1 ? t1[i] : all1;
  }
  // A row meets no value that it does not see: one that is not finite would spoil it even with probability 0.
  auto alone = [&](int i, int from, int to) {
    if (from < to) run_values<1>(rows.scores + i * RUN, out + size_t(i) * a.v_stride, run, from, to, a.v_stride);
  };
  for (int i = 0; i < N; i++) alone(i, t0[i], all0 < t1[i] ? all0 : t1[i]);
  if (all0 < all1) run_values<N>(rows.scores, out, run, all0, all1, a.v_stride);
  const int after = all0 > all1 ? all0 : all1;
  for (int i = 0; i < N; i++) alone(i, after > t0[i] ? after : t0[i], t1[i]);
}

// Rows [r0, r1), all of which see something of the run, block by block.
template <class KV, bool AHEAD>
static void run_rows(const AttentionArgs& a, const Rows& rows, int r0, int r1, const Run<KV, AHEAD>& run) {
  for (int r = r0, end; r < r1; r = end) {
    end = (r / BLOCK + 1) * BLOCK < r1 ? (r / BLOCK + 1) * BLOCK : r1;
    switch (end - r) {
      case 1: run_block<1>(a, rows, r, run); break;
      case 2: run_block<2>(a, rows, r, run); break;
      case 3: run_block<3>(a, rows, r, run); break;
      case 4: run_block<4>(a, rows, r, run); break;
      case 5: run_block<5>(a, rows, r, run); break;
      default: run_block<6>(a, rows, r, run); break;
    }
  }
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

static TM_INLINE float sum_lanes(const float* sums) {
  vf v = load(sums);
  for (int i = W; i < PANEL; i += W) v = add(v, load(sums + i));
  return reduce_add(v);
}

// The pages of the run at `start` for one kv head, up to position `last`; and of the next, if there is one.
template <class KV>
static TM_INLINE Run<KV, true> find_run(const AttentionArgs& a, int kv_head, int start, int last) {
  Run<KV, true> run;
  run.start = start;
  run.pages = (last - start) / PAGE + 1 < RUN_PAGES ? (last - start) / PAGE + 1 : RUN_PAGES;
  auto head = [&](int page) { return size_t(a.page_table[page]) * a.n_kv_heads + kv_head; };
  const KV *k = static_cast<const KV*>(a.k_pages), *v = static_cast<const KV*>(a.v_pages);
  for (int i = 0; i < run.pages; i++) {
    const int page = start / PAGE + i, next = page + RUN_PAGES;
    const size_t at = head(page), to = next <= last / PAGE ? head(next) : at;
    run.k[i] = k + at * a.head_dim * PAGE, run.next_k[i] = k + to * a.head_dim * PAGE;
    run.v[i] = v + at * PAGE * a.v_stride, run.next_v[i] = v + to * PAGE * a.v_stride;
  }
  return run;
}

template <class KV>
static TM_INLINE Run<float, false> convert_run(const AttentionArgs& a, const Run<KV, true>& run, float* k, float* v) {
  Run<float, false> out;
  out.start = run.start, out.pages = run.pages;
  for (int page = 0; page < run.pages; page++) {
    const int k_size = a.head_dim * PAGE, v_size = a.v_stride * PAGE;
    for (int i = 0; i < k_size; i += W) store(k + page * k_size + i, load_kv(run.k[page] + i));
    for (int i = 0; i < v_size; i += W) store(v + page * v_size + i, load_kv(run.v[page] + i));
    out.k[page] = out.next_k[page] = k + page * k_size, out.v[page] = out.next_v[page] = v + page * v_size;
  }
  return out;
}

static void write_out(const AttentionArgs& a, float* out, const float* total, float sum) {
  float inverse = 1.0f / sum;
  for (int d = 0; d < a.head_dim; d++) out[d] = total[d] * inverse;
}

// Heads [g0, g0 + heads) of kv_head's group for tokens [row0, row0 + tokens) of the step at positions position0..:
// their arrays laid out in scratch, their queries scaled. `out` of the segment is given or, if null, in scratch too.
static TM_INLINE Rows begin_rows(const AttentionArgs& a, Row* row, int row0, int tokens, int position0, int kv_head,
                                 int g0, int heads, float* scratch, float* out) {
  const int n = tokens * heads, padded = (n + BLOCK - 1) / BLOCK * BLOCK, group = a.n_heads / a.n_kv_heads;
  Rows rows;
  rows.row = row;
  rows.scores = scratch, scratch += BLOCK * RUN;
  rows.sums = scratch, scratch += size_t(n) * PANEL;
  rows.q = scratch, scratch += size_t(padded) * a.head_dim;
  rows.total = scratch, scratch += size_t(n) * a.v_stride;
  rows.out = out ? out : scratch;
  for (int r = 0; r < n; r++) {
    const int position = position0 + r / heads;
    const float* q = a.q + (size_t(row0 + r / heads) * a.n_heads + kv_head * group + g0 + r % heads) * a.head_dim;
    float* to = rows.q + size_t(r / BLOCK) * BLOCK * a.head_dim + r % BLOCK;
    for (int d = 0; d < a.head_dim; d++) to[d * BLOCK] = q[d] * a.scale;
    row[r] = {NEG_INF, NEG_INF, 0, a.window > 0 && position >= a.window ? position - a.window + 1 : 0, position};
  }
  return rows;
}

static TM_INLINE void begin_segment(const AttentionArgs& a, const Rows& rows, int n) {
  for (int r = 0; r < n; r++) rows.row[r].reference = NEG_INF;
  std::memset(rows.sums, 0, sizeof(float) * n * PANEL);
  std::memset(rows.out, 0, sizeof(float) * n * a.v_stride);
}

static TM_INLINE void end_segment(const AttentionArgs& a, const Rows& rows, int n) {
  for (int r = 0; r < n; r++) {
    Row& row = rows.row[r];
    if (row.reference == NEG_INF) continue;
    const float sum = sum_lanes(rows.sums + size_t(r) * PANEL);
    float *out = rows.out + size_t(r) * a.v_stride, *total = rows.total + size_t(r) * a.v_stride;
    if (row.total_max == NEG_INF) {
      row.total_max = row.reference, row.total_sum = sum;
      std::memcpy(total, out, sizeof(float) * a.v_stride);
    } else {
      merge(row.total_max, row.total_sum, total, row.reference, sum, out, a.v_stride);
    }
  }
}

template <class KV>
static void attention(const AttentionArgs& a, int row0, int row1, int position0, int kv_head, float* scratch) {
  const int group = a.n_heads / a.n_kv_heads, tokens = row1 - row0, last = position0 + tokens - 1;
  float *k = scratch, *v = k + size_t(RUN) * a.head_dim;
  Row row[ATTENTION_TOKENS * ATTENTION_HEADS];
  for (int g0 = 0; g0 < group; g0 += ATTENTION_HEADS) {
    const int heads = group - g0 < ATTENTION_HEADS ? group - g0 : ATTENTION_HEADS, n = tokens * heads;
    const Rows rows =
        begin_rows(a, row, row0, tokens, position0, kv_head, g0, heads, v + size_t(RUN) * a.v_stride, nullptr);
    for (int segment = row[0].first / SEGMENT * SEGMENT; segment <= last; segment += SEGMENT) {
      begin_segment(a, rows, n);
      for (int start = segment; start < segment + SEGMENT && start <= last; start += RUN) {
        int r0 = 0, r1 = n;  // rows that see something of the run
        while (r0 < n && row[r0].last < start) r0++;
        while (r1 > r0 && row[r1 - 1].first >= start + RUN) r1--;
        if (r0 == r1) continue;
        const Run<KV, true> run = find_run<KV>(a, kv_head, start, last);
        if (tokens > 1)
          run_rows(a, rows, r0, r1, convert_run(a, run, k, v));
        else
          run_rows(a, rows, r0, r1, run);
      }
      end_segment(a, rows, n);
    }
    for (int r = 0; r < n; r++)
      write_out(a, a.out + (size_t(row0 + r / heads) * a.n_heads + kv_head * group + g0 + r % heads) * a.head_dim,
                rows.total + size_t(r) * a.v_stride, row[r].total_sum);
  }
}

template <class KV>
static void attention_segment(const AttentionArgs& a, int row0, int position, int kv_head, int segment, float* partial,
                              SegmentState* states, float* scratch) {
  const int group = a.n_heads / a.n_kv_heads, begin = segment * SEGMENT;
  Row row[ATTENTION_HEADS];
  for (int g0 = 0; g0 < group; g0 += ATTENTION_HEADS) {
    const int heads = group - g0 < ATTENTION_HEADS ? group - g0 : ATTENTION_HEADS;
    const Rows rows =
        begin_rows(a, row, row0, 1, position, kv_head, g0, heads, scratch, partial + size_t(g0) * a.v_stride);
    begin_segment(a, rows, heads);
    for (int start = begin; start < begin + SEGMENT && start <= position; start += RUN) {
      if (start + RUN <= row[0].first) continue;
      run_rows(a, rows, 0, heads, find_run<KV>(a, kv_head, start, position));
    }
    for (int r = 0; r < heads; r++) states[g0 + r] = {row[r].reference, sum_lanes(rows.sums + size_t(r) * PANEL)};
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
