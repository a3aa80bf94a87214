// Matrix products. One SIMD lane is one output feature, so nothing is summed across lanes and the order of sums of an
// output is the order of features, for one token and for many: the reason that a batch never changes an answer.
//
// Quantised: for each group of features an exact integer dot product, then
//     acc = fma(float(dot - zero * sum(q)), scale_w * scale_x, acc);  acc = fma(min_w, scale_x * sum(q), acc)
// Float: acc = fma(w, x, acc) feature by feature.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

constexpr int SUBS = PANEL / W;  // vectors that make one panel
constexpr int PREFETCH = 4096;   // bytes ahead: panels follow each other in memory
constexpr int WIDE_PASSES = 2;   // more tiles of tokens than this make it pay to widen 4-bit codes first

#if TM_AVX512
constexpr int TILE = 8;  // tokens that share one unpacking of a weight panel
#else
constexpr int TILE = 4;
#endif

static TM_INLINE int load_i32(const int8_t* p) {
  int v;
  std::memcpy(&v, p, 4);
  return v;
}

#if TM_AVX512
// sum += four unsigned weights of each lane times the four signed activations at x
static TM_INLINE void dot4(vi& sum, vi w, const int8_t* x) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*(const int32_t*)x));
}
#elif TM_AVX2
// In assembly, because gcc would reorder the sums and spill half of them.
// sum, in 16 bits, += the products of unsigned weights and the four signed activations at x, by pairs
static TM_INLINE void pairs16(vi& sum, vi w, const int8_t* x) {
  vi t;
  asm("vpbroadcastd %3, %1\n\tvpmaddubsw %1, %2, %1\n\tvpaddw %1, %0, %0"
      : "+x"(sum), "=&x"(t)
      : "x"(w), "m"(*(const int32_t*)x));
}

// sum += the products of signed weights, given with their magnitudes, and the four activations at x
static TM_INLINE void dot_signed(vi& sum, vi w, vi magnitude, vi ones, const int8_t* x) {
  vi t;
  asm("vpbroadcastd %5, %1\n\tvpsignb %2, %1, %1\n\tvpmaddubsw %1, %3, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
      : "+x"(sum), "=&x"(t)
      : "x"(w), "x"(magnitude), "x"(ones), "m"(*(const int32_t*)x));
}
#endif

// dot[h][t] += the dot product of TN tokens with one group of a sub-panel's codes; with PARTS == 2 part h is features
// 16 h .. 16 h + 15, with PARTS == 1 all 32.
//   codes: the group, advanced to the sub-panel; step j is at + 64 j.  x: the group of the first token
//   BITS: of a code, which a byte may hold all the same
template <Codes C, int BITS, int ZERO, int PARTS, int TN>
static TM_INLINE void group_dot(const uint8_t* codes, const int8_t* x, vi (&dot)[PARTS][TN]) {
  constexpr int HI = PARTS - 1;  // the part of features 16 to 31
  auto at = [x](int step, int t) { return x + GROUP * t + 4 * step; };
#if TM_AVX512
  if constexpr (C == Codes::U4) {
    const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m512i both = _mm512_loadu_si512(codes + 64 * j);
      __m512i lo = _mm512_and_si512(both, low), hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 8
      for (int t = 0; t < TN; t++) dot4(dot[0][t], lo, at(j, t));
#pragma GCC unroll 8
      for (int t = 0; t < TN; t++) dot4(dot[HI][t], hi, at(4 + j, t));
    }
  } else {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m512i w = _mm512_loadu_si512(codes + 64 * j);
#pragma GCC unroll 8
      for (int t = 0; t < TN; t++) dot4(dot[j < 4 ? 0 : HI][t], w, at(j, t));
    }
  }
