// A thread pool for one step at a time: run() puts every thread into the same function, barrier() lines them up inside
// it. Waiting spins for some microseconds, then sleeps: an idle engine costs nothing, and a busy neighbour on the same
// core is not fought with spinning.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace mill {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return n_; }

  // f(tid) on every thread, the caller being thread 0; returns when all have.
  template <class F>
  void run(F&& f) {
    call_ = [](void* ctx, int tid) { (*static_cast<std::remove_reference_t<F>*>(ctx))(tid); };
    context_ = &f;
    start();
    f(0);
    barrier();
  }

  // Only inside run(), by every thread.
  void barrier();

 private:
  void start();
  void work(int tid);
  static void wait_change(std::atomic<uint32_t>& word, uint32_t old);

  int n_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::vector<std::thread> workers_;
};

}  // namespace mill
