// One vector of floats (vf) and of ints (vi), W lanes, for the instruction set this file is compiled for.
// Everything lives in a namespace named after it, so that objects of two instruction sets never share an inline
// function.
//
// fma() is one rounding where the hardware has it; the order of operations in a kernel is the order written here,
// because the library is compiled with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define TM_CAT2(a, b) a##b
#define TM_CAT(a, b) TM_CAT2(a, b)
#define TM_NS TM_CAT(isa_, TM_ISA)

#define TM_INLINE inline __attribute__((always_inline))

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define TM_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__)
#define TM_AVX2 1
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#define TM_NEON 1
#include <arm_neon.h>
#endif

namespace mill::TM_NS {

static TM_INLINE float f16_to_f32_bits(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exp = (h >> 10) & 31, man = h & 0x3ff, bits;
  if (exp == 31) {
    bits = sign | 0x7f800000 | man << 13;
  } else if (exp) {
    bits = sign | (exp + 112) << 23 | man << 13;
  } else {  // zero and subnormals: man * 2^-24 is exact
    float v = float(man) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &v, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static TM_INLINE uint16_t f32_to_f16_bits(float f) {  // round to nearest, ties to even
  uint32_t x;
  std::memcpy(&x, &f, 4);
  uint32_t sign = x >> 16 & 0x8000, mag = x & 0x7fffffff;
  if (mag > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (mag >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65520 or more
  if (mag < 0x38800000) {                                 // subnormal: let the FPU round in units of 2^-24
    float v;
    std::memcpy(&v, &mag, 4);
    v += 0.5f;  // ulp of 0.5 is 2^-24
    uint32_t r;
    std::memcpy(&r, &v, 4);
    return uint16_t(sign | (r - 0x3f000000));
  }
  uint32_t odd = mag >> 13 & 1;
  return uint16_t(sign | ((mag + 0xfff + odd - (112u << 23)) >> 13));
}

#if TM_AVX512
constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
static TM_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
static TM_INLINE void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
static TM_INLINE vf splat(float x) { return _mm512_set1_ps(x); }
static TM_INLINE vi splat(int x) { return _mm512_set1_epi32(x); }
static TM_INLINE vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static TM_INLINE vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static TM_INLINE vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static TM_INLINE vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
static TM_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static TM_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is not a number
static TM_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static TM_INLINE vf vabs(vf a) { return _mm512_abs_ps(a); }
static TM_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
static TM_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }
static TM_INLINE vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static TM_INLINE vf load_i8(const int8_t* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static TM_INLINE vf load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static TM_INLINE void store_f16(uint16_t* p, vf v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static TM_INLINE vf load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static TM_INLINE float reduce_max(vf v) { return _mm512_reduce_max_ps(v); }
static TM_INLINE vi bits(vf v) { return _mm512_castps_si512(v); }
static TM_INLINE vi vmax(vi a, vi b) { return _mm512_max_epi32(a, b); }
static TM_INLINE vf pow2(vi n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, splat(127)), 23)); }
static TM_INLINE vf select_lt(vf a, vf b, vf yes, vf no) {  // lane by lane: a < b ? yes : no
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
static TM_INLINE void store_i8(int8_t* p, vi v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }

#elif TM_AVX2
constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
static TM_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
static TM_INLINE void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
static TM_INLINE vf splat(float x) { return _mm256_set1_ps(x); }
static TM_INLINE vi splat(int x) { return _mm256_set1_epi32(x); }
static TM_INLINE vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static TM_INLINE vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static TM_INLINE vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static TM_INLINE vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
static TM_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static TM_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static TM_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static TM_INLINE vf vabs(vf a) { return _mm256_andnot_ps(splat(-0.0f), a); }
static TM_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
static TM_INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
static TM_INLINE vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static TM_INLINE vf load_i8(const int8_t* p) {
  return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static TM_INLINE vf load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static TM_INLINE void store_f16(uint16_t* p, vf v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static TM_INLINE vf load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static TM_INLINE vi bits(vf v) { return _mm256_castps_si256(v); }
static TM_INLINE vi vmax(vi a, vi b) { return _mm256_max_epi32(a, b); }
static TM_INLINE float reduce_max(vf v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}
static TM_INLINE vf pow2(vi n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, splat(127)), 23)); }
static TM_INLINE vf select_lt(vf a, vf b, vf yes, vf no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
static TM_INLINE void store_i8(int8_t* p, vi v) {
  __m128i w = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(w, w));
}

#elif TM_NEON
constexpr int W = 4;
using vf = float32x4_t;
using vi = int32x4_t;
static TM_INLINE vf load(const float* p) { return vld1q_f32(p); }
static TM_INLINE void store(float* p, vf v) { vst1q_f32(p, v); }
static TM_INLINE vf splat(float x) { return vdupq_n_f32(x); }
static TM_INLINE vi splat(int x) { return vdupq_n_s32(x); }
static TM_INLINE vf add(vf a, vf b) { return vaddq_f32(a, b); }
static TM_INLINE vf sub(vf a, vf b) { return vsubq_f32(a, b); }
static TM_INLINE vf mul(vf a, vf b) { return vmulq_f32(a, b); }
static TM_INLINE vf div(vf a, vf b) { return vdivq_f32(a, b); }
static TM_INLINE vf fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static TM_INLINE vf vmax(vf a, vf b) { return vmaxq_f32(a, b); }
static TM_INLINE vf vmin(vf a, vf b) { return vminq_f32(a, b); }
static TM_INLINE vf vabs(vf a) { return vabsq_f32(a); }
static TM_INLINE vf to_float(vi a) { return vcvtq_f32_s32(a); }
static TM_INLINE vi to_int(vf a) { return vcvtnq_s32_f32(a); }
static TM_INLINE vi add(vi a, vi b) { return vaddq_s32(a, b); }
static TM_INLINE vf load_i8(const int8_t* p) { return to_float(vi{p[0], p[1], p[2], p[3]}); }
static TM_INLINE vf load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
static TM_INLINE void store_f16(uint16_t* p, vf v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
static TM_INLINE vf load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
static TM_INLINE float reduce_max(vf v) { return vmaxvq_f32(v); }
static TM_INLINE vi bits(vf v) { return vreinterpretq_s32_f32(v); }
static TM_INLINE vi vmax(vi a, vi b) { return vmaxq_s32(a, b); }
static TM_INLINE vf pow2(vi n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, splat(127)), 23)); }
static TM_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
static TM_INLINE void store_i8(int8_t* p, vi v) {
  int16x4_t h = vqmovn_s32(v);
  int8x8_t b = vqmovn_s16(vcombine_s16(h, h));
  std::memcpy(p, &b, 4);
}

#else
constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int vi __attribute__((vector_size(16)));
static TM_INLINE vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, 16);
  return v;
}
static TM_INLINE void store(float* p, vf v) { std::memcpy(p, &v, 16); }
static TM_INLINE vf splat(float x) { return vf{x, x, x, x}; }
static TM_INLINE vi splat(int x) { return vi{x, x, x, x}; }
static TM_INLINE vf add(vf a, vf b) { return a + b; }
static TM_INLINE vf sub(vf a, vf b) { return a - b; }
static TM_INLINE vf mul(vf a, vf b) { return a * b; }
static TM_INLINE vf div(vf a, vf b) { return a / b; }
static TM_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
static TM_INLINE vf select_lt(vf a, vf b, vf yes, vf no) { return a < b ? yes : no; }
static TM_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
static TM_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
static TM_INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }
static TM_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
static TM_INLINE vi to_int(vf a) {
  vi r;
  for (int i = 0; i < W; i++) r[i] = std::abs(a[i]) < 2e9f ? int(lrintf(a[i])) : int(0x80000000);
  return r;
}
static TM_INLINE vi add(vi a, vi b) { return a + b; }
static TM_INLINE vf load_i8(const int8_t* p) { return to_float(vi{p[0], p[1], p[2], p[3]}); }
static TM_INLINE vf load_f16(const uint16_t* p) {
  return vf{f16_to_f32_bits(p[0]), f16_to_f32_bits(p[1]), f16_to_f32_bits(p[2]), f16_to_f32_bits(p[3])};
}
static TM_INLINE void store_f16(uint16_t* p, vf v) {
  for (int i = 0; i < W; i++) p[i] = f32_to_f16_bits(v[i]);
}
static TM_INLINE vf load_bf16(const uint16_t* p) { return (vf)vi{p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16}; }
static TM_INLINE vi bits(vf v) { return (vi)v; }
static TM_INLINE vi vmax(vi a, vi b) { return a > b ? a : b; }
static TM_INLINE float reduce_max(vf v) { return std::fmax(std::fmax(v[0], v[1]), std::fmax(v[2], v[3])); }
static TM_INLINE vf pow2(vi n) { return (vf)((n + 127) << 23); }
static TM_INLINE void store_i8(int8_t* p, vi v) {
  for (int i = 0; i < W; i++) p[i] = int8_t(v[i] > 127 ? 127 : v[i] < -128 ? -128 : v[i]);
}
#endif

