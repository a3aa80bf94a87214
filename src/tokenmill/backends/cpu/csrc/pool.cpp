#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define TM_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define TM_PAUSE() asm volatile("yield")
#else
#define TM_PAUSE() (void)0
#endif

namespace mill {

Pool::Pool(int threads) : n_(threads < 1 ? 1 : threads) {
  for (int tid = 1; tid < n_; tid++) workers_.emplace_back([this, tid] { work(tid); });
}

Pool::~Pool() {
  stop_ = true;
  start();
  for (auto& w : workers_) w.join();
}

void Pool::wait_change(std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < 2000; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    TM_PAUSE();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

void Pool::start() {
  if (n_ == 1) return;
  job_.fetch_add(1, std::memory_order_release);
  job_.notify_all();
}

void Pool::barrier() {
  if (n_ == 1) return;
  uint32_t generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    generation_.notify_all();
  } else {
    wait_change(generation_, generation);
  }
}

void Pool::work(int tid) {
  uint32_t seen = 0;
  for (;;) {
    wait_change(job_, seen);
    seen++;
    if (stop_) return;
    call_(context_, tid);
    barrier();
  }
}

}  // namespace mill