#elif TM_AVX2
  const __m256i ones = _mm256_set1_epi16(1);
  auto row = [codes](int j) { return _mm256_loadu_si256((const __m256i*)(codes + 64 * j)); };
  if constexpr (BITS == 4) {
    // Pairs are at most 2 * 15 * 127, so eight of them fit in 16 bits before they are widened.
    const __m256i low = _mm256_set1_epi8(15);
    vi sum16[PARTS][TN];
    for (int h = 0; h < PARTS; h++)
      for (int t = 0; t < TN; t++) sum16[h][t] = splat(0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m256i lo = row(j), hi;
      if constexpr (C == Codes::U4)
        hi = _mm256_and_si256(_mm256_srli_epi16(lo, 4), low), lo = _mm256_and_si256(lo, low);
      else
        hi = row(4 + j);
#pragma GCC unroll 4
      for (int t = 0; t < TN; t++) pairs16(sum16[0][t], lo, at(j, t));
#pragma GCC unroll 4
      for (int t = 0; t < TN; t++) pairs16(sum16[HI][t], hi, at(4 + j, t));
    }
    for (int h = 0; h < PARTS; h++)
      for (int t = 0; t < TN; t++) dot[h][t] = _mm256_add_epi32(dot[h][t], _mm256_madd_epi16(sum16[h][t], ones));
  } else if constexpr (ZERO == 128) {
    // Codes with zero 128 are signed weights with the top bit flipped: |w| times x with w's sign cannot saturate.
    const __m256i top = _mm256_set1_epi8(char(0x80));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      __m256i w = _mm256_xor_si256(row(j), top), mag = _mm256_abs_epi8(w);
#pragma GCC unroll 4
      for (int t = 0; t < TN; t++) dot_signed(dot[j < 4 ? 0 : HI][t], w, mag, ones, at(j, t));
    }
  } else {
    // Codes of at most 6 bits: two pairs, 4 * 63 * 127, fit in 16 bits.
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
      __m256i w0 = row(j), w1 = row(j + 1);
#pragma GCC unroll 4
      for (int t = 0; t < TN; t++) {
        vi sum16 = _mm256_maddubs_epi16(w0, splat(load_i32(at(j, t))));
        pairs16(sum16, w1, at(j + 1, t));
        vi& d = dot[j < 4 ? 0 : HI][t];
        d = _mm256_add_epi32(d, _mm256_madd_epi16(sum16, ones));
      }
    }
  }
#elif TM_NEON
  auto four = [&](int step, int t) { return vreinterpretq_s8_s32(splat(load_i32(at(step, t)))); };
  if constexpr (C == Codes::U4) {
    const uint8x16_t low = vdupq_n_u8(15);
    for (int j = 0; j < 4; j++) {
      uint8x16_t both = vld1q_u8(codes + 64 * j);
      int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(both, low)), hi = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
      for (int t = 0; t < TN; t++) {
        dot[0][t] = vdotq_s32(dot[0][t], lo, four(j, t));
        dot[HI][t] = vdotq_s32(dot[HI][t], hi, four(4 + j, t));
      }
    }
  } else {
    const uint8x16_t flip = vdupq_n_u8(ZERO == 128 ? 0x80 : 0);
    for (int j = 0; j < 8; j++) {
      int8x16_t w = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + 64 * j), flip));
      for (int t = 0; t < TN; t++) dot[j < 4 ? 0 : HI][t] = vdotq_s32(dot[j < 4 ? 0 : HI][t], w, four(j, t));
    }
  }
#else
  for (int t = 0; t < TN; t++)
    for (int lane = 0; lane < W; lane++)
      for (int i = 0; i < GROUP; i++) {
        int code;
        if constexpr (C == Codes::U4) {
          uint8_t both = codes[64 * (i % 16 / 4) + 4 * lane + i % 4];
          code = i < 16 ? both & 15 : both >> 4;
        } else {
          code = codes[64 * (i / 4) + 4 * lane + i % 4];
        }
        dot[i < 16 ? 0 : HI][t][lane] += code * at(i / 4, t)[i % 4];
      }
#endif
}

