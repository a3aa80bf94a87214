#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace mill {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

bool by_rows(OpKind kind) { return kind != OpKind::LINEAR && kind != OpKind::ACT_MUL && kind != OpKind::ATTENTION; }

constexpr size_t PACK_BYTES = 32 << 20;  // of a weight's file, in memory at a time while it is packed

constexpr int FLOAT_PANELS = 4;  // panels of a float weight that the kernels like to be given at once

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

Executor::Executor(const std::string& isa, int threads, int max_tokens, int max_requests, int max_logit_rows,
                   int num_pages, int vocab, bool kv_f32)
    : kernels_(select_kernels(isa.empty() ? nullptr : isa.c_str())),
      pool_(threads),
      max_tokens_(max_tokens),
      max_requests_(max_requests),
      max_logit_rows_(max_logit_rows),
      num_pages_(num_pages),
      vocab_(vocab),
      kv_f32_(kv_f32),
      kv_size_(kv_f32 ? 4 : 2) {
  if (!kernels_) throw std::invalid_argument("this machine cannot run the instruction set " + isa);
  for (int i = 0; i < pool_.threads(); i++) samplers_.emplace_back(*kernels_, vocab);
  units_.reserve(size_t(max_requests) + max_tokens + MAX_PARTIALS);
}

int Executor::add_weight(const std::string& format, int rows, int cols, const WeightSource& from, int bias) {
  Layout layout;
  if (!layout_of(format, &layout)) throw std::invalid_argument("no packed layout for " + format);
  size_t stride = row_bytes(format, cols);
  if (rows < 1 || !stride || from.bytes != stride * size_t(rows))
    throw std::invalid_argument("a " + format + " weight of " + std::to_string(rows) + " x " + std::to_string(cols) +
                                " does not take " + std::to_string(from.bytes) + " bytes");
  PackedWeight w = plan_weight(layout, rows, cols);
  uint8_t* packed = packed_.take<uint8_t>(w.panel_bytes * w.panels);
  w.data = packed;
  w.bias = bias < 0 ? nullptr : vectors_[bias];
  const int slab = int(std::max<size_t>(1, PACK_BYTES / (PANEL * stride)));
  for (int first = 0; first < w.panels; first += slab) {
    const int end = std::min(w.panels, first + slab);
    std::atomic<int> next{first};
    pool_.run([&](int) {
      for (int p; (p = next.fetch_add(1)) < end;) pack_panel(format, w, from, p, packed + p * w.panel_bytes);
    });
    release_pages(from, size_t(end) * PANEL * stride);
  }
  weights_.push_back(w);
  return int(weights_.size()) - 1;
}

int Executor::add_vector(const float* data, int n) {
  float* copy = packed_.take<float>(n);
  std::memcpy(copy, data, size_t(n) * sizeof(float));
  vectors_.push_back(copy);
  return int(vectors_.size()) - 1;
}

void Executor::add_kv_layer(int kv_heads, int head_dim, int window) {
  int v_stride = int(round_up(head_dim, PAGE));
  size_t rows = size_t(num_pages_) * kv_heads * PAGE;
  kv_.push_back(
      {kv_heads, head_dim, v_stride, window, Memory(rows * head_dim * kv_size_), Memory(rows * v_stride * kv_size_)});
}

size_t Executor::kv_bytes() const {
  size_t n = 0;
  for (const KVLayer& l : kv_) n += l.k.bytes() + l.v.bytes();
  return n;
}

int Executor::add_slot(int dim, bool on_logit_rows, int quantised) {
  size_t rows = on_logit_rows ? max_logit_rows_ : max_tokens_;
  Slot s{dim, on_logit_rows, workspace(rows * dim), {}};
  if (quantised) {
    size_t groups = rows * (dim / (quantised == 2 ? 16 : GROUP));
    s.quant = {reinterpret_cast<int8_t*>(workspace(rows * dim / 4 + 1)), workspace(groups),
               reinterpret_cast<int32_t*>(workspace(groups)), workspace(groups), quantised == 2};
  }
  slots_.push_back(s);
  return int(slots_.size()) - 1;
}

