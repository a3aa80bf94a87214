// Loops that do nothing but what the kernels live on, at the machine's best: reading memory, fused multiply-adds,
// integer dot products. What they reach is the limit that the benchmark holds every figure against (ceilings.cpp runs
// and times them).
//
// An instruction set's integer recipe is the one its linear kernels use. A new one is another branch of dot_loop()
// with its name and its operations a round.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

// Reads n bytes at p, both multiples of 1024, and returns something that depends on all of them. Four streams side by
// side: each is a page of its own to the prefetchers.
static uint64_t read_loop(const uint8_t* p, size_t n) {
  constexpr int STREAMS = 4, LINE = 64, STEPS = LINE / (W * 4);
  const size_t stride = n / STREAMS;
  vi seen[STREAMS];
  for (vi& s : seen) s = splat(0);
  for (size_t i = 0; i < stride; i += LINE) {
#pragma GCC unroll 4
    for (int s = 0; s < STREAMS; s++) {
      const uint8_t* at = p + s * stride + i;
      __builtin_prefetch(at + 1024);
#pragma GCC unroll 4
      for (int k = 0; k < STEPS; k++) seen[s] = vmax(bits(load((const float*)at + k * W)), seen[s]);
    }
  }
  uint64_t all = 0;
  for (vi s : seen) {
    int32_t lanes[W];
    std::memcpy(lanes, &s, sizeof lanes);
    for (int lane : lanes) all += uint32_t(lane);
  }
  return all;
}

#if TM_AVX512 || TM_NEON
constexpr int CHAINS = 16;  // independent sums: latency times units, as registers allow
#else
constexpr int CHAINS = 12;
#endif

// `rounds` of CHAINS fused multiply-adds of W lanes (two operations each).
constexpr double FMA_OPS = 2.0 * CHAINS * W;
static double fma_loop(int64_t rounds, const float* seed) {
  const vf a = splat(seed[0]), b = splat(seed[1]);
  vf sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = splat(float(i));
  for (; rounds > 0; rounds--)
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sum[i] = fma(sum[i], a, b);
  vf all = sum[0];
  for (int i = 1; i < CHAINS; i++) all = add(all, sum[i]);
  return reduce_add(all);
}

// `rounds` of CHAINS integer dot-product steps; DOT_OPS operations (a multiplication and an addition are two) a round.
#if TM_AVX512
// In assembly, for compilers copy or spill the sums.
constexpr const char* DOT_RECIPE = "vpdpbusd";
constexpr double DOT_OPS = 2.0 * 64 * CHAINS;
static double dot_loop(int64_t rounds, const float* seed) {
  asm volatile("vmovdqu32 (%1), %%zmm16\n vmovdqu32 64(%1), %%zmm17\n 1:\n"
#define TM_DOT(n) "vpdpbusd %%zmm17, %%zmm16, %%zmm" #n "\n"
               TM_DOT(0) TM_DOT(1) TM_DOT(2) TM_DOT(3) TM_DOT(4) TM_DOT(5) TM_DOT(6) TM_DOT(7) TM_DOT(8) TM_DOT(9)
                   TM_DOT(10) TM_DOT(11) TM_DOT(12) TM_DOT(13) TM_DOT(14) TM_DOT(15)
#undef TM_DOT
                       "dec %0\n jnz 1b\n vzeroupper"
               : "+r"(rounds)
               : "r"(seed)
               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "cc", "memory");
  return 0;
}
#elif TM_AVX2
constexpr const char* DOT_RECIPE = "maddubs + add16";
constexpr double DOT_OPS = 2.0 * 32 * CHAINS;
static double dot_loop(int64_t rounds, const float* seed) {
  asm volatile("vmovdqu (%1), %%ymm12\n vmovdqu 32(%1), %%ymm13\n 1:\n"
#define TM_DOT(n, t) "vpmaddubsw %%ymm13, %%ymm12, %%ymm" #t "\n vpaddw %%ymm" #t ", %%ymm" #n ", %%ymm" #n "\n"
               TM_DOT(0, 14) TM_DOT(1, 15) TM_DOT(2, 14) TM_DOT(3, 15) TM_DOT(4, 14) TM_DOT(5, 15) TM_DOT(6, 14)
                   TM_DOT(7, 15) TM_DOT(8, 14) TM_DOT(9, 15) TM_DOT(10, 14) TM_DOT(11, 15)
#undef TM_DOT
                       "dec %0\n jnz 1b\n vzeroupper"
               : "+r"(rounds)
               : "r"(seed)
               : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                 "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
  return 0;
}
#elif TM_NEON
constexpr const char* DOT_RECIPE = "sdot";
constexpr double DOT_OPS = 2.0 * 16 * CHAINS;
static double dot_loop(int64_t rounds, const float* seed) {
  const int8x16_t w = vreinterpretq_s8_f32(load(seed)), x = vreinterpretq_s8_f32(load(seed + W));
  vi sum[CHAINS];
  for (int i = 0; i < CHAINS; i++) sum[i] = splat(i);
  for (; rounds > 0; rounds--)
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; i++) sum[i] = vdotq_s32(sum[i], w, x);
  vi all = sum[0];
  for (int i = 1; i < CHAINS; i++) all = vaddq_s32(all, sum[i]);
  return vaddvq_s32(all);
}
#else
constexpr const char* DOT_RECIPE = "C loop";
constexpr int DOT_LENGTH = 256;
constexpr double DOT_OPS = 2.0 * DOT_LENGTH;
static double dot_loop(int64_t rounds, const float* seed) {
  uint8_t w[DOT_LENGTH];
  int8_t x[DOT_LENGTH];
  for (int i = 0; i < DOT_LENGTH; i++) w[i] = uint8_t(i), x[i] = int8_t(seed[i % 2] * i);
  int sum = 0;
  for (; rounds > 0; rounds--) {
    asm("" : : "r"(w), "r"(x) : "memory");
    for (int i = 0; i < DOT_LENGTH; i++) sum += w[i] * x[i];
  }
  return sum;
}
#endif

}  // namespace mill::TM_NS
