// A program made ready on this CPU: packed weights, KV pages, value slots, and one call that runs a step.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "pack.h"
#include "pool.h"
#include "sampler.h"

namespace mill {

// As StepInputs in program/program.py.
struct StepArrays {
  const int32_t *token_ids, *positions, *slots, *q_start, *kv_len, *page_table, *logit_rows;
  int tokens, requests, logit_rows_n, table_width;
};

enum class OpKind { EMBED, RMS_NORM, LINEAR, ADD, ROPE, ATTENTION, ACT_MUL, SELECT_ROWS, QUANTISE, KV_WRITE };

struct OpNode {
  OpKind kind;
  std::vector<int> in, out;  // slots
  std::vector<int> weights;  // indices of packed weights; one vector for RMS_NORM
  std::vector<int> ints;     // see executor.py
  std::vector<double> floats;
  std::vector<float> inv_freq;  // ROPE
  bool quant_out = false;       // also leave the output quantised
  bool on_logit_rows = false;   // rows are L instead of T
  double seconds = 0;           // measured, when profiling
};

class Executor {
 public:
  Executor(const std::string& isa, int threads, int max_tokens, int max_requests, int max_logit_rows, int num_pages,
           int vocab, bool kv_f32);

  const char* isa() const { return kernels_->name; }
  int threads() const { return pool_.threads(); }

  // Load time, in order: weights and vectors, KV layers, slots, ops, ready().
  int add_weight(const std::string& format, int rows, int cols, const WeightSource& from, int bias);
  int add_vector(const float* data, int n);
  void add_kv_layer(int kv_heads, int head_dim, int window);
  int add_slot(int dim, bool on_logit_rows, int quantised);  // 0: no, 1: by 32 features, 2: by 16
  void add_op(OpNode op) { ops_.push_back(std::move(op)); }
  void ready(int logits_slot);

  // Step time. Nothing is allocated.
  void run(const StepArrays& step, const SamplingArrays* sampling);
  void copy_page(int from, int to);
  const float* slot(int i) const { return slots_[i].data; }
  const float* logits() const { return slots_[logits_slot_].data; }

  std::vector<OpNode>& ops() { return ops_; }
  bool profile = false;
  size_t weight_bytes() const { return packed_.bytes(); }
  size_t kv_bytes() const;
  size_t workspace_bytes() const { return workspace_.bytes(); }
  int max_tokens() const { return max_tokens_; }
  int max_requests() const { return max_requests_; }
  int max_logit_rows() const { return max_logit_rows_; }
  int num_pages() const { return num_pages_; }

 private:
  struct Slot {
    int dim;
    bool on_logit_rows;
    float* data = nullptr;
    QuantRows quant{};
  };
  struct KVLayer {
    int kv_heads, head_dim, v_stride, window;
    Memory k, v;
  };
  struct Unit {  // a piece of attention work for every kv head: rows of one request, or one segment of one row
    int request, row0, row1, position, segment;  // segment -1: all of them
    int partial;                                 // index of its partial result
  };

  void run_row(const OpNode& op, const StepArrays& step, int row, int rows);
  void run_linear(const OpNode& op, int rows, int tid, int& phase);
  void run_act_mul(const OpNode& op, int rows, int& phase);
  void run_attention(OpNode& op, const StepArrays& step, int tid, int& phase);
  void plan_attention(const StepArrays& step);
  AttentionArgs attention_args(const OpNode& op, const StepArrays& step, int request) const;
  int row_chunk(int rows) const;
  template <class F>
  void parallel(int items, int chunk, int& phase, F f);
  float* workspace(size_t floats) { return workspace_.take<float>(floats); }

  const KernelTable* kernels_;
  Pool pool_;
  int max_tokens_, max_requests_, max_logit_rows_, num_pages_, vocab_, logits_slot_ = -1;
  bool kv_f32_;
  size_t kv_size_;  // bytes of a cached number
  std::vector<PackedWeight> weights_;
  Arena packed_, workspace_;
  std::vector<const float*> vectors_;
  std::vector<KVLayer> kv_;
  std::vector<Slot> slots_;
  std::vector<OpNode> ops_;
  std::vector<size_t> chain_end_;  // of each op, the end of the run of row-wise ops it stands in
  std::vector<Sampler> samplers_;
  std::vector<float*> scratch_;      // of kernels, one a thread
  std::vector<float*> rope_tables_;  // one a ROPE op with tables of its own: (max_tokens, 2, half)
  std::vector<std::pair<const OpNode*, int>> rope_ops_;
  std::unique_ptr<Phase[]> phases_;  // of a step, in order
  int num_phases_ = 0;
  std::vector<Unit> units_;
  int num_segment_units_ = 0, partial_stride_ = 0, states_stride_ = 0;
  float* partials_ = nullptr;
  SegmentState* states_ = nullptr;
};

constexpr int MAX_PARTIALS = 256;  // segments of single rows that a step may split over threads

}  // namespace mill
