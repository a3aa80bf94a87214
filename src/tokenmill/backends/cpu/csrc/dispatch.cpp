// Which instruction sets were compiled, which of them this machine runs, and the choice at load.
#include <cstring>

#include "kernels.h"

namespace mill {

#define TM_DECLARE(isa) extern const KernelTable table_##isa;
TM_DECLARE(plain)
#ifdef TM_HAVE_AVX2
TM_DECLARE(avx2)
#endif
#ifdef TM_HAVE_AVX512
TM_DECLARE(avx512)
#endif
#ifdef TM_HAVE_NEON
TM_DECLARE(neon)
#endif

namespace {
// Best first.
int available(const KernelTable** out) {
  int n = 0;
#if defined(TM_HAVE_AVX2) || defined(TM_HAVE_AVX512)
  __builtin_cpu_init();
#endif
#ifdef TM_HAVE_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    out[n++] = &table_avx512;
#endif
#ifdef TM_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    out[n++] = &table_avx2;
#endif
#ifdef TM_HAVE_NEON
  out[n++] = &table_neon;  // dotprod and fp16 are the baseline this library is built for
#endif
  out[n++] = &table_plain;
  return n;
}
}  // namespace

const KernelTable* select_kernels(const char* isa) {
  const KernelTable* tables[4];
  int n = available(tables);
  if (!isa) return tables[0];
  for (int i = 0; i < n; i++)
    if (!std::strcmp(tables[i]->name, isa)) return tables[i];
  return nullptr;
}

int list_kernels(const char** names, int capacity) {
  const KernelTable* tables[4];
  int n = available(tables);
  for (int i = 0; i < n && i < capacity; i++) names[i] = tables[i]->name;
  return n;
}

}  // namespace mill
