// Matrix products. One SIMD lane is one output feature, so nothing is summed across lanes and the order of sums of an
// output is the order of features, for one token and for many: the reason that a batch never changes an answer.
//
// Quantised: for each group of 32 features an exact integer dot product, then
//     acc = fma(float(dot - zero * sum(q)), scale_w * scale_x, acc);  acc = fma(min_w, scale_x * sum(q), acc)
// Float: acc = fma(w, x, acc) feature by feature.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

constexpr int SUBS = PANEL / W;  // vectors that make one panel

#if TM_AVX512
constexpr int TILE = 8;  // tokens that share one unpacking of a weight panel
#elif TM_NEON
constexpr int TILE = 4;
#else
constexpr int TILE = 4;
#endif

static TM_INLINE int load_i32(const int8_t* p) {
  int v;
  std::memcpy(&v, p, 4);
  return v;
}

// dot[h][t] += the dot product of TN tokens with one group of a sub-panel's codes; with PARTS == 2 part h is features
// 16 h .. 16 h + 15, with PARTS == 1 all 32.
//   codes: the group, advanced to the sub-panel; step j is at + 64 j.  x: (TN, stride) int8, at the group
template <Codes C, bool ZERO128, int PARTS, int TN>
static TM_INLINE void group_dot(const uint8_t* codes, const int8_t* x, size_t stride, vi (&dot)[PARTS][TN]) {
  constexpr int HI = PARTS - 1;  // the part of features 16 to 31
#if TM_AVX512
  if constexpr (C == Codes::U4) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
      __m512i both = _mm512_load_si512(codes + 64 * j);
      __m512i lo = _mm512_and_si512(both, low), hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      for (int t = 0; t < TN; t++)
        dot[0][t] = _mm512_dpbusd_epi32(dot[0][t], lo, splat(load_i32(x + t * stride + 4 * j)));
      for (int t = 0; t < TN; t++)
        dot[HI][t] = _mm512_dpbusd_epi32(dot[HI][t], hi, splat(load_i32(x + t * stride + 16 + 4 * j)));
    }
  } else {
    for (int j = 0; j < 8; j++) {
      __m512i w = _mm512_load_si512(codes + 64 * j);
      vi* d = dot[j < 4 ? 0 : HI];
      for (int t = 0; t < TN; t++) d[t] = _mm512_dpbusd_epi32(d[t], w, splat(load_i32(x + t * stride + 4 * j)));
    }
  }
#elif TM_AVX2
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (C == Codes::U4) {
    // Pairs are at most 2 * 15 * 127, so eight of them fit in 16 bits before they are widened.
    const __m256i low = _mm256_set1_epi8(15);
    vi sum16[PARTS][TN];
    for (int j = 0; j < 4; j++) {
      __m256i both = _mm256_load_si256((const __m256i*)(codes + 64 * j));
      __m256i lo = _mm256_and_si256(both, low), hi = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      for (int t = 0; t < TN; t++) {
        vi p = _mm256_maddubs_epi16(lo, splat(load_i32(x + t * stride + 4 * j)));
        vi r = _mm256_maddubs_epi16(hi, splat(load_i32(x + t * stride + 16 + 4 * j)));
        if (PARTS == 1) p = _mm256_add_epi16(p, r);
        sum16[0][t] = j ? _mm256_add_epi16(sum16[0][t], p) : p;
        if (PARTS == 2) sum16[HI][t] = j ? _mm256_add_epi16(sum16[HI][t], r) : r;
      }
    }
    for (int h = 0; h < PARTS; h++)
      for (int t = 0; t < TN; t++) dot[h][t] = _mm256_add_epi32(dot[h][t], _mm256_madd_epi16(sum16[h][t], ones));
  } else if constexpr (ZERO128) {
    // Codes with zero 128 are signed weights with the top bit flipped: |w| times x with w's sign cannot saturate.
    const __m256i top = _mm256_set1_epi8(char(0x80));
    for (int j = 0; j < 8; j++) {
      __m256i w = _mm256_xor_si256(_mm256_load_si256((const __m256i*)(codes + 64 * j)), top);
      __m256i mag = _mm256_abs_epi8(w);
      vi* d = dot[j < 4 ? 0 : HI];
      for (int t = 0; t < TN; t++) {
        vi p = _mm256_maddubs_epi16(mag, _mm256_sign_epi8(splat(load_i32(x + t * stride + 4 * j)), w));
        d[t] = _mm256_add_epi32(d[t], _mm256_madd_epi16(p, ones));
      }
    }
  } else {
    // Codes of at most 6 bits: two pairs, 4 * 63 * 127, fit in 16 bits.
    for (int j = 0; j < 8; j += 2) {
      __m256i w0 = _mm256_load_si256((const __m256i*)(codes + 64 * j));
      __m256i w1 = _mm256_load_si256((const __m256i*)(codes + 64 * j + 64));
      vi* d = dot[j < 4 ? 0 : HI];
      for (int t = 0; t < TN; t++) {
        vi p = _mm256_add_epi16(_mm256_maddubs_epi16(w0, splat(load_i32(x + t * stride + 4 * j))),
                                _mm256_maddubs_epi16(w1, splat(load_i32(x + t * stride + 4 * j + 4))));
        d[t] = _mm256_add_epi32(d[t], _mm256_madd_epi16(p, ones));
      }
    }
  }
