// Norms, rotary embedding and activations of single rows. Each rounds to T where kernels/reference.py does.
#pragma once

#include <cmath>

#include "simd.h"

namespace vmp {

// Writes rms_norm(x) * weight to `out`, which may be `x`.
template <class T>
inline void rms_norm(const T* x, const T* weight, int64_t dim, float eps, T* out) {
    vf squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vf value = load_some(x + i, int(std::min<int64_t>(W, dim - i)));
        squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    for (int64_t i = 0; i < dim; i += W) {
        const int count = int(std::min<int64_t>(W, dim - i));
        store_some(out + i, rounded<T>(load_some(x + i, count) * scale) * load_some(weight + i, count), count);
    }
}

template <class T>
inline void add(T* residual, const T* x, int64_t dim) {
    for (int64_t i = 0; i < dim; i += W) {
        const int count = int(std::min<int64_t>(W, dim - i));
        store_some(residual + i, load_some(residual + i, count) + load_some(x + i, count), count);
    }
}

// Rotates one head in place; `cos_sin` has the cosines of the dim / 2 frequencies, then the sines.
template <class T>
inline void rotate(T* head, const T* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += W) {
        const int count = int(std::min<int64_t>(W, half - i));
        vf cos = load_some(cos_sin + i, count), sin = load_some(cos_sin + half + i, count);
        vf low = load_some(head + i, count), high = load_some(head + half + i, count);
        store_some(head + i, rounded<T>(low * cos) - rounded<T>(high * sin), count);
        store_some(head + half + i, rounded<T>(high * cos) + rounded<T>(low * sin), count);
    }
}

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

}  // namespace vmp
