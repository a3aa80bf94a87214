#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace mill {
namespace {

constexpr float GREEDY_BELOW = 1e-5f;
constexpr float NEG_INF = -std::numeric_limits<float>::infinity();

double uniform(uint64_t seed, uint32_t counter) {  // Philox4x32-10
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32), c0 = counter, c1 = 0, c2 = 0, c3 = 0;
  for (int i = 0; i < 10; i++) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0, c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1, c3 = uint32_t(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return double(c0) * 0x1p-32;
}

int first_equal(const float* x, float value) {
  const float* p = x;
  while (*p != value) p++;
  return int(p - x);
}

}  // namespace

Sampler::Sampler(const KernelTable& kernels, int vocab)
    : kernels_(kernels), vocab_(vocab), x_(vocab), w_(vocab), surprise_(vocab), best_(vocab), counts_(vocab, 0) {
  touched_.reserve(vocab);
}

void Sampler::sample(const float* logits, int row, const SamplingArrays& s) {
  float max = kernels_.max_finite(logits, vocab_);
  if (!std::isfinite(max)) {
    s.token_ids[row] = -1;
    return;
  }
  int token = s.target[row];
  if (token < 0) {
    bool plain = s.temperature[row] < GREEDY_BELOW && s.bias_start[row] == s.bias_start[row + 1] &&
                 s.allowed_start[row] == s.allowed_start[row + 1] && s.history_start[row] == s.history_start[row + 1];
    token = plain ? first_equal(logits, max) : choose(logits, row, s);
  }
  s.token_ids[row] = token;
  if (token >= 0 && s.num_logprobs[row] >= 0) report(logits, max, token, row, s);
}

// Keeps a heap of the n best seen, worst on top; almost every element fails the first comparison.
int Sampler::best_of(const float* x, int n) {
  n = std::min(n, vocab_);
  auto better = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  int32_t* heap = best_.data();
  for (int i = 0; i < n; i++) heap[i] = i;
  std::make_heap(heap, heap + n, better);
  if (n)
    for (int i = n; i < vocab_; i++)
      if (x[i] > x[heap[0]]) {
        std::pop_heap(heap, heap + n, better);
        heap[n - 1] = i;
        std::push_heap(heap, heap + n, better);
      }
  std::sort(heap, heap + n, better);
  return n;
}

void Sampler::report(const float* logits, float max, int token, int row, const SamplingArrays& s) {
  double log_sum = std::log(kernels_.sum_exp(logits, vocab_, max));
  auto logprob = [&](int id) { return float(double(logits[id]) - double(max) - log_sum); };
  s.logprobs[row] = logprob(token);
  int higher = 0;
  for (int i = 0; i < vocab_; i++) higher += logits[i] > logits[token];
  s.ranks[row] = 1 + higher;
  int n = best_of(logits, std::min(s.num_logprobs[row], s.max_logprobs));
  for (int i = 0; i < n; i++) {
    s.top_ids[size_t(row) * s.max_logprobs + i] = best_[i];
    s.top_logprobs[size_t(row) * s.max_logprobs + i] = logprob(best_[i]);
  }
}

const float* Sampler::adjust(const float* logits, int row, const SamplingArrays& s) {
  const int b0 = s.bias_start[row], b1 = s.bias_start[row + 1], a0 = s.allowed_start[row],
            a1 = s.allowed_start[row + 1];
  const int h0 = s.history_start[row], h1 = s.history_start[row + 1];
  if (b0 == b1 && a0 == a1 && h0 == h1) return logits;
  float* x = x_.data();
  std::memcpy(x, logits, size_t(vocab_) * sizeof(float));
  for (int i = b0; i < b1; i++) x[s.bias_ids[i]] += s.bias_values[i];
  if (a1 > a0) {
    for (int i = a0; i < a1; i++) counts_[s.allowed_ids[i]] = 1;
    for (int i = 0; i < vocab_; i++)
      if (!counts_[i]) x[i] = NEG_INF;
    for (int i = a0; i < a1; i++) counts_[s.allowed_ids[i]] = 0;
  }
  if (h1 > h0) {
    touched_.clear();
    auto count = [&](int i) {
      if (!counts_[s.history_ids[i]]++) touched_.push_back(s.history_ids[i]);
    };
    const float r = s.repetition[row];
    if (r != 1.0f) {
      for (int i = h0; i < h1; i++) count(i);
      for (int32_t id : touched_) x[id] = x[id] > 0 ? x[id] / r : x[id] * r;
      for (int32_t id : touched_) counts_[id] = 0;
      touched_.clear();
    }
    for (int i = h0 + s.history_prompt_len[row]; i < h1; i++) count(i);
    const double frequency = s.frequency[row], presence = s.presence[row];
    for (int32_t id : touched_) x[id] = float(double(x[id]) - (frequency * counts_[id] + presence));
    for (int32_t id : touched_) counts_[id] = 0;
  }
  return x;
}

