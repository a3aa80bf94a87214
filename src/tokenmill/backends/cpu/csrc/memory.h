// Zeroed memory straight from the system, backed by huge pages where it gives them. Untouched parts cost nothing.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace mill {

constexpr size_t HUGE_PAGE = 2 << 20;

// One mapping: at least page-aligned, and from 2 MiB on aligned so that all of it can be huge pages.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) : bytes_((bytes + 4095) / 4096 * 4096) {
    if (!bytes_) return;
    mapped_ = bytes_ + (bytes_ < HUGE_PAGE ? 0 : HUGE_PAGE);
    mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) {
      mapping_ = nullptr;
      throw std::bad_alloc();
    }
    p_ = mapping_;
    if (mapped_ > bytes_)
      p_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(mapping_) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    madvise(p_, bytes_, MADV_HUGEPAGE);
  }
  Memory(Memory&& o) noexcept { *this = std::move(o); }
  Memory& operator=(Memory&& o) noexcept {
    std::swap(mapping_, o.mapping_);
    std::swap(mapped_, o.mapped_);
    std::swap(p_, o.p_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  ~Memory() {
    if (mapping_) munmap(mapping_, mapped_);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(p_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void *mapping_ = nullptr, *p_ = nullptr;
  size_t mapped_ = 0, bytes_ = 0;
};

// Many pieces that live as long as the arena, 64-byte aligned, side by side: a matrix smaller than a huge page would
// get none of its own, and those of a small model all are.
class Arena {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > left_) {
      blocks_.emplace_back(std::max(bytes, BLOCK));
      at_ = blocks_.back().as<uint8_t>(), left_ = blocks_.back().bytes();
    }
    T* piece = reinterpret_cast<T*>(at_);
    at_ += bytes, left_ -= bytes, bytes_ += bytes;
    return piece;
  }
  size_t bytes() const { return bytes_; }  // of the pieces

 private:
  static constexpr size_t BLOCK = 64 << 20;  // what a last block leaves untouched is not memory in use
  std::vector<Memory> blocks_;
  uint8_t* at_ = nullptr;
  size_t left_ = 0, bytes_ = 0;
};

}  // namespace mill
