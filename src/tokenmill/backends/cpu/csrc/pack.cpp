// The block formats are ggml's (ggml-common.h, ggml-quants.c); tests compare every type with the gguf package.
#include "pack.h"

#include <cstring>
#define TM_ISA plain  // only for the f16 conversions
#include "simd.h"

namespace mill {
namespace {

using isa_plain::f16_to_f32_bits;
using isa_plain::f32_to_f16_bits;

struct Group {  // 32 features of one row
  uint8_t code[GROUP];
  float scale[2], min[2];
};

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return f16_to_f32_bits(h);
}

void nibbles(const uint8_t* qs, uint8_t* code) {
  for (int i = 0; i < 16; i++) code[i] = qs[i] & 15, code[16 + i] = qs[i] >> 4;
}

void fifth_bits(const uint8_t* qh, uint8_t* code) {
  uint32_t bits;
  std::memcpy(&bits, qh, 4);
  for (int i = 0; i < 32; i++) code[i] |= uint8_t((bits >> i & 1) << 4);
}

// 6-bit scale and min j of a K-quant's 12 packed bytes
void scale_min(const uint8_t* q, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = q[j] & 63, *min = q[j + 4] & 63;
  } else {
    *scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
    *min = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
  }
}

void q4_0(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 18;
  o.scale[0] = half_at(b);
  nibbles(b + 2, o.code);
}
void q4_1(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 20;
  o.scale[0] = half_at(b), o.min[0] = half_at(b + 2);
  nibbles(b + 4, o.code);
}
void q5_0(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 22;
  o.scale[0] = half_at(b);
  nibbles(b + 6, o.code);
  fifth_bits(b + 2, o.code);
}
void q5_1(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 24;
  o.scale[0] = half_at(b), o.min[0] = half_at(b + 2);
  nibbles(b + 8, o.code);
  fifth_bits(b + 4, o.code);
}
void q8_0(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 34;
  o.scale[0] = half_at(b);
  for (int i = 0; i < 32; i++) o.code[i] = b[2 + i] ^ 0x80;
}
void q4_k(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 144;
  int j = g % 8, sc, mn;
  scale_min(b + 4, j, &sc, &mn);
  o.scale[0] = half_at(b) * float(sc), o.min[0] = -(half_at(b + 2) * float(mn));
  const uint8_t* qs = b + 16 + j / 2 * 32;
  for (int i = 0; i < 32; i++) o.code[i] = j % 2 ? qs[i] >> 4 : qs[i] & 15;
}
void q5_k(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 176;
  int j = g % 8, sc, mn;
  scale_min(b + 4, j, &sc, &mn);
  o.scale[0] = half_at(b) * float(sc), o.min[0] = -(half_at(b + 2) * float(mn));
  const uint8_t *qh = b + 16, *qs = b + 48 + j / 2 * 32;
  for (int i = 0; i < 32; i++) o.code[i] = uint8_t((j % 2 ? qs[i] >> 4 : qs[i] & 15) | (qh[i] >> j & 1) << 4);
}
void q6_k(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 210;
  int j = g % 8, half = j / 4, quarter = j % 4;  // 128 features share 64 bytes of low and 32 of high bits
  const uint8_t *ql = b + half * 64 + (quarter & 1) * 32, *qh = b + 128 + half * 32;
  const int8_t* sc = (const int8_t*)b + 192 + half * 8 + quarter * 2;
  float d = half_at(b + 208);
  for (int i = 0; i < 32; i++)
    o.code[i] = uint8_t((quarter < 2 ? ql[i] & 15 : ql[i] >> 4) | (qh[i] >> (2 * quarter) & 3) << 4);
  for (int h = 0; h < 2; h++) o.scale[h] = d * float(sc[h]);
}
void q2_k(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 84;
  int j = g % 8, half = j / 4, shift = j % 4 * 2;
  const uint8_t *sc = b + half * 8 + j % 4 * 2, *qs = b + 16 + half * 32;
  float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int i = 0; i < 32; i++) o.code[i] = qs[i] >> shift & 3;
  for (int h = 0; h < 2; h++) o.scale[h] = d * float(sc[h] & 15), o.min[h] = -(dmin * float(sc[h] >> 4));
}
void q3_k(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 110;
  int j = g % 8, half = j / 4, shift = j % 4 * 2;
  const uint8_t *hmask = b, *qs = b + 32 + half * 32, *sc = b + 96;
  float d = half_at(b + 108);
  for (int i = 0; i < 32; i++) o.code[i] = uint8_t((qs[i] >> shift & 3) | (hmask[i] >> j & 1) << 2);
  for (int h = 0; h < 2; h++) {
    int k = 2 * j + h;  // 16 scales of 6 bits: low nibbles in bytes 0-7, high pairs in bytes 8-11
    int low = k < 8 ? sc[k] & 15 : sc[k - 8] >> 4, high = sc[8 + k % 4] >> (2 * (k / 4)) & 3;
    o.scale[h] = d * float((low | high << 4) - 32);
  }
}
const int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
void iq4_nl(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g * 18;
  o.scale[0] = half_at(b);
  nibbles(b + 2, o.code);
  for (auto& c : o.code) c = uint8_t(IQ4[c]) ^ 0x80;
}
void iq4_xs(const uint8_t* row, int g, Group& o) {
  const uint8_t* b = row + g / 8 * 136;
  int j = g % 8;
  uint16_t high;
  std::memcpy(&high, b + 2, 2);
  int ls = (b[4 + j / 2] >> (4 * (j % 2)) & 15) | (high >> (2 * j) & 3) << 4;
  o.scale[0] = half_at(b) * float(ls - 32);
  nibbles(b + 8 + 16 * j, o.code);
  for (auto& c : o.code) c = uint8_t(IQ4[c]) ^ 0x80;
}

