// Products with float weights; a part of linear.inl.h, inside its namespace. acc = fma(w, x, acc) feature by feature.

template <Codes C>
static TM_INLINE vf load_weight(const uint8_t* p, size_t index) {
  if constexpr (C == Codes::F32) return load((const float*)p + index);
  if constexpr (C == Codes::F16) return load_f16((const uint16_t*)p + index);
  if constexpr (C == Codes::BF16) return load_bf16((const uint16_t*)p + index);
}

// TN tokens against PANELS panels at once: as many chains of sums as it takes to hide the latency of one.
template <Codes C, int TN, int PANELS>
static void float_tile(const LinearArgs& a, int panel, int token) {
  const PackedWeight& w = *a.weight;
  const uint8_t* base = w.data + size_t(panel) * w.panel_bytes;
  const float* x = a.x + size_t(token) * w.cols;
  constexpr int VECTORS = PANELS > 1 ? PANELS * SUBS : SUBS > 1 ? 2 : 1;  // worked at once
  float tile[TN][PANELS * PANEL];
  for (int first = 0; first < PANELS * SUBS; first += VECTORS) {
    vf acc[TN][VECTORS];
    const uint8_t* from[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
      from[v] = base + (first + v) / SUBS * w.panel_bytes;
      for (int t = 0; t < TN; t++) acc[t][v] = splat(0.0f);
    }
    for (int k = 0; k < w.cols; k++) {
      vf row[VECTORS];
      for (int v = 0; v < VECTORS; v++) row[v] = load_weight<C>(from[v], size_t(k) * PANEL + (first + v) % SUBS * W);
#pragma GCC unroll 8
      for (int t = 0; t < TN; t++) {
        vf xk = splat(x[size_t(t) * w.cols + k]);
        for (int v = 0; v < VECTORS; v++) acc[t][v] = fma(row[v], xk, acc[t][v]);
      }
    }
    for (int t = 0; t < TN; t++)
      for (int v = 0; v < VECTORS; v++) store(tile[t] + (first + v) * W, acc[t][v]);
  }
  for (int t = 0; t < TN; t++)
    for (int p = 0; p < PANELS; p++) store_panel(a, (panel + p) * PANEL, token + t, tile[t] + p * PANEL);
}

// Panels that a tile of n float tokens takes at once, as registers allow.
constexpr int float_panels(int n) { return (n > TILE / 2 ? 2 : 4) / SUBS > 1 ? (n > TILE / 2 ? 2 : 4) / SUBS : 1; }

template <Codes C>
static void linear_float(const LinearArgs& a, int panel0, int panel1) {
  using Fn = void (*)(const LinearArgs&, int panel, int token);
#define TM_TILE(n) float_tile<C, n, float_panels(n)>
  static constexpr Fn tiles[TILE] = TM_TILES;
#undef TM_TILE
#define TM_TILE(n) float_tile<C, n, 1>
  static constexpr Fn single[TILE] = TM_TILES;
#undef TM_TILE
  const int block = cached_tokens(a);
  for (int t0 = 0; t0 < a.tokens; t0 += block) {
    const int t1 = t0 + block < a.tokens ? t0 + block : a.tokens;
    for (int panel = panel0, step; panel < panel1; panel += step) {
      const int widest = t1 - t0 < TILE ? float_panels(t1 - t0) : float_panels(TILE);
      step = panel + widest <= panel1 ? widest : 1;
      for (int t = t0; t < t1; t += TILE) {
        const int n = t1 - t < TILE ? t1 - t : TILE;
        for (int p = panel; p < panel + step;) {
          const bool together = p + float_panels(n) <= panel + step;
          (together ? tiles : single)[n - 1](a, p, t);
          p += together ? float_panels(n) : 1;
        }
      }
    }
  }
}