// The largest |x| of lanes whose bits(|x|) are given: as integers they keep their order, and infinities and what is not
// a number come out on top instead of vanishing.
static TM_INLINE float reduce_max_abs(vi v) {
#if TM_AVX512
  const int32_t top = _mm512_reduce_max_epi32(v);
#else
  int32_t t[W], top = 0;
  std::memcpy(t, &v, sizeof t);
  for (int i = 0; i < W; i++) top = t[i] > top ? t[i] : top;
#endif
  float f;
  std::memcpy(&f, &top, 4);
  return f;
}

static TM_INLINE int reduce_add(vi v) {
#if TM_AVX512
  return _mm512_reduce_add_epi32(v);
#else
  int32_t t[W], sum = 0;
  std::memcpy(t, &v, sizeof t);
  for (int i = 0; i < W; i++) sum += t[i];
  return sum;
#endif
}

static TM_INLINE bool any_above(vf v, float limit) {
#if TM_AVX512
  return _mm512_cmp_ps_mask(v, splat(limit), _CMP_GT_OQ);
#elif TM_AVX2
  return _mm256_movemask_ps(_mm256_cmp_ps(v, splat(limit), _CMP_GT_OQ));
#else
  return reduce_max(v) > limit;
#endif
}

// Sum of lanes by halving, the same tree on every instruction set with the same W.
static TM_INLINE float reduce_add(vf v) {
  float t[W];
  store(t, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; i++) t[i] += t[i + n];
  return t[0];
}

