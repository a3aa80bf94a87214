// What this machine can do at most, all threads together: the loops of ceilings.inl.h, timed.
#pragma once
#include "kernels.h"

namespace mill {

// Bytes a second read from a buffer of `bytes`, which should be far past the caches.
double measure_read(const KernelTable& kernels, int threads, size_t bytes, double seconds);

// Operations a second of one recipe.
double measure_arithmetic(const Recipe& recipe, int threads, double seconds);

}  // namespace mill