int Sampler::choose(const float* logits, int row, const SamplingArrays& s) {
  const float* x = adjust(logits, row, s);
  const float max = kernels_.max(x, vocab_);
  if (!std::isfinite(max)) return -1;
  const float temperature = s.temperature[row];
  if (temperature < GREEDY_BELOW) return first_equal(x, max);

  double* w = w_.data();
  kernels_.weights(x, vocab_, max, temperature, w);
  const double u = uniform(s.seed[row], s.counter[row]);
  const int top_k = s.top_k[row];
  const double top_p = s.top_p[row], min_p = s.min_p[row], typical_p = s.typical_p[row];
  const bool by_k = top_k > 0 && top_k < vocab_, by_p = top_p < 1, by_typical = typical_p < 1;

  if (!by_k && !by_p && !by_typical) {  // survivors are told from w alone: no order needed
    if (min_p > 0)
      for (int i = 0; i < vocab_; i++)
        if (!(w[i] >= min_p) && w[i] < 1) w[i] = 0;
    double total = 0, seen = 0;
    for (int i = 0; i < vocab_; i++) total += w[i];
    int last = -1;
    for (int i = 0; i < vocab_; i++) {
      if (w[i] <= 0) continue;
      seen += w[i], last = i;
      if (seen > u * total) return i;
    }
    return last;
  }

  int n;  // best_[0, n) are the survivors, best first
  auto positive = [&](int m) {
    while (m > 1 && w[best_[m - 1]] <= 0) m--;
    return m;
  };
  if (by_k) {
    n = positive(best_of(x, top_k));
  } else if (by_p) {
    double total = 0;
    for (int i = 0; i < vocab_; i++) total += w[i];
    for (int take = 64;; take *= 8) {  // as many of the best as top_p needs, and a few more
      n = positive(best_of(x, take));
      double sum = 0;
      for (int i = 0; i < n; i++) sum += w[best_[i]];
      if (take >= vocab_ || n < take || sum >= top_p * total) break;
    }
    double before = 0;
    int kept = 0;
    while (kept < n && (kept == 0 || before < top_p * total)) before += w[best_[kept++]];
    n = kept;
  } else {
    n = positive(best_of(x, vocab_));
  }
  if (by_k && by_p) {
    double total = 0, before = 0;
    for (int i = 0; i < n; i++) total += w[best_[i]];
    int kept = 0;
    while (kept < n && (kept == 0 || before < top_p * total)) before += w[best_[kept++]];
    n = kept;
  }
  if (min_p > 0)
    while (n > 1 && !(w[best_[n - 1]] >= min_p)) n--;
  int32_t* ids = best_.data();
  std::sort(ids, ids + n);
  if (by_typical) {
    double total = 0, entropy = 0;
    for (int i = 0; i < n; i++) total += w[ids[i]];
    for (int i = 0; i < n; i++) {
      double p = w[ids[i]] / total;
      surprise_[ids[i]] = -std::log(p);
      entropy += p * surprise_[ids[i]];
    }
    std::sort(ids, ids + n, [&](int32_t a, int32_t b) {
      double off_a = std::abs(surprise_[a] - entropy), off_b = std::abs(surprise_[b] - entropy);
      return off_a < off_b || (off_a == off_b && a < b);
    });
    double before = 0;
    int kept = 0;
    while (kept < n && (kept == 0 || before < typical_p)) before += w[ids[kept++]] / total;
    n = kept;
    std::sort(ids, ids + n);
  }
  double total = 0, seen = 0;
  for (int i = 0; i < n; i++) total += w[ids[i]];
  for (int i = 0; i < n; i++) {
    seen += w[ids[i]];
    if (seen > u * total) return ids[i];
  }
  return ids[n - 1];
}

}  // namespace mill