#elif TM_NEON
  if constexpr (C == Codes::U4) {
    const uint8x16_t low = vdupq_n_u8(15);
    for (int j = 0; j < 4; j++) {
      uint8x16_t both = vld1q_u8(codes + 64 * j);
      int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(both, low)), hi = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
      for (int t = 0; t < TN; t++) {
        dot[0][t] = vdotq_s32(dot[0][t], lo, vreinterpretq_s8_s32(splat(load_i32(x + t * stride + 4 * j))));
        dot[HI][t] = vdotq_s32(dot[HI][t], hi, vreinterpretq_s8_s32(splat(load_i32(x + t * stride + 16 + 4 * j))));
      }
    }
  } else {
    const uint8x16_t flip = vdupq_n_u8(ZERO128 ? 0x80 : 0);
    for (int j = 0; j < 8; j++) {
      int8x16_t w = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(codes + 64 * j), flip));
      vi* d = dot[j < 4 ? 0 : HI];
      for (int t = 0; t < TN; t++)
        d[t] = vdotq_s32(d[t], w, vreinterpretq_s8_s32(splat(load_i32(x + t * stride + 4 * j))));
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
        dot[i < 16 ? 0 : HI][t][lane] += code * x[t * stride + i];
      }
#endif
}

// Whether group_dot already took 128 from each code, so that nothing is left to correct.
#if TM_AVX2 || TM_NEON
constexpr bool SIGNED_128 = true;
#else
constexpr bool SIGNED_128 = false;
#endif

template <bool F32>
static TM_INLINE vf load_scale(const uint8_t* p, size_t index) {
  if constexpr (F32)
    return load((const float*)p + index);
  else
    return load_f16((const uint16_t*)p + index);
}

static TM_INLINE void store_tile(const LinearArgs& a, int row, int token, const float (&tile)[PANEL]) {
  const PackedWeight& w = *a.weight;
  int n = w.rows - row < PANEL ? w.rows - row : PANEL;
  float* out = a.out + size_t(token) * w.rows + row;
  const float* residual = a.residual ? a.residual + size_t(token) * w.rows + row : nullptr;
  for (int i = 0; i < n; i++) {
    float v = tile[i];
    if (w.bias) v += w.bias[row + i];
    if (residual) v += residual[i];
    out[i] = v;
  }
}

// PARTS: how many pieces of a group have scales of their own, by the weight (HALVES) or the activations.
template <Codes C, bool F32, bool MIN, int HALVES, bool ZERO128, int PARTS, int TN>
static void quant_tile(const LinearArgs& a, int panel, int token) {
  const PackedWeight& w = *a.weight;
  const int groups = w.cols / GROUP;
  const uint8_t* base = w.data + size_t(panel) * w.panel_bytes;
  const uint8_t *scales = base + w.scale_offset, *mins = base + w.min_offset;
  constexpr size_t group_bytes = C == Codes::U4 ? PANEL * GROUP / 2 : PANEL * GROUP;
  const size_t stride = w.cols, half_stride = w.cols / 16;
  const int8_t* x = a.xq.q + token * stride;
  const float *xs = a.xq.scale + token * half_stride, *scaled = a.xq.scaled + token * half_stride;
  const int32_t* sums = a.xq.sums + token * half_stride;
  const int zero = ZERO128 ? (SIGNED_128 ? 0 : 128) : w.layout.zero;
  float tile[TN][PANEL];
  for (int s = 0; s < SUBS; s++) {
    vf acc[TN];
    for (int t = 0; t < TN; t++) acc[t] = splat(0.0f);
    const uint8_t* codes = base + s * W * 4;
    for (int g = 0; g < groups; g++) {
      vi dot[PARTS][TN];
      for (int t = 0; t < TN; t++) {
        const int32_t* sum = sums + t * half_stride + 2 * g;
        if constexpr (PARTS == 1)
          dot[0][t] = splat(-zero * (sum[0] + sum[1]));
        else
          for (int h = 0; h < 2; h++) dot[h][t] = splat(-zero * sum[h]);
      }
      group_dot<C, ZERO128, PARTS, TN>(codes + g * group_bytes, x + g * GROUP, stride, dot);
      for (int h = 0; h < PARTS; h++) {
        size_t index = size_t(g * HALVES + (HALVES == 2 ? h : 0)) * PANEL + s * W;
        vf scale = load_scale<F32>(scales, index);
        for (int t = 0; t < TN; t++)
          acc[t] = fma(to_float(dot[h][t]), mul(scale, splat(xs[t * half_stride + 2 * g + h])), acc[t]);
        if constexpr (MIN) {
          vf min = load_scale<F32>(mins, index);
          for (int t = 0; t < TN; t++) {
            const float* sx = scaled + t * half_stride + 2 * g;
            if constexpr (HALVES == 2)
              acc[t] = fma(min, splat(sx[h]), acc[t]);
            else if (h == PARTS - 1)
              acc[t] = fma(min, splat(sx[0] + sx[1]), acc[t]);
          }
        }
      }
    }
    for (int t = 0; t < TN; t++) store(tile[t] + s * W, acc[t]);
  }
  for (int t = 0; t < TN; t++) store_tile(a, panel * PANEL, token + t, tile[t]);
}

