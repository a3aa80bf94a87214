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

// Packs one panel of `w` from the file's bytes (row-major) into `out`, w.panel_bytes long.
void pack_panel(const std::string& format, const PackedWeight& w, const uint8_t* file, int panel, uint8_t* out);

}  // namespace mill
