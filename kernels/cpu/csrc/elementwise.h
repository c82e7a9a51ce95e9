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

// Does the same with neighbouring elements, as files in GGUF order them: element 2 i is rotated with element 2 i + 1.
template <class T>
inline void rotate_pairs(T* head, const T* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vi even, odd, lows, highs;
        for (int n = 0; n < W; ++n) {
            even[n] = 2 * n;
            odd[n] = 2 * n + 1;
            lows[n] = n / 2 + n % 2 * W;
            highs[n] = n / 2 + n % 2 * W + W / 2;
        }
        const vf cos = load(cos_sin + i), sin = load(cos_sin + half + i);
        const vf first = load(head + 2 * i), second = load(head + 2 * i + W);
        const vf x = __builtin_shuffle(first, second, even), y = __builtin_shuffle(first, second, odd);
        const vf new_x = rounded<T>(x * cos) - rounded<T>(y * sin), new_y = rounded<T>(y * cos) + rounded<T>(x * sin);
        store(head + 2 * i, __builtin_shuffle(new_x, new_y, lows));
        store(head + 2 * i + W, __builtin_shuffle(new_x, new_y, highs));
    }
    for (; i < half; ++i) {
        auto product = [](T a, T b) { return to_float(from_float<T>(to_float(a) * to_float(b))); };
        const T x = head[2 * i], y = head[2 * i + 1], cos = cos_sin[i], sin = cos_sin[half + i];
        head[2 * i] = from_float<T>(product(x, cos) - product(y, sin));
        head[2 * i + 1] = from_float<T>(product(y, cos) + product(x, sin));
    }
}

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

}  // namespace vmp