// What is left to take off each dot product: zero * sum(q). Where the dot product already read codes of zero 128 as
// signed numbers, nothing is. Zeros are powers of two, so a shift does.
template <int ZERO>
static TM_INLINE vi correction(const int32_t* neg_sum) {
#if TM_AVX2 || TM_NEON
  if constexpr (ZERO == 128) return splat(0);
#endif
  if constexpr (ZERO == 0) return splat(0);
  return splat(*neg_sum * ZERO);
}

// W scales from `index` on; `super` is what I8 ones multiply.
template <Scales S>
static TM_INLINE vf load_scale(const uint8_t* p, size_t index, vf super) {
  if constexpr (S == Scales::F32) return load((const float*)p + index);
  if constexpr (S == Scales::F16) return load_f16((const uint16_t*)p + index);
  if constexpr (S == Scales::I8) return mul(super, load_i8((const int8_t*)p + index));
}

// A panel's outputs of one token, + bias, + residual.
static TM_INLINE void store_panel(const LinearArgs& a, int row, int token, const float* tile) {
  const PackedWeight& w = *a.weight;
  const size_t at = size_t(token) * w.rows + row;
  if (w.rows - row >= PANEL) {
    for (int i = 0; i < PANEL; i += W) {
      vf v = load(tile + i);
      if (w.bias) v = add(v, load(w.bias + row + i));
      if (a.residual) v = add(v, load(a.residual + at + i));
      store(a.out + at + i, v);
    }
    return;
  }
  for (int i = 0; i < w.rows - row; i++) {
    float v = tile[i];
    if (w.bias) v += w.bias[row + i];
    if (a.residual) v += a.residual[at + i];
    a.out[at + i] = v;
  }
}

// What a pass over a panel brings near for the passes to come: `bytes` of each group's time, one after the other.
struct Ahead {
  const uint8_t* from;
  size_t bytes;
};

// TN tokens from `token` on, all in one tile, against one panel, whose groups are at `base`.
// PARTS: how many pieces of a group have activation scales of their own; HALVES: how many weight scales.
template <Codes C, int BITS, Scales S, bool MIN, int HALVES, int ZERO, int PARTS, int TN>
static void quant_tile(const LinearArgs& a, int panel, int token, const uint8_t* base, Ahead ahead) {
  static_assert(PARTS >= HALVES);
  const PackedWeight& w = *a.weight;
  const int groups = w.cols / GROUP;
  constexpr size_t CODES = codes_bytes(C), SCALES = scale_bytes(S, HALVES), STRIDE = group_bytes(C, S, HALVES, MIN);
  const size_t first = size_t(token) * groups * PARTS;
  float tile[TN][PANEL];
  for (int s = 0; s < SUBS; s++) {
    vf acc[TN];
    for (int t = 0; t < TN; t++) acc[t] = splat(0.0f);
    const uint8_t* group = base;
    const int8_t* x = a.xq.q + size_t(token) * w.cols;
    const float *xs = a.xq.scale + first, *scaled = a.xq.scaled + first;
    const int32_t* neg_sum = a.xq.neg_sum + first;
    size_t near = 0, next = 0;
    vf super = splat(1.0f), super_min = splat(1.0f);
    for (int g = 0; g < groups; g++) {
      if constexpr (S == Scales::I8)
        if (g % SUPER == 0) {
          super = load_f16((const uint16_t*)group + s * W);
          if constexpr (MIN) super_min = load_f16((const uint16_t*)group + PANEL + s * W);
          group += super_bytes(S, MIN);
        }
      if (s == 0)
        for (next += ahead.bytes; near < next; near += 64) __builtin_prefetch(ahead.from + near);
      vi dot[PARTS][TN];
      for (int h = 0; h < PARTS; h++)
        for (int t = 0; t < TN; t++) dot[h][t] = correction<ZERO>(neg_sum + h * TN + t);
      group_dot<C, BITS, ZERO, PARTS, TN>(group + s * W * 4, x, dot);
      for (int h = 0; h < PARTS; h++) {
        const size_t index = (HALVES == 2 ? h * PANEL : 0) + s * W;
        vf scale = load_scale<S>(group + CODES, index, super);
        for (int t = 0; t < TN; t++) acc[t] = fma(to_float(dot[h][t]), mul(scale, splat(xs[h * TN + t])), acc[t]);
        if constexpr (MIN) {
          vf min = load_scale<S>(group + CODES + SCALES, index, super_min);
          for (int t = 0; t < TN; t++) acc[t] = fma(min, splat(scaled[h * TN + t]), acc[t]);
        }
      }
      group += STRIDE, x += GROUP * TN;
      xs += PARTS * TN, scaled += PARTS * TN, neg_sum += PARTS * TN;
    }
    for (int t = 0; t < TN; t++) store(tile[t] + s * W, acc[t]);
  }
  for (int t = 0; t < TN; t++) store_panel(a, panel * PANEL, token + t, tile[t]);
}

