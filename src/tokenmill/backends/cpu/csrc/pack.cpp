// The block formats are ggml's (ggml-common.h, ggml-quants.c); tests compare every type with the gguf package.
#include "pack.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace mill {
namespace {

// 32 features of one row. U4: 16 bytes, low nibbles features 0-15, high ones 16-31. Scales as the layout keeps them.
template <class Scale>
struct Group {
  uint8_t code[GROUP];
  Scale scale[2], min[2];
};
using HalfGroup = Group<uint16_t>;  // f16, as in the file
using ByteGroup = Group<int8_t>;    // times the block's

uint16_t half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

uint16_t negative(const uint8_t* p) { return half(p) ^ 0x8000; }

void nibbles(const uint8_t* qs, uint8_t* code) {
  for (int i = 0; i < 16; i++) code[i] = qs[i] & 15, code[16 + i] = qs[i] >> 4;
}

// Bit i of qh is bit 4 of code i, eight at a time: a byte is copied into all eight, each keeps its own bit.
void fifth_bits(const uint8_t* qh, uint8_t* code) {
  for (int i = 0; i < 4; i++) {
    uint64_t bits = qh[i] * 0x0101010101010101u & 0x8040201008040201u, eight;
    bits = (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
    std::memcpy(&eight, code + 8 * i, 8);
    eight |= bits << 4;
    std::memcpy(code + 8 * i, &eight, 8);
  }
}

// 6-bit scale and min j of a K-quant's 12 packed bytes
void scale_min(const uint8_t* q, int j, int8_t* scale, int8_t* min) {
  if (j < 4) {
    *scale = int8_t(q[j] & 63), *min = int8_t(q[j + 4] & 63);
  } else {
    *scale = int8_t((q[j + 4] & 15) | (q[j - 4] >> 6) << 4);
    *min = int8_t((q[j + 4] >> 4) | (q[j] >> 6) << 4);
  }
}

// A format: its layout, features and bytes of a block, and group j of a block; for scales that are integers, what they
// and the mins of a block multiply.
struct Q4_0 {
  static constexpr Layout layout{Codes::U4, Scales::F16, false, 1, 8};
  static constexpr int block = 32, bytes = 18;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b);
    std::memcpy(o.code, b + 2, 16);
  }
};
struct Q4_1 {
  static constexpr Layout layout{Codes::U4, Scales::F16, true, 1, 0};
  static constexpr int block = 32, bytes = 20;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b), o.min[0] = half(b + 2);
    std::memcpy(o.code, b + 4, 16);
  }
};
struct Q5_0 {
  static constexpr Layout layout{Codes::U8, Scales::F16, false, 1, 16};
  static constexpr int block = 32, bytes = 22;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b);
    nibbles(b + 6, o.code);
    fifth_bits(b + 2, o.code);
  }
};
struct Q5_1 {
  static constexpr Layout layout{Codes::U8, Scales::F16, true, 1, 0};
  static constexpr int block = 32, bytes = 24;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b), o.min[0] = half(b + 2);
    nibbles(b + 8, o.code);
    fifth_bits(b + 4, o.code);
  }
};
struct Q8_0 {
  static constexpr Layout layout{Codes::U8, Scales::F16, false, 1, 128};
  static constexpr int block = 32, bytes = 34;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b);
    for (int i = 0; i < 32; i++) o.code[i] = b[2 + i] ^ 0x80;
  }
};
struct Q4_K {
  static constexpr Layout layout{Codes::U4, Scales::I8, true, 1, 0};
  static constexpr int block = 256, bytes = 144;
  static uint16_t super(const uint8_t* b) { return half(b); }
  static uint16_t super_min(const uint8_t* b) { return negative(b + 2); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    scale_min(b + 4, j, o.scale, o.min);
    const uint8_t* qs = b + 16 + j / 2 * 32;  // low nibbles are group j, high ones group j + 1
    for (int i = 0; i < 16; i++)
      o.code[i] = uint8_t(j % 2 ? qs[i] >> 4 | (qs[16 + i] & 0xf0) : (qs[i] & 15) | qs[16 + i] << 4);
  }
};
struct Q5_K {
  static constexpr Layout layout{Codes::U8, Scales::I8, true, 1, 0};
  static constexpr int block = 256, bytes = 176;
  static uint16_t super(const uint8_t* b) { return half(b); }
  static uint16_t super_min(const uint8_t* b) { return negative(b + 2); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    scale_min(b + 4, j, o.scale, o.min);
    const uint8_t *qh = b + 16, *qs = b + 48 + j / 2 * 32;
    for (int i = 0; i < 32; i++) o.code[i] = uint8_t((j % 2 ? qs[i] >> 4 : qs[i] & 15) | (qh[i] >> j & 1) << 4);
  }
};
struct Q6_K {
  static constexpr Layout layout{Codes::U8, Scales::I8, false, 2, 32};
  static constexpr int block = 256, bytes = 210;
  static uint16_t super(const uint8_t* b) { return half(b + 208); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    int h = j / 4, quarter = j % 4;  // 128 features share 64 bytes of low and 32 of high bits
    const uint8_t *ql = b + h * 64 + (quarter & 1) * 32, *qh = b + 128 + h * 32;
    const int8_t* sc = (const int8_t*)b + 192 + h * 8 + quarter * 2;
    for (int i = 0; i < 32; i++)
      o.code[i] = uint8_t((quarter < 2 ? ql[i] & 15 : ql[i] >> 4) | (qh[i] >> (2 * quarter) & 3) << 4);
    for (int i = 0; i < 2; i++) o.scale[i] = sc[i];
  }
};
struct Q2_K {
  static constexpr Layout layout{Codes::U8, Scales::I8, true, 2, 0};
  static constexpr int block = 256, bytes = 84;
  static uint16_t super(const uint8_t* b) { return half(b + 80); }
  static uint16_t super_min(const uint8_t* b) { return negative(b + 82); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    int h = j / 4, shift = j % 4 * 2;
    const uint8_t *sc = b + h * 8 + j % 4 * 2, *qs = b + 16 + h * 32;
    for (int i = 0; i < 32; i++) o.code[i] = qs[i] >> shift & 3;
    for (int i = 0; i < 2; i++) o.scale[i] = int8_t(sc[i] & 15), o.min[i] = int8_t(sc[i] >> 4);
  }
};
struct Q3_K {
  static constexpr Layout layout{Codes::U8, Scales::I8, false, 2, 4};
  static constexpr int block = 256, bytes = 110;
  static uint16_t super(const uint8_t* b) { return half(b + 108); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    int shift = j % 4 * 2;
    const uint8_t *hmask = b, *qs = b + 32 + j / 4 * 32, *sc = b + 96;
    for (int i = 0; i < 32; i++) o.code[i] = uint8_t((qs[i] >> shift & 3) | (hmask[i] >> j & 1) << 2);
    for (int i = 0; i < 2; i++) {
      int k = 2 * j + i;  // 16 scales of 6 bits: low nibbles in bytes 0-7, high pairs in bytes 8-11
      int low = k < 8 ? sc[k] & 15 : sc[k - 8] >> 4, high = sc[8 + k % 4] >> (2 * (k / 4)) & 3;
      o.scale[i] = int8_t((low | high << 4) - 32);
    }
  }
};
constexpr uint8_t IQ4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};  // value + 128
void iq4_codes(const uint8_t* qs, uint8_t* code) {
  for (int i = 0; i < 16; i += 8) {
    uint64_t low = 0, high = 0;  // eight codes each: byte by byte the compiler builds vectors, three times as dear
    for (int k = 0; k < 8; k++) {
      low |= uint64_t(IQ4[qs[i + k] & 15]) << (8 * k);
      high |= uint64_t(IQ4[qs[i + k] >> 4]) << (8 * k);
    }
    std::memcpy(code + i, &low, 8);
    std::memcpy(code + 16 + i, &high, 8);
  }
}
struct IQ4_NL {
  static constexpr Layout layout{Codes::U8, Scales::F16, false, 1, 128};
  static constexpr int block = 32, bytes = 18;
  static void group(const uint8_t* b, int, HalfGroup& o) {
    o.scale[0] = half(b);
    iq4_codes(b + 2, o.code);
  }
};
struct IQ4_XS {
  static constexpr Layout layout{Codes::U8, Scales::I8, false, 1, 128};
  static constexpr int block = 256, bytes = 136;
  static uint16_t super(const uint8_t* b) { return half(b); }
  static void group(const uint8_t* b, int j, ByteGroup& o) {
    int ls = (b[4 + j / 2] >> (4 * (j % 2)) & 15) | (half(b + 2) >> (2 * j) & 3) << 4;
    o.scale[0] = int8_t(ls - 32);
    iq4_codes(b + 8 + 16 * j, o.code);
  }
};

