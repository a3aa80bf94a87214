#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#define TM_PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define TM_PAUSE() asm volatile("yield")
#else
#define TM_PAUSE() (void)0
#endif

namespace mill {

namespace {

constexpr int SPINS = 2000;  // about 0.1 ms

void wait_change(std::atomic<int>& word, int old) {
  for (int i = 0; i < SPINS; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    TM_PAUSE();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

// Spins, then looks again every so often. It is not woken: on a busy core whoever is woken pushes aside the very thread
// whose work it waits for, phase after phase. Who waited in vain spins less the next time.
void Phase::wait(int items) const {
  thread_local int patience = SPINS;
  for (int i = 0; i < patience; i++) {
    TM_PAUSE();
    if (done_.load(std::memory_order_acquire) >= items) {
      patience = SPINS;
      return;
    }
  }
  patience = patience / 4 > 50 ? patience / 4 : 50;
  while (done_.load(std::memory_order_acquire) < items) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

Pool::Pool(int threads) : n_(threads < 1 ? 1 : threads) {
  for (int tid = 1; tid < n_; tid++) workers_.emplace_back([this, tid] { work(tid); });
}

Pool::~Pool() {
  stop_ = true;
  job_.fetch_add(2);
  job_.notify_all();
  for (auto& w : workers_) w.join();
}

void Pool::open() {
  if (n_ == 1) return;
  job_.fetch_add(1);
  job_.notify_all();
}

// A worker first counts itself in and then looks whether the job is open; here it is closed first and then looked who
// is in. Both in one total order, so one of the two sees the other.
void Pool::close() {
  if (n_ == 1) return;
  job_.fetch_add(1);
  for (int active; (active = active_.load()) > 0;) wait_change(active_, active);
}

void Pool::work(int tid) {
  for (int seen = 0;;) {
    const int job = job_.load();
    if (stop_) return;
    if (job == seen || job % 2 == 0) {
      wait_change(job_, job);
      continue;
    }
    active_.fetch_add(1);
    if (job_.load() == job) call_(context_, tid);
    seen = job;
    if (active_.fetch_sub(1) == 1) active_.notify_all();
  }
}

}  // namespace mill