template <Codes C>
static TM_INLINE vf load_weight(const uint8_t* p, size_t index) {
  if constexpr (C == Codes::F32) return load((const float*)p + index);
  if constexpr (C == Codes::F16) return load_f16((const uint16_t*)p + index);
  if constexpr (C == Codes::BF16) return load_bf16((const uint16_t*)p + index);
}

template <Codes C, int TN>
static void float_tile(const LinearArgs& a, int panel, int token) {
  const PackedWeight& w = *a.weight;
  const uint8_t* base = w.data + size_t(panel) * w.panel_bytes;
  const float* x = a.x + size_t(token) * w.cols;
  float tile[TN][PANEL];
  constexpr int PAIR = SUBS == 1 ? 1 : 2;  // vectors worked at once, as registers allow
  for (int s = 0; s < SUBS; s += PAIR) {
    vf acc[TN][PAIR];
    for (int t = 0; t < TN; t++)
      for (int p = 0; p < PAIR; p++) acc[t][p] = splat(0.0f);
    for (int k = 0; k < w.cols; k++) {
      vf row[PAIR];
      for (int p = 0; p < PAIR; p++) row[p] = load_weight<C>(base, size_t(k) * PANEL + (s + p) * W);
      for (int t = 0; t < TN; t++) {
        vf xk = splat(x[size_t(t) * w.cols + k]);
        for (int p = 0; p < PAIR; p++) acc[t][p] = fma(row[p], xk, acc[t][p]);
      }
    }
    for (int t = 0; t < TN; t++)
      for (int p = 0; p < PAIR; p++) store(tile[t] + (s + p) * W, acc[t][p]);
  }
  for (int t = 0; t < TN; t++) store_tile(a, panel * PANEL, token + t, tile[t]);
}

using TileFn = void (*)(const LinearArgs&, int panel, int token);

// Tokens in blocks whose activations stay in the second-level cache, panels outside tokens inside a block.
static void run_tiles(const LinearArgs& a, int panel0, int panel1, const TileFn (&tiles)[TILE]) {
  const int block = a.weight->layout.quantised() ? 512 : 64;
  for (int t0 = 0; t0 < a.tokens; t0 += block) {
    int t1 = t0 + block < a.tokens ? t0 + block : a.tokens;
    for (int panel = panel0; panel < panel1; panel++)
      for (int t = t0; t < t1; t += TILE) tiles[(t1 - t < TILE ? t1 - t : TILE) - 1](a, panel, t);
  }
}

template <Codes C, bool F32, bool MIN, int HALVES, bool ZERO128, int PARTS = HALVES>
static void linear_quant(const LinearArgs& a, int panel0, int panel1) {
  if constexpr (PARTS == 1)
    if (a.xq.fine) return linear_quant<C, F32, MIN, HALVES, ZERO128, 2>(a, panel0, panel1);
#define TM_TILE(n) quant_tile<C, F32, MIN, HALVES, ZERO128, PARTS, n>
#if TM_AVX512
  static constexpr TileFn tiles[TILE] = {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4),
                                         TM_TILE(5), TM_TILE(6), TM_TILE(7), TM_TILE(8)};
#else
  static constexpr TileFn tiles[TILE] = {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4)};
#endif
#undef TM_TILE
  run_tiles(a, panel0, panel1, tiles);
}

template <Codes C>
static void linear_float(const LinearArgs& a, int panel0, int panel1) {
#define TM_TILE(n) float_tile<C, n>
#if TM_AVX512
  static constexpr TileFn tiles[TILE] = {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4),
                                         TM_TILE(5), TM_TILE(6), TM_TILE(7), TM_TILE(8)};
