// Products with a weight matrix that was packed beforehand.
//
// The outputs are cut into panels of NR columns. A panel holds, for each pair of inputs (each input, in float32), the
// weights of its columns side by side, so that a product reads the weights once, in order, whatever the batch. Each
// output is summed over the inputs in their order, in one accumulator: a row's result is the same in any company.
#pragma once

#include <algorithm>

#include "simd.h"

namespace vmp {

constexpr int NR = 2 * W;
#if defined(__AVX512F__)
constexpr int MR = 12;
#else
constexpr int MR = 6;
#endif

// Weights that are read once are asked for so many before they are needed.
constexpr int64_t AHEAD = 2048;
// Panels that a thread takes at a time: a thread that loses its processor for a while leaves the rest to the others.
constexpr int PANELS = 2;

// Inputs whose weights lie side by side.
template <class T>
constexpr int KP = std::is_same_v<T, bf16> ? 2 : 1;

template <class T>
struct Linear {
    const T* weight;  // packed
    const T* bias;    // [outputs] in the order of the panels, or null
    int64_t inputs;
    int64_t outputs;

    int64_t panels() const { return (outputs + NR - 1) / NR; }
    const T* panel(int64_t i) const { return weight + i * NR * inputs; }
};

// Panel of the columns whose weights, or null for columns that are only there to fill it, begin at `columns`.
template <class T>
inline void pack_panel(const T* const columns[NR], int64_t inputs, T* panel) {
    for (int64_t k = 0; k < inputs; k += KP<T>)
        for (int n = 0; n < NR; ++n)
            for (int i = 0; i < KP<T>; ++i) *panel++ = columns[n] ? columns[n][k + i] : T{};
}

// c += (rows of x) * panel, over `inputs` inputs; the two vectors of each row are the columns of the panel.
template <int ROWS>
inline void multiply(const float* x, int64_t stride, const float* panel, int64_t inputs, int64_t ahead,
                     vf (&c)[ROWS][2]) {
    for (int64_t k = 0; k < inputs; ++k, panel += NR) {
        __builtin_prefetch(panel + ahead);
        __builtin_prefetch(panel + ahead + W);
        vf b0 = load(panel), b1 = load(panel + W);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            vf a = splat(x[r * stride + k]);
            c[r][0] += a * b0;
            c[r][1] += a * b1;
        }
    }
}

template <int ROWS>
inline void multiply(const bf16* x, int64_t stride, const bf16* panel, int64_t inputs, int64_t ahead,
                     vf (&c)[ROWS][2]) {
    for (int64_t k = 0; k < inputs; k += 2, panel += 2 * NR) {
#if defined(__AVX512BF16__)
        auto b0 = (__m512bh)_mm512_loadu_si512(panel), b1 = (__m512bh)_mm512_loadu_si512(panel + NR);
        __builtin_prefetch(panel + ahead);
        __builtin_prefetch(panel + ahead + NR);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            auto a = (__m512bh)_mm512_set1_epi32(read<int32_t>(x + r * stride + k));
            c[r][0] = (vf)_mm512_dpbf16_ps((__m512)c[r][0], a, b0);
            c[r][1] = (vf)_mm512_dpbf16_ps((__m512)c[r][1], a, b1);
        }
#else
        vu pairs0 = read<vu>(panel), pairs1 = read<vu>(panel + NR);
        vf even0 = (vf)(pairs0 << 16), odd0 = (vf)(pairs0 & 0xffff0000u);
        vf even1 = (vf)(pairs1 << 16), odd1 = (vf)(pairs1 & 0xffff0000u);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            vf a0 = splat(to_float(x[r * stride + k])), a1 = splat(to_float(x[r * stride + k + 1]));
            c[r][0] = c[r][0] + a0 * even0 + a1 * odd0;
            c[r][1] = c[r][1] + a0 * even1 + a1 * odd1;
        }
#endif
    }
}

// Multiplies `rows` rows with a panel and gives each row's two vectors to `take(row, first, second)`.
template <int ROWS = MR, class T, class Take>
inline void multiply_rows(int rows, const T* x, int64_t stride, const T* panel, int64_t inputs, int64_t ahead,
                          Take&& take) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, x, stride, panel, inputs, ahead, take);
        vf c[ROWS][2] = {};
        multiply<ROWS>(x, stride, panel, inputs, ahead, c);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) take(r, c[r][0], c[r][1]);
    }
}

// The same for any number of rows, in tiles of about the same height.
template <class T, class Take>
inline void multiply_panel(int64_t rows, const T* x, int64_t stride, const T* panel, int64_t inputs, Take&& take) {
    const int64_t tiles = (rows + MR - 1) / MR;
    for (int64_t i = 0, row = 0; i < tiles; ++i) {
        const int64_t end = rows * (i + 1) / tiles;
        const int64_t ahead = i + 1 < tiles ? 0 : tiles > 1 ? inputs * NR : AHEAD;
        multiply_rows(int(end - row), x + row * stride, stride, panel, inputs, ahead,
                      [&](int r, vf first, vf second) { take(row + r, first, second); });
        row = end;
    }
}

// What becomes of the sums of panel `i`: `put(row, column, vector, count)` for each vector of a row, the bias added.
template <class T, class Put>
inline void apply(const Linear<T>& w, int64_t i, int64_t rows, const T* x, int64_t stride, Put&& put) {
    const int64_t column = i * NR;
    const int count0 = int(std::min<int64_t>(W, w.outputs - column));
    const int count1 = int(std::min<int64_t>(W, w.outputs - column - W));
    vf bias0 = {}, bias1 = {};
    if (w.bias) {
        bias0 = load_some(w.bias + column, count0);
        if (count1 > 0) bias1 = load_some(w.bias + column + W, count1);
    }
    multiply_panel(rows, x, stride, w.panel(i), w.inputs, [&](int64_t row, vf first, vf second) {
        put(row, column, first + bias0, count0);
        if (count1 > 0) put(row, column + W, second + bias1, count1);
    });
}

}  // namespace vmp