struct Format {
  const char* name;
  Layout layout;
  int block, bytes;  // features and bytes of a block
  void (*group)(const uint8_t* row, int g, Group& out);
};

const Format FORMATS[] = {
    {"F32", {Codes::F32, false, false, 1, 0}, 1, 4, nullptr},
    {"F16", {Codes::F16, false, false, 1, 0}, 1, 2, nullptr},
    {"BF16", {Codes::BF16, false, false, 1, 0}, 1, 2, nullptr},
    {"Q4_0", {Codes::U4, false, false, 1, 8}, 32, 18, q4_0},
    {"Q4_1", {Codes::U4, false, true, 1, 0}, 32, 20, q4_1},
    {"Q5_0", {Codes::U8, false, false, 1, 16}, 32, 22, q5_0},
    {"Q5_1", {Codes::U8, false, true, 1, 0}, 32, 24, q5_1},
    {"Q8_0", {Codes::U8, false, false, 1, 128}, 32, 34, q8_0},
    {"Q2_K", {Codes::U8, true, true, 2, 0}, 256, 84, q2_k},
    {"Q3_K", {Codes::U8, true, false, 2, 4}, 256, 110, q3_k},
    {"Q4_K", {Codes::U4, true, true, 1, 0}, 256, 144, q4_k},
    {"Q5_K", {Codes::U8, true, true, 1, 0}, 256, 176, q5_k},
    {"Q6_K", {Codes::U8, true, false, 2, 32}, 256, 210, q6_k},
    {"IQ4_NL", {Codes::U8, false, false, 1, 128}, 32, 18, iq4_nl},
    {"IQ4_XS", {Codes::U8, true, false, 1, 128}, 256, 136, iq4_xs},
};

const Format* find(const std::string& name) {
  for (const Format& f : FORMATS)
    if (name == f.name) return &f;
  return nullptr;
}

}  // namespace

bool layout_of(const std::string& format, Layout* layout) {
  const Format* f = find(format);
  if (f) *layout = f->layout;
  return f;
}

size_t row_bytes(const std::string& format, int cols) {
  const Format* f = find(format);
  return f && cols % f->block == 0 ? size_t(cols) / f->block * f->bytes : 0;
}

PackedWeight plan_weight(const Layout& l, int rows, int cols) {
  PackedWeight w{l, rows, cols, (rows + PANEL - 1) / PANEL, 0, nullptr, nullptr};
  if (l.quantised())
    w.panel_bytes = size_t(cols / GROUP) * group_bytes(l.codes, l.scale_f32, l.halves, l.has_min);
  else
    w.panel_bytes = size_t(cols) * PANEL * (l.codes == Codes::F32 ? 4 : 2);
  return w;
}

void pack_panel(const std::string& format, const PackedWeight& w, const uint8_t* file, int panel, uint8_t* out) {
  const Format& f = *find(format);
  const Layout& l = w.layout;
  const size_t stride = row_bytes(format, w.cols);
  for (int lane = 0; lane < PANEL && panel * PANEL + lane < w.rows; lane++) {
    const uint8_t* row = file + size_t(panel * PANEL + lane) * stride;
    if (!l.quantised()) {
      if (f.bytes == 4)
        for (int k = 0; k < w.cols; k++) std::memcpy(out + (size_t(k) * PANEL + lane) * 4, row + size_t(k) * 4, 4);
      else
        for (int k = 0; k < w.cols; k++) std::memcpy(out + (size_t(k) * PANEL + lane) * 2, row + size_t(k) * 2, 2);
      continue;
    }
    const size_t codes = codes_bytes(l.codes), scales = scale_bytes(l.scale_f32, l.halves);
    for (int g = 0; g < w.cols / GROUP; g++) {
      Group group;
      f.group(row, g, group);
      uint8_t* at = out + g * group_bytes(l.codes, l.scale_f32, l.halves, l.has_min);
      uint8_t* p = at + 4 * lane;
      if (l.codes == Codes::U4) {
        for (int j = 0; j < 4; j++)
          for (int b = 0; b < 4; b++) p[64 * j + b] = uint8_t(group.code[4 * j + b] | group.code[16 + 4 * j + b] << 4);
      } else {
        for (int j = 0; j < 8; j++) std::memcpy(p + 64 * j, group.code + 4 * j, 4);
      }
      auto put = [&](uint8_t* to, int h, float v) {
        if (l.scale_f32)
          reinterpret_cast<float*>(to)[h * PANEL + lane] = v;
        else
          reinterpret_cast<uint16_t*>(to)[h * PANEL + lane] = f32_to_f16_bits(v);  // came from f16: exact
      };
      for (int h = 0; h < l.halves; h++) {
        put(at + codes, h, group.scale[h]);
        if (l.has_min) put(at + codes + scales, h, group.min[h]);
      }
    }
  }
}

}  // namespace mill