#else
  static constexpr TileFn tiles[TILE] = {TM_TILE(1), TM_TILE(2), TM_TILE(3), TM_TILE(4)};
#endif
#undef TM_TILE
  run_tiles(a, panel0, panel1, tiles);
}

static void linear(const LinearArgs& a, int p0, int p1) {
  const Layout& l = a.weight->layout;
  const bool top = l.zero == 128;
  switch (l.codes) {
    case Codes::F32: return linear_float<Codes::F32>(a, p0, p1);
    case Codes::F16: return linear_float<Codes::F16>(a, p0, p1);
    case Codes::BF16: return linear_float<Codes::BF16>(a, p0, p1);
    case Codes::U4:
      if (l.scale_f32) return linear_quant<Codes::U4, true, true, 1, false>(a, p0, p1);  // Q4_K
      if (l.has_min) return linear_quant<Codes::U4, false, true, 1, false>(a, p0, p1);   // Q4_1
      return linear_quant<Codes::U4, false, false, 1, false>(a, p0, p1);                 // Q4_0
    case Codes::U8:
      if (l.halves == 2 && l.has_min) return linear_quant<Codes::U8, true, true, 2, false>(a, p0, p1);  // Q2_K
      if (l.halves == 2) return linear_quant<Codes::U8, true, false, 2, false>(a, p0, p1);              // Q3_K, Q6_K
      if (l.scale_f32 && top) return linear_quant<Codes::U8, true, false, 1, true>(a, p0, p1);          // IQ4_XS
      if (l.scale_f32) return linear_quant<Codes::U8, true, true, 1, false>(a, p0, p1);                 // Q5_K
      if (top) return linear_quant<Codes::U8, false, false, 1, true>(a, p0, p1);                        // Q8_0, IQ4_NL
      if (l.has_min) return linear_quant<Codes::U8, false, true, 1, false>(a, p0, p1);                  // Q5_1
      return linear_quant<Codes::U8, false, false, 1, false>(a, p0, p1);                                // Q5_0
  }
}

// One row of a weight times `scale`, in floats: the embedding lookup. Same arithmetic as the file format's definition.
static void unpack_row(const PackedWeight& w, int row, float scale, float* out) {
  const uint8_t* base = w.data + size_t(row / PANEL) * w.panel_bytes;
  const int lane = row % PANEL;
  const Layout& l = w.layout;
  for (int k = 0; k < w.cols; k++) {
    float v;
    if (l.codes == Codes::F32) {
      std::memcpy(&v, base + (size_t(k) * PANEL + lane) * 4, 4);
    } else if (l.codes == Codes::F16 || l.codes == Codes::BF16) {
      uint16_t h;
      std::memcpy(&h, base + (size_t(k) * PANEL + lane) * 2, 2);
      if (l.codes == Codes::F16) {
        v = f16_to_f32_bits(h);
      } else {
        uint32_t bits = uint32_t(h) << 16;
        std::memcpy(&v, &bits, 4);
      }
    } else {
      int g = k / GROUP, i = k % GROUP, code;
      if (l.codes == Codes::U4) {
        uint8_t byte = base[size_t(g) * (PANEL * GROUP / 2) + 64 * (i % 16 / 4) + 4 * lane + i % 4];
        code = i < 16 ? byte & 15 : byte >> 4;
      } else {
        code = base[size_t(g) * (PANEL * GROUP) + 64 * (i / 4) + 4 * lane + i % 4];
      }
      size_t index = size_t(g * l.halves + (l.halves == 2 ? i / 16 : 0)) * PANEL + lane;
      auto read = [&](size_t offset) {
        if (l.scale_f32) return ((const float*)(base + offset))[index];
        return f16_to_f32_bits(((const uint16_t*)(base + offset))[index]);
      };
      v = read(w.scale_offset) * float(code - l.zero);
      if (l.has_min) v += read(w.min_offset);
    }
    out[k] = v * scale;
  }
}

// q = round(x * 127 / max|x|) over each 32 features, or each 16 where fine.
static void quantise(const float* x, int n, const QuantRows& out, size_t at) {
  const int run = out.fine ? 16 : GROUP;
  int8_t* q = out.q + at;
  for (int i = 0; i < n; i += run) {
    vf m = splat(0.0f);
    for (int j = i; j < i + run; j += W) m = vmax(vabs(load(x + j)), m);
    float top = reduce_max(m), s = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int j = i; j < i + run; j += W) store_i8(q + j, to_int(mul(load(x + j), splat(inverse))));
    for (int h = i; h < i + run; h += 16) {
      int sum = 0;
      for (int j = 0; j < 16; j++) sum += q[h + j];
      size_t half = (at + h) / 16;
      out.scale[half] = s, out.sums[half] = sum, out.scaled[half] = s * float(sum);
    }
  }
}

}  // namespace mill::TM_NS