// `rows` of a panel, n <= PANEL of them, into `out`. Block by block over all rows, so that what is written stays in the
// first cache while it fills up; each block is read once.
using PackPanel = void(const uint8_t* const* rows, int n, int cols, uint8_t* out);

template <class F>
void pack_quantised(const uint8_t* const* rows, int n, int cols, uint8_t* out) {
  constexpr Layout l = F::layout;
  using Scale = std::conditional_t<l.scales == Scales::I8, int8_t, uint16_t>;
  constexpr size_t codes = codes_bytes(l.codes), scales = scale_bytes(l.scales, l.halves);
  constexpr size_t stride = group_bytes(l.codes, l.scales, l.halves, l.has_min);
  constexpr size_t super = super_bytes(l.scales, l.has_min);
  static_assert(!super || F::block == SUPER * GROUP);
  for (int b = 0; b < cols / F::block; b++, out += super + stride * (F::block / GROUP))
    for (int row = 0; row < n; row++) {
      const uint8_t* block = rows[row] + size_t(b) * F::bytes;
      if constexpr (super) {
        reinterpret_cast<uint16_t*>(out)[row] = F::super(block);
        if constexpr (l.has_min) reinterpret_cast<uint16_t*>(out)[PANEL + row] = F::super_min(block);
      }
#pragma GCC unroll 8  // every shift and nibble of a block becomes a constant
      for (int j = 0; j < F::block / GROUP; j++) {
        Group<Scale> group;
        F::group(block, j, group);
        uint8_t* at = out + super + j * stride;
        for (size_t i = 0; i < codes / (4 * PANEL); i++)
          std::memcpy(at + 4 * PANEL * i + 4 * row, group.code + 4 * i, 4);
        for (int h = 0; h < l.halves; h++) {
          reinterpret_cast<Scale*>(at + codes)[h * PANEL + row] = group.scale[h];
          if (l.has_min) reinterpret_cast<Scale*>(at + codes + scales)[h * PANEL + row] = group.min[h];
        }
      }
    }
}