// e^x to about 1 ulp for x <= 88; exactly 0 below -87.3 and for -inf. Cephes' expf: x = n ln2 + r, degree-5 polynomial.
// Not-a-number stays one.
static TM_INLINE vf vexp(vf x) {
  vf low = splat(-87.33654f);
  vf y = vmin(splat(88.72f), vmax(low, x));
  vi n = to_int(mul(y, splat(1.44269504088896341f)));
  vf nf = to_float(n);
  vf r = fma(nf, splat(-0.693359375f), y);
  r = fma(nf, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), splat(1.0f));
  return select_lt(x, low, splat(0.0f), mul(p, pow2(n)));
}

// f(i, n): a vector of n <= W elements from i on.
template <class F>
static TM_INLINE void vectors(size_t n, F f) {
  size_t i = 0;
  for (; i + W <= n; i += W) f(i, W);
  if (i < n) f(i, int(n - i));
}

static TM_INLINE vf load_n(const float* p, int n, float fill = 0.0f) {
  if (n == W) return load(p);
  float t[W];
  for (int i = 0; i < W; i++) t[i] = i < n ? p[i] : fill;
  return load(t);
}

static TM_INLINE void store_n(float* p, vf v, int n) {
  if (n == W) return store(p, v);
  float t[W];
  store(t, v);
  std::memcpy(p, t, n * sizeof(float));
}

}  // namespace mill::TM_NS
