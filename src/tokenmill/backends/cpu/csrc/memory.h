// Page-aligned zeroed memory, backed by huge pages where the system gives them. Untouched parts cost nothing.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace mill {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    if (!bytes_) return;
    p_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p_ == MAP_FAILED) {
      p_ = nullptr;
      throw std::bad_alloc();
    }
    madvise(p_, bytes_, MADV_HUGEPAGE);
  }
  Memory(Memory&& o) noexcept { *this = std::move(o); }
  Memory& operator=(Memory&& o) noexcept {
    std::swap(p_, o.p_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  ~Memory() {
    if (p_) munmap(p_, bytes_);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(p_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* p_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace mill
