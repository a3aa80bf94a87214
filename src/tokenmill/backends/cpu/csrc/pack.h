// File formats to packed layouts, losing nothing: each GGUF block becomes codes, scales and mins of kernels.h.
#pragma once
#include <string>

#include "kernels.h"
#include "memory.h"

namespace mill {

// The layout for a GGUF type name; false if there is none.
bool layout_of(const std::string& format, Layout* layout);

// Sizes for (rows, cols); data still null. cols of a quantised format is a multiple of its block.
PackedWeight plan_weight(const Layout& layout, int rows, int cols);
size_t row_bytes(const std::string& format, int cols);

// A weight as its file keeps it: rows one after the other.
struct WeightSource {
  const uint8_t* data;
  size_t bytes;
  const int32_t* order = nullptr;  // row i of the weight is row order[i] of data; null: as they stand
  bool mapped = false;             // data is a read-only mapping of a file
};

// Packs one panel of `w` into `out`, w.panel_bytes long and zero so far.
void pack_panel(const std::string& format, const PackedWeight& w, const WeightSource& from, int panel, uint8_t* out);

// Of a mapped source: the pages of its first `bytes` leave this process's memory, so that a model is never there twice.
// The system's page cache keeps them, and reading them again brings them back.
void release_pages(const WeightSource& from, size_t bytes);

}  // namespace mill