void Executor::ready(int logits_slot) {
  logits_slot_ = logits_slot;
  size_t scratch = 0;
  for (const PackedWeight& w : weights_) scratch = std::max(scratch, linear_scratch(w.cols) / sizeof(float));
  for (OpNode& op : ops_) {
    if (op.kind == OpKind::ATTENTION) {
      const KVLayer& l = kv_[op.ints[0]];
      int group = op.ints[1] / l.kv_heads;
      scratch = std::max(scratch, attention_scratch(group, l.head_dim, l.v_stride));
      partial_stride_ = std::max(partial_stride_, op.ints[1] * l.v_stride);
      states_stride_ = std::max(states_stride_, op.ints[1]);
    }
    if (op.kind == OpKind::ROPE) {
      int found = -1;
      for (auto& [other, table] : rope_ops_)
        if (other->inv_freq == op.inv_freq && other->floats == op.floats) found = table;
      if (found < 0) {
        found = int(rope_tables_.size());
        rope_tables_.push_back(workspace(size_t(max_tokens_) * 2 * op.inv_freq.size()));
        rope_ops_.emplace_back(&op, found);
      }
      op.ints.push_back(found);
    }
  }
  chain_end_.resize(ops_.size());
  for (size_t i = ops_.size(); i-- > 0;) {
    const bool joined = i + 1 < ops_.size() && by_rows(ops_[i].kind) && by_rows(ops_[i + 1].kind) &&
                        ops_[i].on_logit_rows == ops_[i + 1].on_logit_rows;
    chain_end_[i] = joined ? chain_end_[i + 1] : i + 1;
  }
  for (int i = 0; i < pool_.threads(); i++) scratch_.push_back(workspace(round_up(scratch + 16, 16)));
  partials_ = workspace(size_t(MAX_PARTIALS) * partial_stride_ + 1);
  states_ = reinterpret_cast<SegmentState*>(workspace(size_t(MAX_PARTIALS) * states_stride_ * 2 + 1));
  num_phases_ = int(ops_.size()) * 2 + int(rope_tables_.size()) + 2;
  phases_ = std::make_unique<Phase[]>(num_phases_);
}

// Rows given out at once: if there are enough, so many that two threads seldom write into the cache lines of one tile
// (QuantRows) or one page of keys.
int Executor::row_chunk(int rows) const {
  for (int chunk : {PAGE, kernels_->tile})
    if (rows >= chunk * pool_.threads()) return chunk;
  return 1;
}

// Who computes an item never changes its bits.
template <class F>
void Executor::parallel(int items, int chunk, int& phase, F f) {
  phases_[phase++].run(items, chunk, [&](int begin, int end) {
    for (int i = begin; i < end; i++) f(i);
  });
}

void Executor::run(const StepArrays& step, const SamplingArrays* sampling) {
  for (int i = 0; i < num_phases_; i++) phases_[i].reset();
  plan_attention(step);
  pool_.run([&](int tid) {
    int phase = 0;
    for (auto& [op, table] : rope_ops_) {
      const int half = int(op->inv_freq.size());
      const float scale = float(op->floats[0]);
      float* out = rope_tables_[table];
      parallel(step.tokens, 16, phase, [&](int t) {
        float *cos = out + size_t(t) * 2 * half, *sin = cos + half;
        for (int i = 0; i < half; i++) {
          double angle = float(step.positions[t]) * op->inv_freq[i];  // the product in f32, as every framework has it
          cos[i] = float(std::cos(angle)) * scale, sin[i] = float(std::sin(angle)) * scale;
        }
      });
    }
    for (size_t i = 0; i < ops_.size();) {
      double started = profile && tid == 0 ? now() : 0;
      OpNode& op = ops_[i];
      const size_t end = by_rows(op.kind) && !profile ? chain_end_[i] : i + 1;
      const int rows = op.on_logit_rows ? step.logit_rows_n : step.tokens;
      if (by_rows(op.kind))
        parallel(rows, row_chunk(rows), phase, [&](int row) {
          for (size_t k = i; k < end; k++) run_row(ops_[k], step, row, rows);
        });
      else if (op.kind == OpKind::LINEAR)
        run_linear(op, rows, tid, phase);
      else if (op.kind == OpKind::ACT_MUL)
        run_act_mul(op, rows, phase);
      else
        run_attention(op, step, tid, phase);
      if (profile && tid == 0) op.seconds += now() - started;
      i = end;
    }
    if (sampling)
      parallel(step.logit_rows_n, 1, phase,
               [&](int row) { samplers_[tid].sample(logits() + size_t(row) * vocab_, row, *sampling); });
  });
}

