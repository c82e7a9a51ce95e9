// The innermost loops of products: a few rows, whose sums stay in registers, with panels of columns.
#pragma once

#include "linear.h"

namespace vmp {

// One or more panels in memory, `size` bytes each. A step is one 32-bit word of each row; `get` of any kind of panel
// returns the vectors that the columns have for a step.
struct Packed {
    const void* at;
    int64_t size = 0;

    template <int VECTORS>
    ALWAYS_INLINE void get(int64_t step, vi (&words)[VECTORS]) const {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            words[v] = read<vi>((const char*)at + v / 2 * size + step * STEP + v % 2 * (STEP / 2));
    }
};

// Stands for what is prefetched with each step where nothing is.
struct SoonNothing {
    ALWAYS_INLINE void ask() const {}
};

// Reads fewer than 2 * W values; the rest are zeros.
inline vu read_few(const bf16* p, int64_t count) {
    vu some = {};
    std::memcpy(&some, p, sizeof(bf16) * count);
    return some;
}

// Multiplies ROWS rows of x with the columns of `panel`, whose weights have the type of x, or int8 for rows of
// bytes. The sums are local variables until the end, or the compiler would keep them in memory.
template <int ROWS, int VECTORS, class Panel, class Ask>
inline void multiply(const float* x, int64_t stride, const Panel& panel, int64_t inputs, Ask soon,
                     vf (&out)[ROWS][VECTORS]) {
    vf c[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < inputs; ++k) {
        soon.ask();
        vi b[VECTORS];
        panel.get(k, b);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const vf a = splat(x[r * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) c[r][v] += a * (vf)b[v];
        }
    }
    std::memcpy(out, c, sizeof c);
}

template <int ROWS, int VECTORS, class Panel, class Ask>
inline void multiply(const bf16* x, int64_t stride, const Panel& panel, int64_t inputs, Ask soon,
                     vf (&out)[ROWS][VECTORS]) {
    vf c[ROWS][VECTORS] = {};
#if defined(__AVX512BF16__)
    for (int64_t k = 0; k < inputs; k += 2) {
        soon.ask();
        vi b[VECTORS];
        panel.get(k / 2, b);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            auto a = (__m512bh)_mm512_set1_epi32(read<int32_t>(x + r * stride + k));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                c[r][v] = (vf)_mm512_dpbf16_ps((__m512)c[r][v], a, (__m512bh)b[v]);
        }
    }
#else
    // The rows are converted to floats first, so many pairs at a time: where each is used would take longer than its
    // products.
    constexpr int64_t PAIRS = 64;
    alignas(64) float values[2][ROWS][PAIRS];  // the first of each pair, and the second
    for (int64_t first = 0; first < inputs / 2; first += PAIRS) {
        const int64_t pairs = std::min(PAIRS, inputs / 2 - first);
        for (int r = 0; r < ROWS; ++r) {
            const bf16* const row = x + r * stride + 2 * first;
            for (int64_t i = 0; i < pairs; i += W) {
                const vu both = i + W <= pairs ? read<vu>(row + 2 * i) : read_few(row + 2 * i, 2 * (pairs - i));
                for (int half = 0; half < 2; ++half) store(values[half][r] + i, half_of(both, half));
            }
        }
        for (int64_t i = 0; i < pairs; ++i) {
            soon.ask();
            vi b[VECTORS];
            panel.get(first + i, b);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                vf weights[VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) weights[v] = half_of((vu)b[v], half);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r) {
                    const vf a = splat(values[half][r][i]);
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; ++v) c[r][v] += a * weights[v];
                }
            }
        }
    }
#endif
    std::memcpy(out, c, sizeof c);
}

template <int ROWS, int VECTORS, class Panel, class Ask>
inline void multiply(const uint8_t* x, int64_t stride, const Panel& panel, int64_t inputs, Ask soon,
                     vi (&out)[ROWS][VECTORS]) {
    vi c[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < inputs; k += 4) {
        soon.ask();
        vi b[VECTORS];
        panel.get(k / 4, b);
#if defined(__AVX512VNNI__)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const auto a = _mm512_set1_epi32(read<int32_t>(x + r * stride + k));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) c[r][v] = (vi)_mm512_dpbusd_epi32((__m512i)c[r][v], a, (__m512i)b[v]);
        }
#elif VMP_SUMS_IN_16_BITS
        // The instruction takes one factor without a sign, so the other gets the sign of both. No weight and no value of
        // a row is -128, so the sum of two products fits into 16 bits.
        __m256i sizes[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sizes[v] = _mm256_abs_epi8((__m256i)b[v]);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const auto a = (__m256i)(vi{} + read<int32_t>(x + r * stride + k));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                const auto pairs = _mm256_maddubs_epi16(sizes[v], _mm256_sign_epi8(a, (__m256i)b[v]));
                c[r][v] += multiply_pairs((vs)pairs, vs{} + int16_t(1));
            }
        }
#else
        // The first and third of each four weights, and the second and fourth, widened to 16 bits.
        vs even[VECTORS], odd[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            even[v] = (vs)b[v] << 8 >> 8;
            odd[v] = (vs)b[v] >> 8;
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t four = read<uint32_t>(x + r * stride + k);
            const vs a0 = (vs)(vu{} + (four & 0x00ff00ff)), a1 = (vs)(vu{} + (four >> 8 & 0x00ff00ff));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) c[r][v] += multiply_pairs(a0, even[v]) + multiply_pairs(a1, odd[v]);
        }
#endif
    }
    std::memcpy(out, c, sizeof c);
}

// Multiplies `rows` rows, at most ROWS, and calls `take(row, vectors)` for each.
template <int ROWS, int VECTORS, class T, class Panel, class Ask, class Take>
inline void multiply_rows(int rows, const T* x, int64_t stride, const Panel& panel, int64_t inputs, Ask soon,
                          Take&& take) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return multiply_rows<ROWS - 1, VECTORS>(rows, x, stride, panel, inputs, soon, take);
        Sum<T> c[ROWS][VECTORS];
        multiply<ROWS, VECTORS>(x, stride, panel, inputs, soon, c);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) take(r, c[r]);
    }
}

// Does the same for `columns` columns, a multiple of NR: calls `take(row, column, vector)`. Few rows take more columns
// at once, as many as the registers allow, because their sums wait for one another. `panel_at(column)` begins at a
// column.
template <class T, class PanelAt, class Ask, class Take>
inline void multiply_few(int rows, const T* x, int64_t stride, PanelAt&& panel_at, int64_t columns, int64_t inputs,
                         Ask soon, Take&& take) {
    for (int64_t column = 0; column < columns;) {
        auto take_all = [&](int r, const auto& sums) {
            int64_t at = column;
            for (Sum<T> some : sums) {
                take(r, at, some);
                at += W;
            }
        };
        if (rows <= MR / 2 && column + 2 * NR <= columns) {
            multiply_rows<MR / 2, 4>(rows, x, stride, panel_at(column), inputs, soon, take_all);
            column += 2 * NR;
        } else {
            multiply_rows<MR, 2>(rows, x, stride, panel_at(column), inputs, soon, take_all);
            column += NR;
        }
    }
}

}  // namespace vmp
