// The sampler of backends/reference_sampler.py, row by row: that file is the specification, this one only faster.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace mill {

// As SamplingInputs and SamplingOutputs in backends/interface.py.
struct SamplingArrays {
  const float *temperature, *top_p, *min_p, *typical_p, *repetition, *presence, *frequency;
  const int32_t* top_k;
  const uint64_t* seed;
  const uint32_t* counter;
  const int32_t *num_logprobs, *target;
  const int32_t *bias_start, *bias_ids;
  const float* bias_values;
  const int32_t *allowed_start, *allowed_ids;
  const int32_t *history_start, *history_ids, *history_prompt_len;
  int32_t* token_ids;
  float* logprobs;
  int32_t *ranks, *top_ids;
  float* top_logprobs;
  int max_logprobs;  // columns of top_ids
};

// What one thread works in; made once, for a vocabulary of `vocab`.
class Sampler {
 public:
  Sampler(const KernelTable& kernels, int vocab);
  void sample(const float* logits, int row, const SamplingArrays& s);

 private:
  int choose(const float* logits, int row, const SamplingArrays& s);
  const float* adjust(const float* logits, int row, const SamplingArrays& s);
  int best_of(const float* x, int n);  // fills best_ with the n best ids of x, best first; how many there are
  void report(const float* logits, float max, int token, int row, const SamplingArrays& s);

  const KernelTable& kernels_;
  int vocab_;
  std::vector<float> x_;
  std::vector<double> w_, surprise_;
  std::vector<int32_t> best_, counts_, touched_;
};

}  // namespace mill