// A panel of 4-bit codes as one of 8-bit codes with f32 scales: worth it where many tiles of tokens read it.
template <Scales S, bool MIN>
static void widen_panel(const PackedWeight& w, const uint8_t* group, uint8_t* to) {
  constexpr size_t CODES = codes_bytes(Codes::U4), WIDE = codes_bytes(Codes::U8);
  const uint8_t* super = group;
  for (int g = 0; g < w.cols / GROUP; g++) {
    if (g % SUPER == 0) super = group, group += super_bytes(S, MIN);
    for (size_t i = 0; i < CODES; i++) to[i] = group[i] & 15, to[CODES + i] = group[i] >> 4;
    for (int i = 0; i < (MIN ? 2 : 1) * PANEL; i += W) {
      const vf factor = S == Scales::I8 ? load_f16((const uint16_t*)super + i) : splat(1.0f);
      store((float*)(to + WIDE) + i, load_scale<S>(group + CODES, i, factor));
    }
    group += group_bytes(Codes::U4, S, 1, MIN), to += group_bytes(Codes::U8, Scales::F32, 1, MIN);
  }
}

using TileFn = void (*)(const LinearArgs&, int panel, int token, const uint8_t* base, Ahead ahead);

// Tokens whose activations stay in the second-level cache while panels pass by; a multiple of TILE.
static TM_INLINE int cached_tokens(const LinearArgs& a) {
  const int bytes = a.weight->cols * (a.weight->layout.quantised() ? 1 : 4), n = (1 << 20) / bytes / 64 * 64;
  return n < 64 ? 64 : n;
}

// How a kind of weight is worked: tiles[n - 1] for n tokens; or widen a panel, then `wide` for full tiles.
struct Tiles {
  TileFn tiles[TILE];
  void (*widen)(const PackedWeight& w, const uint8_t* group, uint8_t* to);
  TileFn wide;
};

// Panels outside tokens inside a block of tokens.
static void run_tiles(const LinearArgs& a, int panel0, int panel1, const Tiles& k) {
  const PackedWeight& w = *a.weight;
  const int block = cached_tokens(a), groups = w.cols / GROUP;
  for (int t0 = 0; t0 < a.tokens; t0 += block) {
    const int t1 = t0 + block < a.tokens ? t0 + block : a.tokens, passes = (t1 - t0 + TILE - 1) / TILE;
    for (int panel = panel0; panel < panel1; panel++) {
      const uint8_t* base = w.data + size_t(panel) * w.panel_bytes;
      const bool wide = k.widen && passes > WIDE_PASSES;
      if (wide) k.widen(w, base, a.scratch);
      for (int pass = 0; pass < passes; pass++) {
        const int t = t0 + pass * TILE, n = t1 - t < TILE ? t1 - t : TILE;
        // One pass reads its panel from memory as it goes; several share the next panel among them.
        Ahead ahead{base + PREFETCH, w.panel_bytes / groups};
        if (passes > 1)
          ahead = {base + w.panel_bytes + w.panel_bytes / passes * pass,
                   panel + 1 < panel1 ? w.panel_bytes / passes / groups : 0};
        if (wide && n == TILE)
          k.wide(a, panel, t, a.scratch, ahead);
        else
          k.tiles[n - 1](a, panel, t, base, ahead);
      }
    }
  }
}

