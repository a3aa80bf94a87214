#include "ceilings.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>

#include "memory.h"
#include "pool.h"

namespace mill {
namespace {

constexpr size_t PIECE = 1 << 20;  // bytes a thread takes at a time, so that a disturbed one does not hold the others

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Units a second: the best of the passes that fit into `seconds`, three at least. pass() returns its units.
template <class F>
double best_rate(double seconds, F pass) {
  const double end = now() + seconds;
  double best = 0;
  for (int i = 0; i < 3 || now() < end; i++) {
    const double started = now(), units = pass();
    best = std::max(best, units / (now() - started));
  }
  return best;
}

// Keeps a result that nobody reads.
void keep(double x) { asm volatile("" : : "m"(x)); }

}  // namespace

double measure_read(const KernelTable& kernels, int threads, size_t bytes, double seconds) {
  const size_t pieces = std::max<size_t>(1, bytes / PIECE);
  Memory memory(pieces * PIECE);
  Pool pool(threads);
  auto each_piece = [&](auto f) {
    std::atomic<size_t> next{0};
    pool.run([&](int) {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) f(memory.as<uint8_t>() + i * PIECE);
    });
  };
  each_piece([](uint8_t* p) { std::memset(p, 1, PIECE); });  // pages of its own: untouched ones are all the zero page
  return best_rate(seconds, [&] {
    each_piece([&](const uint8_t* p) { keep(double(kernels.ceilings.read(p, PIECE))); });
    return double(pieces * PIECE);
  });
}

double measure_arithmetic(const Recipe& recipe, int threads, double seconds) {
  alignas(64) float seed[32];
  std::fill(seed, seed + 32, 0.5f);
  int64_t rounds = 1024;
  for (double took = 0; took < 2e-3 && rounds < int64_t(1) << 40; rounds *= 2) {  // a pass of some milliseconds
    const double started = now();
    keep(recipe.run(rounds, seed));
    took = now() - started;
  }
  Pool pool(threads);
  return best_rate(seconds, [&] {
    pool.run([&](int) { keep(recipe.run(rounds, seed)); });
    return recipe.ops * double(rounds) * threads;
  });
}

}  // namespace mill