// One row through one op. Rows do not meet in these ops, so a chain of them needs no barrier inside.
void Executor::run_row(const OpNode& op, const StepArrays& step, int row, int rows) {
  Slot& out = slots_[op.out[0]];
  auto at = [row](const Slot& s) { return s.data + size_t(row) * s.dim; };
  switch (op.kind) {
    case OpKind::EMBED:
      kernels_->unpack_row(weights_[op.weights[0]], step.token_ids[row], float(op.floats[0]), at(out));
      break;
    case OpKind::RMS_NORM:
      kernels_->rms_norm(at(slots_[op.in[0]]), vectors_[op.weights[0]], at(out), out.dim, op.ints[0],
                         float(op.floats[0]));
      break;
    case OpKind::ADD: kernels_->add(at(slots_[op.in[0]]), at(slots_[op.in[1]]), at(out), out.dim); break;
    case OpKind::ROPE: {
      const int head_dim = op.ints[0], half = int(op.inv_freq.size());
      const float* cos = rope_tables_[op.ints.back()] + size_t(row) * 2 * half;
      for (int i = 0; i < 2; i++) {
        Slot& to = slots_[op.out[i]];
        kernels_->rope(at(slots_[op.in[i]]), at(to), cos, cos + half, to.dim / head_dim, head_dim, half);
      }
      break;
    }
    case OpKind::KV_WRITE: {
      KVLayer& l = kv_[op.ints[0]];
      kernels_->attention[kv_f32_].write(at(slots_[op.in[0]]), at(slots_[op.in[1]]), l.k.as<void>(), l.v.as<void>(),
                                         step.slots[row], l.kv_heads, l.head_dim, l.v_stride);
      return;
    }
    case OpKind::SELECT_ROWS:
      std::memcpy(at(out), slots_[op.in[0]].data + size_t(step.logit_rows[row]) * out.dim, out.dim * sizeof(float));
      break;
    default: break;  // QUANTISE: only what follows
  }
  if (op.quant_out) kernels_->quantise(at(out), 0, out.dim, out.dim, row, rows, out.quant);
}

void Executor::run_linear(const OpNode& op, int rows, int tid, int& phase) {
  const Slot& in = slots_[op.in[0]];
  int panels = 0;
  for (int w : op.weights) panels += weights_[w].panels;
  int chunk = std::clamp(panels / (pool_.threads() * 8), 1, 64);
  if (!weights_[op.weights[0]].layout.quantised()) chunk = int(round_up(chunk, FLOAT_PANELS));
  const float* residual = op.in.size() > 1 ? slots_[op.in[1]].data : nullptr;
  phases_[phase++].run(rows > 0 ? panels : 0, chunk, [&](int first, int last) {
    // over the panels of all weights, one after the other
    for (size_t i = 0; i < op.weights.size() && first < last; i++) {
      const PackedWeight& w = weights_[op.weights[i]];
      if (first < w.panels)
        kernels_->linear(
            {&w, in.data, in.quant, residual, slots_[op.out[i]].data, rows, reinterpret_cast<uint8_t*>(scratch_[tid])},
            first, std::min(last, w.panels));
      first = std::max(0, first - w.panels), last -= w.panels;
    }
  });
}

void Executor::run_act_mul(const OpNode& op, int rows, int& phase) {
  Slot& out = slots_[op.out[0]];
  const int dim = out.dim, width = 256, blocks = (dim + width - 1) / width;
  parallel(rows * blocks, row_chunk(rows) > 1 ? row_chunk(rows) * blocks : 1, phase, [&](int i) {
    const int t = i / blocks, start = i % blocks * width, n = std::min(width, dim - start);
    const size_t at = size_t(t) * dim + start;
    kernels_->act_mul(slots_[op.in[0]].data + at, slots_[op.in[1]].data + at, out.data + at, n, op.ints[0]);
    if (op.quant_out) kernels_->quantise(out.data + at, start, n, dim, t, rows, out.quant);
  });
}

