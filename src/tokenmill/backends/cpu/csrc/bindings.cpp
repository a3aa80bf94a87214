// The extension module: Executor for backends/cpu/executor.py, and single kernels for the tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "ceilings.h"
#include "executor.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mill {
namespace {

template <class T, int N = 1>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Numpy = nb::ndarray<nb::numpy, float, nb::ndim<2>>;

void need(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

// A numpy array that is a field of `owner`, which keeps it alive for the call.
template <class T>
struct Field {
  T* data;
  size_t size, width;  // elements; columns of a matrix
};

template <class T, int N = 1>
Field<T> field(nb::handle owner, const char* name) {
  nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu> a;
  if (!nb::try_cast(owner.attr(name), a))
    throw std::invalid_argument(std::string(name) + " is not a contiguous array of the documented type");
  return {a.data(), a.size(), N == 1 ? a.size() : size_t(a.shape(N - 1))};
}

// The arrays' lengths agree and every index stays inside what it indexes: a wrong step is an exception, not a crash.
StepArrays step_arrays(const Executor& e, int vocab, nb::handle step) {
  auto token_ids = field<const int32_t>(step, "token_ids"), positions = field<const int32_t>(step, "positions");
  auto slots = field<const int32_t>(step, "slot_mapping"), q_start = field<const int32_t>(step, "q_start");
  auto kv_len = field<const int32_t>(step, "kv_len"), logit_rows = field<const int32_t>(step, "logit_rows");
  auto page_table = field<const int32_t, 2>(step, "page_table");
  const int tokens = int(token_ids.size), requests = int(kv_len.size), rows = int(logit_rows.size);
  need(tokens <= e.max_tokens(), "more tokens than the step's budget");
  need(requests <= e.max_requests(), "more requests than the executor was made for");
  need(rows <= e.max_logit_rows(), "more logit rows than the executor was made for");
  need(positions.size == token_ids.size && slots.size == token_ids.size, "positions and slots are one a token");
  const int width = int(page_table.width);
  need(int(q_start.size) == requests + 1 && page_table.size >= size_t(requests) * width, "arrays of requests disagree");
  for (int t = 0; t < tokens; t++) {
    need(token_ids.data[t] >= 0 && token_ids.data[t] < vocab, "a token id is outside the vocabulary");
    need(slots.data[t] >= 0 && slots.data[t] < e.num_pages() * PAGE, "a slot is outside the cache");
    need(positions.data[t] >= 0, "a position is negative");
  }
  need(q_start.data[0] == 0 && q_start.data[requests] == tokens, "q_start does not cover the step");
  for (int r = 0; r < requests; r++) {
    const int first = q_start.data[r], end = q_start.data[r + 1], len = kv_len.data[r];
    need(first < end, "a request without tokens");
    for (int t = first; t < end; t++)
      need(positions.data[t] == positions.data[first] + t - first, "a request's positions are not consecutive");
    need(positions.data[end - 1] + 1 == len, "kv_len is not the last position + 1");
    const int pages = (len + PAGE - 1) / PAGE;
    need(pages <= width, "kv_len is longer than the page table");
    for (int p = 0; p < pages; p++) {
      int page = page_table.data[size_t(r) * width + p];
      need(page >= 0 && page < e.num_pages(), "a page id is outside the cache");
    }
  }
  for (int i = 0; i < rows; i++)
    need(logit_rows.data[i] >= 0 && logit_rows.data[i] < tokens, "a logit row is outside the step");
  return {token_ids.data,  positions.data, slots.data, q_start.data, kv_len.data, page_table.data,
          logit_rows.data, tokens,         requests,   rows,         width};
}

SamplingArrays sampling_arrays(size_t rows, int vocab, nb::handle in, nb::handle out) {
  using CF = const float;
  using CI = const int32_t;
  auto per_row = [&](auto f, const char* name) {
    if (f.size < rows) throw std::invalid_argument(std::string(name) + " is shorter than the logit rows");
    return f.data;
  };
  auto f32 = [&](const char* name) { return per_row(field<CF>(in, name), name); };
  auto i32 = [&](const char* name) { return per_row(field<CI>(in, name), name); };
  SamplingArrays s{};
  s.temperature = f32("temperature"), s.top_p = f32("top_p"), s.min_p = f32("min_p"), s.typical_p = f32("typical_p");
  s.repetition = f32("repetition_penalty"), s.presence = f32("presence_penalty");
  s.frequency = f32("frequency_penalty"), s.top_k = i32("top_k");
  auto seed = field<const uint64_t>(in, "seed");
  auto counter = field<const uint32_t>(in, "counter");
  need(seed.size >= rows && counter.size >= rows, "seed and counter are shorter than the logit rows");
  s.seed = seed.data, s.counter = counter.data;
  s.num_logprobs = i32("num_logprobs"), s.target = i32("target"), s.history_prompt_len = i32("history_prompt_len");
  auto lists = [&](const char* start_name, const char* ids_name, CI*& start, CI*& ids) {
    auto starts = field<CI>(in, start_name), all = field<CI>(in, ids_name);
    start = starts.data, ids = all.data;
    need(starts.size >= rows + 1, "a list of starts is shorter than the logit rows + 1");
    if (!rows) return;
    for (size_t i = 0; i < rows; i++) need(start[i] >= 0 && start[i] <= start[i + 1], "starts are not ascending");
    need(size_t(start[rows]) <= all.size, "a list of ids ends before its starts");
    for (int i = start[0]; i < start[rows]; i++) need(ids[i] >= 0 && ids[i] < vocab, "an id is outside the vocabulary");
  };
  lists("bias_start", "bias_ids", s.bias_start, s.bias_ids);
  lists("allowed_start", "allowed_ids", s.allowed_start, s.allowed_ids);
  lists("history_start", "history_ids", s.history_start, s.history_ids);
  auto values = field<CF>(in, "bias_values");
  s.bias_values = values.data;
  need(!rows || values.size >= size_t(s.bias_start[rows]), "bias_values is shorter than bias_ids");
  for (size_t i = 0; i < rows; i++) {
    need(s.target[i] < vocab, "a target is outside the vocabulary");
    need(s.history_prompt_len[i] >= 0 && s.history_prompt_len[i] <= s.history_start[i + 1] - s.history_start[i],
         "history_prompt_len is out of range");
  }
  auto ids = field<int32_t>(out, "token_ids"), ranks = field<int32_t>(out, "ranks");
  auto logprobs = field<float>(out, "logprobs");
  auto top_ids = field<int32_t, 2>(out, "top_ids");
  auto top_logprobs = field<float, 2>(out, "top_logprobs");
  need(ids.size >= rows && ranks.size >= rows && logprobs.size >= rows, "the outputs are shorter than the logit rows");
  need(top_ids.width == top_logprobs.width && top_ids.size == top_logprobs.size && top_ids.size >= rows * top_ids.width,
       "top_ids and top_logprobs are (rows, alternatives)");
  s.token_ids = ids.data, s.ranks = ranks.data, s.logprobs = logprobs.data;
  s.top_ids = top_ids.data, s.top_logprobs = top_logprobs.data, s.max_logprobs = int(top_ids.width);
  return s;
}

struct NativeExecutor {
  Executor e;
  int vocab;
  NativeExecutor(const std::string& isa, int threads, int max_tokens, int max_requests, int max_logit_rows,
                 int num_pages, int vocab, bool kv_f32)
      : e(isa, threads, max_tokens, max_requests, max_logit_rows, num_pages, vocab, kv_f32), vocab(vocab) {}
};

Numpy copy_rows(const float* data, size_t rows, size_t dim) {
  float* copy = new float[rows * dim + 1];
  std::memcpy(copy, data, rows * dim * sizeof(float));
  nb::capsule owner(copy, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return Numpy(copy, {rows, dim}, owner);
}

}  // namespace
}  // namespace mill

NB_MODULE(_native, m) {
  using namespace mill;
  nb::set_leak_warnings(false);  // an interpreter that exits during a step still holds its executor
  m.def("instruction_sets", [] {
    const char* names[8];
    int n = list_kernels(names, 8);
    std::vector<std::string> out(names, names + n);
    return out;
  });

  // Of an instruction set ("" for the best), all threads together: (bytes read, float and integer operations a second).
  m.def(
      "measure_ceilings",
      [](const std::string& isa, int threads, size_t bytes, double seconds) {
        const KernelTable* kernels = select_kernels(isa.empty() ? nullptr : isa.c_str());
        need(kernels, "this machine cannot run that instruction set");
        nb::gil_scoped_release release;
        const auto& c = kernels->ceilings;
        return std::tuple{measure_read(*kernels, threads, bytes, seconds), measure_arithmetic(c.fma, threads, seconds),
                          measure_arithmetic(c.dot, threads, seconds), std::string(kernels->name),
                          std::string(c.dot.name)};
      },
      "isa"_a, "threads"_a, "bytes"_a, "seconds"_a);

  nb::class_<NativeExecutor>(m, "Executor")
      .def(nb::init<const std::string&, int, int, int, int, int, int, bool>(), "isa"_a, "threads"_a, "max_tokens"_a,
           "max_requests"_a, "max_logit_rows"_a, "num_pages"_a, "vocab"_a, "kv_f32"_a)
      .def_prop_ro("isa", [](NativeExecutor& x) { return std::string(x.e.isa()); })
      .def_prop_ro("threads", [](NativeExecutor& x) { return x.e.threads(); })
      .def_prop_ro("weight_bytes", [](NativeExecutor& x) { return x.e.weight_bytes(); })
      .def_prop_ro("kv_bytes", [](NativeExecutor& x) { return x.e.kv_bytes(); })
      .def_prop_ro("workspace_bytes", [](NativeExecutor& x) { return x.e.workspace_bytes(); })
      .def("set_profile", [](NativeExecutor& x, bool on) { x.e.profile = on; })
      .def(
          "add_weight",
          [](NativeExecutor& x, const std::string& format, int rows, int cols, Array<uint8_t> data, int bias,
             std::optional<Array<int32_t>> order, bool mapped) {
            need(!order || order->size() == size_t(rows), "an order of rows names each row");
            for (int i = 0; order && i < rows; i++)
              need(order->data()[i] >= 0 && order->data()[i] < rows, "an order of rows names one that is not there");
            nb::gil_scoped_release release;
            return x.e.add_weight(format, rows, cols,
                                  {data.data(), data.size(), order ? order->data() : nullptr, mapped}, bias);
          },
          "format"_a, "rows"_a, "cols"_a, "data"_a, "bias"_a, "order"_a = nb::none(), "mapped"_a = false)
      .def("add_vector", [](NativeExecutor& x, Array<float> v) { return x.e.add_vector(v.data(), int(v.size())); })
      .def("add_kv_layer",
           [](NativeExecutor& x, int heads, int head_dim, int window) { x.e.add_kv_layer(heads, head_dim, window); })
      .def("add_slot", [](NativeExecutor& x, int dim, bool l, int q) { return x.e.add_slot(dim, l, q); })
      .def("add_op",
           [](NativeExecutor& x, int kind, std::vector<int> in, std::vector<int> out, std::vector<int> weights,
              std::vector<int> ints, std::vector<double> floats, std::vector<float> inv_freq, bool quant_out,
              bool on_logit_rows) {
             x.e.add_op({OpKind(kind), std::move(in), std::move(out), std::move(weights), std::move(ints),
                         std::move(floats), std::move(inv_freq), quant_out, on_logit_rows});
           })
      .def("ready", [](NativeExecutor& x, int logits) { x.e.ready(logits); })
      .def("copy_page",
           [](NativeExecutor& x, int from, int to) {
             need(from >= 0 && to >= 0 && from < x.e.num_pages() && to < x.e.num_pages(), "no such page");
             x.e.copy_page(from, to);
           })
      .def("slot",
           [](NativeExecutor& x, int slot, size_t rows, size_t dim) { return copy_rows(x.e.slot(slot), rows, dim); })
      .def("logits", [](NativeExecutor& x, size_t rows) { return copy_rows(x.e.logits(), rows, x.vocab); })
      .def("op_seconds",
           [](NativeExecutor& x) {
             std::vector<double> s;
             for (auto& op : x.e.ops()) s.push_back(op.seconds), op.seconds = 0;
             return s;
           })
      .def("forward",
           [](NativeExecutor& x, nb::handle step) {
             StepArrays s = step_arrays(x.e, x.vocab, step);
             nb::gil_scoped_release release;
             x.e.run(s, nullptr);
           })
      .def("execute", [](NativeExecutor& x, nb::handle step, nb::handle sampling, nb::handle out) {
        StepArrays s = step_arrays(x.e, x.vocab, step);
        SamplingArrays how = sampling_arrays(s.logit_rows_n, x.vocab, sampling, out);
        nb::gil_scoped_release release;
        x.e.run(s, &how);
      });

  // The sampler alone on logits (L, V), for the tests.
  m.def("sample", [](const std::string& isa, Array<float, 2> logits, nb::handle sampling, nb::handle out) {
    const KernelTable* kernels = select_kernels(isa.empty() ? nullptr : isa.c_str());
    need(kernels, "this machine cannot run that instruction set");
    SamplingArrays how = sampling_arrays(logits.shape(0), int(logits.shape(1)), sampling, out);
    Sampler sampler(*kernels, int(logits.shape(1)));
    for (size_t row = 0; row < logits.shape(0); row++)
      sampler.sample(logits.data() + row * logits.shape(1), int(row), how);
  });
}