// Four rows at a time where there are four: as many numbers fill a word or half a vector, and a word is one store.
template <class T>
void pack_floats(const uint8_t* const* rows, int n, int cols, uint8_t* out) {
  constexpr int LINE = 64 / sizeof(T);
  for (int k0 = 0; k0 < cols; k0 += LINE) {
    const int width = std::min(LINE, cols - k0);
    T* to = reinterpret_cast<T*>(out) + size_t(k0) * PANEL;
    int row = 0;
    if (width == LINE)
      for (; row + 4 <= n; row += 4) {
        T line[4][LINE];
        for (int i = 0; i < 4; i++) std::memcpy(line[i], rows[row + i] + size_t(k0) * sizeof(T), 64);
        for (int k = 0; k < LINE; k++)
          if constexpr (sizeof(T) == 2) {
            uint64_t word =
                line[0][k] | uint64_t(line[1][k]) << 16 | uint64_t(line[2][k]) << 32 | uint64_t(line[3][k]) << 48;
            std::memcpy(to + k * PANEL + row, &word, 8);
          } else {
            for (int i = 0; i < 4; i++) to[k * PANEL + row + i] = line[i][k];
          }
      }
    for (; row < n; row++)
      for (int k = 0; k < width; k++)
        std::memcpy(to + k * PANEL + row, rows[row] + size_t(k0 + k) * sizeof(T), sizeof(T));
  }
}

struct Format {
  const char* name;
  Layout layout;
  int block, bytes;  // features and bytes of a block
  PackPanel* pack;
};

template <class F>
constexpr Format quantised(const char* name) {
  return {name, F::layout, F::block, F::bytes, pack_quantised<F>};
}

const Format FORMATS[] = {
    {"F32", {Codes::F32, Scales::F32, false, 1, 0}, 1, 4, pack_floats<uint32_t>},
    {"F16", {Codes::F16, Scales::F32, false, 1, 0}, 1, 2, pack_floats<uint16_t>},
    {"BF16", {Codes::BF16, Scales::F32, false, 1, 0}, 1, 2, pack_floats<uint16_t>},
    quantised<Q4_0>("Q4_0"),
    quantised<Q4_1>("Q4_1"),
    quantised<Q5_0>("Q5_0"),
    quantised<Q5_1>("Q5_1"),
    quantised<Q8_0>("Q8_0"),
    quantised<Q2_K>("Q2_K"),
    quantised<Q3_K>("Q3_K"),
    quantised<Q4_K>("Q4_K"),
    quantised<Q5_K>("Q5_K"),
    quantised<Q6_K>("Q6_K"),
    quantised<IQ4_NL>("IQ4_NL"),
    quantised<IQ4_XS>("IQ4_XS"),
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
    w.panel_bytes = groups_bytes(l, size_t(cols) / GROUP);
  else
    w.panel_bytes = size_t(cols) * PANEL * (l.codes == Codes::F32 ? 4 : 2);
  return w;
}

void pack_panel(const std::string& format, const PackedWeight& w, const WeightSource& from, int panel, uint8_t* out) {
  const size_t stride = row_bytes(format, w.cols);
  const int first = panel * PANEL, n = std::min(PANEL, w.rows - first);
  const uint8_t* rows[PANEL];
  for (int i = 0; i < n; i++) rows[i] = from.data + size_t(from.order ? from.order[first + i] : first + i) * stride;
  find(format)->pack(rows, n, w.cols, out);
}

void release_pages(const WeightSource& from, size_t bytes) {
  if (!from.mapped) return;  // anything else would lose its contents
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), start = uintptr_t(from.data) / page * page;
  const size_t length = uintptr_t(from.data) + std::min(bytes, from.bytes) - start;
  madvise(reinterpret_cast<void*>(start), length, MADV_DONTNEED);  // where refused they stay: only memory is lost
}

}  // namespace mill