#if TM_AVX512
#define TM_TILES {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4), TM_TILE(5), TM_TILE(6), TM_TILE(7), TM_TILE(8)}
#else
#define TM_TILES {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4)}
#endif

template <Codes C, Scales S, bool MIN, int HALVES, int ZERO, int PARTS = HALVES>
static void linear_quant(const LinearArgs& a, int panel0, int panel1) {
  if constexpr (PARTS == 1)
    if (a.xq.fine) return linear_quant<C, S, MIN, HALVES, ZERO, 2>(a, panel0, panel1);
  constexpr int BITS = C == Codes::U4 ? 4 : ZERO == 128 ? 8 : 6;
#define TM_TILE(n) quant_tile<C, BITS, S, MIN, HALVES, ZERO, PARTS, n>
  if constexpr (C == Codes::U4) {
    static_assert(HALVES == 1);
    static constexpr Tiles kind = {TM_TILES, widen_panel<S, MIN>,
                                   quant_tile<Codes::U8, BITS, Scales::F32, MIN, HALVES, ZERO, PARTS, TILE>};
    run_tiles(a, panel0, panel1, kind);
  } else {
    static constexpr Tiles kind = {TM_TILES, nullptr, nullptr};
    run_tiles(a, panel0, panel1, kind);
  }
#undef TM_TILE
}

#include "linear_float.inl.h"

static void linear(const LinearArgs& a, int p0, int p1) {
  const Layout& l = a.weight->layout;
  switch (l.codes) {
    case Codes::F32: return linear_float<Codes::F32>(a, p0, p1);
    case Codes::F16: return linear_float<Codes::F16>(a, p0, p1);
    case Codes::BF16: return linear_float<Codes::BF16>(a, p0, p1);
    case Codes::U4:
      if (l.scales == Scales::I8) return linear_quant<Codes::U4, Scales::I8, true, 1, 0>(a, p0, p1);  // Q4_K
      if (l.has_min) return linear_quant<Codes::U4, Scales::F16, true, 1, 0>(a, p0, p1);              // Q4_1
      return linear_quant<Codes::U4, Scales::F16, false, 1, 8>(a, p0, p1);                            // Q4_0
    case Codes::U8:
      if (l.scales == Scales::I8) {
        if (l.halves == 2 && l.has_min) return linear_quant<Codes::U8, Scales::I8, true, 2, 0>(a, p0, p1);     // Q2_K
        if (l.halves == 2 && l.zero == 4) return linear_quant<Codes::U8, Scales::I8, false, 2, 4>(a, p0, p1);  // Q3_K
        if (l.halves == 2) return linear_quant<Codes::U8, Scales::I8, false, 2, 32>(a, p0, p1);                // Q6_K
        if (l.has_min) return linear_quant<Codes::U8, Scales::I8, true, 1, 0>(a, p0, p1);                      // Q5_K
        return linear_quant<Codes::U8, Scales::I8, false, 1, 128>(a, p0, p1);                                  // IQ4_XS
      }
      if (l.has_min) return linear_quant<Codes::U8, Scales::F16, true, 1, 0>(a, p0, p1);       // Q5_1
      if (l.zero == 16) return linear_quant<Codes::U8, Scales::F16, false, 1, 16>(a, p0, p1);  // Q5_0
      return linear_quant<Codes::U8, Scales::F16, false, 1, 128>(a, p0, p1);                   // Q8_0, IQ4_NL
  }
}

}  // namespace mill::TM_NS
