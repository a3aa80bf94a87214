// Row-wise ops: norms, activations, rotary embedding, softmax statistics.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace mill::TM_NS {

static void rms_norm(const float* x, const float* weight, float* out, int dim, int group, float eps) {
  for (int g = 0; g < dim; g += group) {
    vf sum = splat(0.0f);
    vectors(group, [&](size_t i, int n) {
      vf v = load_n(x + g + i, n);
      sum = fma(v, v, sum);
    });
    vf scale = splat(1.0f / std::sqrt(reduce_add(sum) / float(group) + eps));
    vectors(group, [&](size_t i, int n) {
      store_n(out + g + i, mul(mul(load_n(x + g + i, n), scale), load_n(weight + i, n)), n);
    });
  }
}

static void add_rows(const float* x, const float* y, float* out, size_t n) {
  vectors(n, [&](size_t i, int m) { store_n(out + i, add(load_n(x + i, m), load_n(y + i, m)), m); });
}

static TM_INLINE vf silu(vf g) { return div(g, add(splat(1.0f), vexp(sub(splat(0.0f), g)))); }

static TM_INLINE vf gelu_tanh(vf g) {
  vf y = mul(splat(0.7978845608028654f), mul(g, fma(mul(g, g), splat(0.044715f), splat(1.0f))));
  // 0.5 (1 + tanh y) = 1 / (1 + e^-2y)
  return div(g, add(splat(1.0f), vexp(mul(y, splat(-2.0f)))));
}

static TM_INLINE vf gelu_erf(vf g) {
  float t[W];
  store(t, g);
  for (int i = 0; i < W; i++) t[i] = 0.5f * t[i] * (1.0f + std::erf(t[i] * 0.70710678118654752f));
  return load(t);
}

// act: 0 silu, 1 gelu, 2 gelu_tanh, as in program/ops.py
static void act_mul(const float* gate, const float* up, float* out, size_t n, int act) {
  vectors(n, [&](size_t i, int m) {
    vf g = load_n(gate + i, m);
    vf a = act == 0 ? silu(g) : act == 1 ? gelu_erf(g) : gelu_tanh(g);
    store_n(out + i, mul(a, load_n(up + i, m)), m);
  });
}

static void rope(const float* x, float* out, const float* cos, const float* sin, int heads, int head_dim, int half) {
  for (int h = 0; h < heads; h++, x += head_dim, out += head_dim) {
    vectors(half, [&](size_t i, int n) {
      vf a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
      vf first = sub(mul(a, c), mul(b, s)), second = add(mul(b, c), mul(a, s));
      store_n(out + i, first, n);
      store_n(out + half + i, second, n);
    });
    if (out != x) std::memcpy(out + 2 * half, x + 2 * half, (head_dim - 2 * half) * sizeof(float));
  }
}

// The maximum; not a number if any element is infinite or not a number.
static float max_finite(const float* x, int n) {
  vf m = splat(-__builtin_inff()), poison = splat(0.0f);
  vectors(n, [&](size_t i, int k) {
    vf v = load_n(x + i, k, x[i]);
    m = vmax(m, v);
    poison = fma(splat(0.0f), v, poison);
  });
  return reduce_max(m) + reduce_add(poison);
}

static float max_of(const float* x, int n) {
  vf m = splat(-__builtin_inff());
  vectors(n, [&](size_t i, int k) { m = vmax(m, load_n(x + i, k, x[i])); });
  return reduce_max(m);
}

// sum exp(x - max), lanes in f32 over 512 elements at a time, those in f64
static double sum_exp(const float* x, int n, float max) {
  vf neg = splat(-max);
  double total = 0;
  for (int start = 0; start < n; start += 512) {
    vf part = splat(0.0f);
    vectors(n - start < 512 ? n - start : 512,
            [&](size_t i, int k) { part = add(part, vexp(add(load_n(x + start + i, k, -__builtin_inff()), neg))); });
    total += reduce_add(part);
  }
  return total;
}

// w = e^((x - max) / temperature) in f64, to a few ulp; 0 below e^-700. Written for the compiler to vectorise.
static void weights(const float* x, int n, float max, double temperature, double* w) {
  const double log2e = 1.4426950408889634074, ln2_hi = 6.93145751953125e-1, ln2_lo = 1.42860682030941723212e-6;
  const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer kept in the low bits
  for (int i = 0; i < n; i++) {
    double y = (double(x[i]) - double(max)) / temperature;
    double c = y < -700.0 ? -700.0 : y;
    double t = c * log2e + shift, k = t - shift;
    double r = (c - k * ln2_hi) - k * ln2_lo;
    double p = 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    int64_t bits;
    std::memcpy(&bits, &t, 8);
    bits = (bits + 1023) << 52;
    double scale;
    std::memcpy(&scale, &bits, 8);
    w[i] = y < -700.0 ? 0.0 : p * scale;
  }
}

}  // namespace mill::TM_NS
