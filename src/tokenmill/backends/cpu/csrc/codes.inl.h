// Floats from codes and codes from floats: an embedding row out of a packed weight, activations into 8 bits.
#pragma once
#include "linear.inl.h"

namespace mill::TM_NS {

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
      const int i = k % GROUP, half = l.halves == 2 ? i / 16 : 0;
      const int g = k / GROUP;
      const uint8_t *group = base + group_offset(l, g), *super = base + groups_bytes(l, g / SUPER * SUPER);
      int code;
      if (l.codes == Codes::U4) {
        uint8_t byte = group[64 * (i % 16 / 4) + 4 * lane + i % 4];
        code = i < 16 ? byte & 15 : byte >> 4;
      } else {
        code = group[64 * (i / 4) + 4 * lane + i % 4];
      }
      auto read = [&](int min) {
        const size_t i = half * PANEL + lane;
        const uint8_t* p = group + codes_bytes(l.codes) + min * scale_bytes(l.scales, l.halves);
        if (l.scales == Scales::F16) return f16_to_f32_bits(reinterpret_cast<const uint16_t*>(p)[i]);
        return f16_to_f32_bits(reinterpret_cast<const uint16_t*>(super)[min * PANEL + lane]) *
               float(reinterpret_cast<const int8_t*>(p)[i]);
      };
      v = read(0) * float(code - l.zero);
      if (l.has_min) v += read(1);
    }
    out[k] = v * scale;
  }
}

// q = round(x * 127 / max|x|) of each group, into the token's lane of its tile. A group that is not all finite gets a
// scale that is not a number, so that it reaches the answer.
static void quantise(const float* x, int k0, int n, int dim, int token, int tokens, const QuantRows& out) {
  const int run = out.fine ? 16 : GROUP, tile = token / TILE * TILE, lane = token - tile;
  const int width = tokens - tile < TILE ? tokens - tile : TILE;
  int8_t* q = out.q + size_t(tile) * dim + lane * GROUP;
  const size_t first = size_t(tile) * (dim / run) + lane;
  for (int k = k0; k < k0 + n; k += run, x += run) {
    vi m = splat(0);
    for (int i = 0; i < run; i += W) m = vmax(bits(vabs(load(x + i))), m);
    const float top = reduce_max_abs(m), s = (top - top) + top / 127.0f, inverse = top > 1e-35f ? 127.0f / top : 0.0f;
    int8_t* row = q + size_t(k / GROUP) * width * GROUP + k % GROUP;
    vi total = splat(0);
    for (int i = 0; i < run; i += W) {
      vi r = to_int(mul(load(x + i), splat(inverse)));
      store_i8(row + i, r);
      total = add(total, r);
    }
    const int sum = reduce_add(total);
    const size_t at = first + size_t(k / run) * width;
    out.scale[at] = s, out.neg_sum[at] = -sum, out.scaled[at] = s * float(sum);
  }
}

}  // namespace mill::TM_NS
