// Norms, rotary embedding and activations of single rows. Each rounds to T where kernels/reference.py does.
#pragma once

#include <cmath>

#include "simd.h"

namespace vmp {

// Writes rms_norm(x) * weight to `out`, which may be `x`. With `rounds`, the normed values are rounded before the weight
// multiplies them.
template <class T>
inline void rms_norm(const T* x, const float* weight, int64_t dim, float eps, bool rounds, T* out) {
    vf squares = {};
    for (int64_t i = 0; i < dim; i += W) {
        vf value = load_some(x + i, int(std::min<int64_t>(W, dim - i)));
        squares += value * value;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
    for (int64_t i = 0; i < dim; i += W) {
        const int count = int(std::min<int64_t>(W, dim - i));
        const vf normed = load_some(x + i, count) * scale;
        store_some(out + i, (rounds ? rounded<T>(normed) : normed) * load_some(weight + i, count), count);
    }
}

// Adds `count` values times `multiplier` to `residual`, rounding the products and the sums.
template <class T>
inline void add_some(T* residual, vf values, float multiplier, int count) {
    if (multiplier != 1.0f) values = rounded<T>(values * multiplier);
    store_some(residual, load_some(residual, count) + values, count);
}

// Does the same for `count` values in two vectors.
template <class T>
inline void add_some(T* residual, vf first, vf second, float multiplier, int count) {
    if (count < 2 * W) {
        add_some(residual, first, multiplier, std::min(count, W));
        if (count > W) add_some(residual + W, second, multiplier, count - W);
        return;
    }
    if (multiplier != 1.0f) {
        first = rounded<T>(first * multiplier);
        second = rounded<T>(second * multiplier);
    }
    store(residual, load(residual) + first, load(residual + W) + second);
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
        constexpr vi even = LANES * 2, odd = even + 1;
        constexpr vi lows = vector_of<vi>([](int n) { return n / 2 + n % 2 * W; }), highs = lows + W / 2;
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

// The tanh approximation of GELU; (1 + tanh(y)) / 2 is the logistic function of 2y.
inline vf gelu_tanh(vf x) {
    const float twice_sqrt_2_over_pi = 1.5957691216f;
    return x / (1.0f + exp((x + 0.044715f * x * x * x) * -twice_sqrt_2_over_pi));
}

// Returns the product of the activated gate and up.
template <class T>
inline vf gated(vf gate, vf up, bool is_gelu) {
    gate = rounded<T>(gate);
    return rounded<T>(is_gelu ? gelu_tanh(gate) : silu(gate)) * rounded<T>(up);
}

}  // namespace vmp
