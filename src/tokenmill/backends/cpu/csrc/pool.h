// A thread pool for one step at a time. run() puts its threads into the same function, which shares its work out
// through phases. Nobody waits for a thread to arrive, only for work to be done: on cores that are busy with something
// else a thread may be put aside for milliseconds, and then holds up no more than what it has claimed. Between jobs a
// thread spins for some microseconds, then sleeps: an idle engine costs nothing.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace mill {

// Items claimed in chunks by whichever thread is free. Every thread of a job goes through the same phases in order and
// leaves each when all its items are done; one that comes late finds nothing left and goes on.
class Phase {
 public:
  void reset() {
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
  }

  template <class F>
  void run(int items, int chunk, F f) {  // f(begin, end)
    int mine = 0;
    for (int i; next_.load(std::memory_order_relaxed) < items &&
                (i = next_.fetch_add(chunk, std::memory_order_relaxed)) < items;) {
      const int end = i + chunk < items ? i + chunk : items;
      f(i, end);
      mine += end - i;
    }
    if (mine) done_.fetch_add(mine, std::memory_order_release);
    if (done_.load(std::memory_order_acquire) < items) wait(items);
  }

 private:
  void wait(int items) const;

  std::atomic<int> next_{0}, done_{0};
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return n_; }

  // f(tid) on the caller, thread 0, and on those of the others that come before it is through; returns when all that
  // came have left.
  template <class F>
  void run(F&& f) {
    call_ = [](void* ctx, int tid) { (*static_cast<std::remove_reference_t<F>*>(ctx))(tid); };
    context_ = &f;
    open();
    f(0);
    close();
  }

 private:
  void open();
  void close();
  void work(int tid);

  int n_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> job_{0};     // odd while a job is open
  alignas(64) std::atomic<int> active_{0};  // workers that are in it, or are about to see that it is closed
  std::vector<std::thread> workers_;
};

}  // namespace mill