void Executor::plan_attention(const StepArrays& step) {
  units_.clear();
  num_segment_units_ = 0;
  // Splitting one row's positions over threads pays only where there are fewer rows than threads could share.
  const bool split = pool_.threads() > 1 && step.requests <= 2 * pool_.threads();
  int partials = 0;
  if (split)
    for (int r = 0; r < step.requests; r++) {
      int row = step.q_start[r], segments = step.positions[row] / SEGMENT + 1;
      if (step.q_start[r + 1] - row != 1 || segments < 2 || partials + segments > MAX_PARTIALS) continue;
      for (int s = 0; s < segments; s++) units_.push_back({r, row, row + 1, step.positions[row], s, partials + s});
      partials += segments;
    }
  num_segment_units_ = int(units_.size());
  for (int r = 0; r < step.requests; r++) {
    int row = step.q_start[r], end = step.q_start[r + 1], segments = 0;
    for (int u = 0; u < num_segment_units_; u++) segments += units_[u].request == r;
    if (segments) continue;
    for (; row < end; row += ATTENTION_TOKENS)
      units_.push_back({r, row, std::min(end, row + ATTENTION_TOKENS), step.positions[row], -1, -1});
  }
}

AttentionArgs Executor::attention_args(const OpNode& op, const StepArrays& step, int request) const {
  const KVLayer& l = kv_[op.ints[0]];
  return {slots_[op.in[0]].data,
          slots_[op.out[0]].data,
          l.k.as<void>(),
          l.v.as<void>(),
          step.page_table + size_t(request) * step.table_width,
          op.ints[1],
          l.kv_heads,
          l.head_dim,
          l.v_stride,
          l.window,
          float(op.floats[0]),
          float(op.floats[1])};
}

void Executor::run_attention(OpNode& op, const StepArrays& step, int tid, int& phase) {
  KVLayer& l = kv_[op.ints[0]];
  const KernelTable::Attention& attention = kernels_->attention[kv_f32_];
  parallel(int(units_.size()) * l.kv_heads, 1, phase, [&](int i) {
    const Unit& u = units_[i / l.kv_heads];
    const int head = i % l.kv_heads, group = op.ints[1] / l.kv_heads;
    AttentionArgs a = attention_args(op, step, u.request);
    if (u.segment < 0)
      attention.rows(a, u.row0, u.row1, u.position, head, scratch_[tid]);
    else
      attention.segment(a, u.row0, u.position, head, u.segment,
                        partials_ + size_t(u.partial) * partial_stride_ + size_t(head) * group * l.v_stride,
                        states_ + size_t(u.partial) * states_stride_ + size_t(head) * group, scratch_[tid]);
  });
  if (!num_segment_units_) {
    phase++;
    return;
  }
  parallel(num_segment_units_ * l.kv_heads, 1, phase, [&](int i) {
    const Unit& u = units_[i / l.kv_heads];
    if (u.segment != 0) return;
    const int head = i % l.kv_heads, group = op.ints[1] / l.kv_heads, n = u.position / SEGMENT + 1;
    const float* parts[MAX_PARTIALS];
    const SegmentState* states[MAX_PARTIALS];
    for (int s = 0; s < n; s++) {
      parts[s] = partials_ + size_t(u.partial + s) * partial_stride_ + size_t(head) * group * l.v_stride;
      states[s] = states_ + size_t(u.partial + s) * states_stride_ + size_t(head) * group;
    }
    kernels_->attention_merge(attention_args(op, step, u.request), u.row0, head, parts, states, n);
  });
}

void Executor::copy_page(int from, int to) {
  for (KVLayer& l : kv_) {
    size_t k = size_t(l.kv_heads) * l.head_dim * PAGE * kv_size_, v = size_t(l.kv_heads) * l.v_stride * PAGE * kv_size_;
    std::memcpy(l.k.as<char>() + to * k, l.k.as<char>() + from * k, k);
    std::memcpy(l.v.as<char>() + to * v, l.v.as<char>() + from * v, v);
  }
}

}  // namespace mill
