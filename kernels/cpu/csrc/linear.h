// Products with a packed weight matrix.
//
// The outputs are cut into panels of NR columns. A panel holds, for each input (float32), two inputs (bfloat16) or four
// (int8), the weights of its columns side by side, so that a product reads the weights once, in order, for any batch.
// Each output is summed over the inputs in their order, in one accumulator, so results are batch-invariant.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace vmp {

// The columns of a panel, and the most rows whose sums stay in registers.
constexpr int NR = 2 * W;
#if defined(__AVX512F__)
constexpr int MR = 12;
#else
constexpr int MR = 6;
#endif

// The most rows that are multiplied with a panel at a time.
template <class T>
constexpr int MOST_ROWS = ON_TILES<T> ? BLOCK_ROWS : MR;

// The bytes of a panel that are multiplied with one 32-bit word of each row.
constexpr int64_t STEP = 4 * NR;

// The distance in bytes at which weights that are read once are prefetched.
constexpr int64_t AHEAD = 4096;

// Weights to prefetch while others are multiplied: from `at`, `stride` bytes further with each step.
struct Soon {
    const char* at;
    int64_t stride;

    void ask() {
        __builtin_prefetch(at);
        __builtin_prefetch(at + STEP / 2);
        at += stride;
    }

    // Does what so many steps do, with each cache line once.
    ALWAYS_INLINE void ask(int64_t steps) {
        const char* const end = at + steps * stride;
        for (const char* line = at; line < end; line += 64) __builtin_prefetch(line);
        at = end;
    }
};

// The number of inputs whose weights lie side by side.
template <class T>
constexpr int KP = 4 / sizeof(T);

// Rows to multiply and, for 8-bit weights, the same rows after `quantize`.
template <class T>
struct Rows {
    const T* values;
    const uint8_t* bytes;
    const float* scales;
    int64_t count;
};

template <class T>
struct ByteRows;

// A matrix in panels of NR columns; the vectors have an element for each column of the panels.
template <class T>
struct Linear {
    using Value = T;
    using Buffer = ByteRows<T>;

    const void* weight;
    const T* bias;        // or null
    const float* scales;  // the scale of each column's int8 weights; null for other types
    const int32_t* sums;  // the sum of each column's weights, times 128
    int64_t inputs;
    int64_t outputs;

    // Whether rows are quantized before they are multiplied.
    bool quantizes() const { return scales; }
    int64_t panels() const { return (outputs + NR - 1) / NR; }

    // Returns `count` rows of those to multiply with this matrix, from row `first` on.
    Rows<T> part(const Rows<T>& x, int64_t first, int64_t count) const {
        if (quantizes()) return {nullptr, x.bytes + first * inputs, x.scales + first, count};
        return {x.values + first * inputs, nullptr, nullptr, count};
    }

    template <class Weight>
    const Weight* panel(int64_t i) const {
        return (const Weight*)weight + i * NR * inputs;
    }
};

// The most values that are rotated together.
constexpr int64_t MOST_ROTATED = 512;

// The last steps of the Hadamard transform of a vector: sums and differences of elements whose places differ by HALF.
template <int HALF = 1>
ALWAYS_INLINE vf hadamard_lanes(vf x) {
    vi others;
    vf signs;
    for (int i = 0; i < W; ++i) {
        others[i] = i ^ HALF;
        signs[i] = i & HALF ? -1.0f : 1.0f;
    }
    x = __builtin_shuffle(x, others) + x * signs;
    if constexpr (2 * HALF < W) return hadamard_lanes<2 * HALF>(x);
    return x;
}

// Transforms each N vectors of `size` values that are `stride` values apart.
template <int N>
inline void hadamard_vectors(float* x, int64_t size, int64_t stride) {
    for (int64_t first = 0; first < size; first += N * stride)
        for (float* at = x + first; at < x + first + stride; at += W) {
            vf v[N];
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) v[i] = load(at + i * stride);
#pragma GCC unroll 3
            for (int half = 1; half < N; half *= 2)
#pragma GCC unroll 8
                for (int i = 0; i < N; ++i)
                    if (!(i & half)) {
                        const vf sum = v[i] + v[i + half], difference = v[i] - v[i + half];
                        v[i] = sum;
                        v[i + half] = difference;
                    }
#pragma GCC unroll 8
            for (int i = 0; i < N; ++i) store(at + i * stride, v[i]);
        }
}

// Multiplies `size` values with the Hadamard matrix over the root of its size, in place; `size` is a power of two from
// 16 to MOST_ROTATED.
inline void hadamard_block(float* x, int64_t size) {
    const vf unit = splat(1 / std::sqrt(float(size)));
#pragma GCC unroll 4
    for (int64_t i = 0; i < size; i += W) store(x + i, hadamard_lanes(load(x + i) * unit));
    int64_t stride = W;
    for (; 8 * stride <= size; stride *= 8) hadamard_vectors<8>(x, size, stride);
    if (4 * stride <= size)
        hadamard_vectors<4>(x, size, stride);
    else if (2 * stride <= size)
        hadamard_vectors<2>(x, size, stride);
}

// Rotates a row, in blocks as large as its length allows, as QuaRot does (Ashkboos et al. 2024): products of two rotated
// rows are those of the rows, and a value that is much larger than the others is spread over its block, so that the
// integers of 8 bits resolve the others too.
inline void hadamard(float* x, int64_t dim) {
    for (int64_t size = MOST_ROTATED; size >= 16; size /= 2)
        for (; dim >= size; x += size, dim -= size) hadamard_block(x, size);
}

// Rotates a row and quantizes it to integers of 8 bits, stored as bytes in which 128 stands for zero. Returns the scale;
// NaN if the row is not finite.
template <class T>
inline float quantize(const T* x, int64_t dim, uint8_t* bytes) {
    constexpr float MOST = 127;
    thread_local std::vector<float> rotated;
    rotated.resize(std::max<int64_t>(rotated.size(), dim + W));
    float* row = rotated.data();
    for (int64_t i = 0; i < dim; i += W) store(row + i, load_some(x + i, int(std::min<int64_t>(W, dim - i))));
    hadamard(row, dim);
    vf most = {};
    for (int64_t i = 0; i < dim; i += W) {
        const vf value = load(row + i), size = select(value < vf{}, -value, value);
        most = select((size > most) | (size != size), size, most);
    }
    const float bound = highest(most);
    if (!(bound < std::numeric_limits<float>::infinity())) {
        std::memset(bytes, 128, dim);
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float units = bound > 0 ? MOST / bound : 0;
    for (int64_t i = 0; i < dim; i += W) {
        // The offset makes the values positive, so that truncation rounds down.
        const vb wholes = __builtin_convertvector(__builtin_convertvector(load(row + i) * units + 128.5f, vi), vb);
        if (i + W <= dim)
            write(bytes + i, wholes);
        else
            std::memcpy(bytes + i, &wholes, dim - i);
    }
    return bound / MOST;
}

// Memory for quantized rows.
template <class T>
struct ByteRows {
    std::vector<uint8_t> bytes;
    std::vector<float> scales;

    void fit(int64_t rows, int64_t most_inputs) {
        bytes.resize(rows * most_inputs);
        scales.resize(rows);
    }

    void quantize_row(const T* x, int64_t inputs, int64_t row) {
        scales[row] = quantize(x, inputs, bytes.data() + row * inputs);
    }

    // Copies a quantized row of `x`.
    void copy_row(const Rows<T>& x, int64_t from, int64_t inputs, int64_t row) {
        std::memcpy(bytes.data() + row * inputs, x.bytes + from * inputs, inputs);
        scales[row] = x.scales[from];
    }

    Rows<T> rows(const T* x, int64_t count) const { return {x, bytes.data(), scales.data(), count}; }
};

// Packs a panel; `columns` points to the weights of each column, or is null for a column that only fills the panel.
template <class T>
inline void pack_panel(const T* const columns[NR], int64_t inputs, T* panel) {
    for (int64_t k = 0; k < inputs; k += KP<T>)
        for (int n = 0; n < NR; ++n)
            for (int i = 0; i < KP<T>; ++i) *panel++ = columns[n] ? columns[n][k + i] : T{};
}

// Does the same with rotation and quantization to int8; writes the scale of each column and 128 times the sum of its
// weights.
template <class T>
inline void pack_panel(const T* const columns[NR], int64_t inputs, int8_t* panel, float* scales, int32_t* sums) {
    std::vector<float> column(inputs);
    for (int n = 0; n < NR; ++n) {
        for (int64_t k = 0; k < inputs; ++k) column[k] = columns[n] ? to_float(columns[n][k]) : 0;
        hadamard(column.data(), inputs);
        float bound = 0;
        for (float weight : column) bound = std::max(bound, std::fabs(weight));
        scales[n] = bound / 127;
        sums[n] = 0;
        const float units = bound > 0 ? 127 / bound : 0;
        for (int64_t k = 0; k < inputs; ++k) {
            const int8_t whole = int8_t(std::lrint(column[k] * units));
            panel[(k / 4 * NR + n) * 4 + k % 4] = whole;
            sums[n] += 128 * whole;
        }
    }
}

template <class T>
using Sum = std::conditional_t<std::is_same_v<T, uint8_t>, vi, vf>;

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
    for (int64_t k = 0; k < inputs; k += 2) {
        soon.ask();
        vi b[VECTORS];
        panel.get(k / 2, b);
#if defined(__AVX512BF16__)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            auto a = (__m512bh)_mm512_set1_epi32(read<int32_t>(x + r * stride + k));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                c[r][v] = (vf)_mm512_dpbf16_ps((__m512)c[r][v], a, (__m512bh)b[v]);
        }
#else
        vf even[VECTORS], odd[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            even[v] = (vf)(b[v] << 16);
            odd[v] = (vf)((vu)b[v] & 0xffff0000u);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const vf a0 = splat(to_float(x[r * stride + k])), a1 = splat(to_float(x[r * stride + k + 1]));
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) c[r][v] = c[r][v] + a0 * even[v] + a1 * odd[v];
        }
#endif
    }
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

// Does the same for one panel and any number of rows, in blocks of about the same height. With more than one block, the
// later blocks read the weights from a cache, and meanwhile the next panel is prefetched.
template <class T, class Weight, class Take>
inline void multiply_panel(int64_t rows, const T* x, int64_t stride, const Weight* panel, int64_t inputs, Take&& take) {
    const int64_t blocks = (rows + MOST_ROWS<T> - 1) / MOST_ROWS<T>;
    const char* bytes = (const char*)panel;
    const int64_t size = inputs * NR * int64_t(sizeof(Weight));
    for (int64_t i = 0, row = 0; i < blocks; ++i) {
        const int64_t end = rows * (i + 1) / blocks;
        Soon soon = blocks > 1 ? Soon{bytes + size + size * i / blocks, (STEP + blocks - 1) / blocks}
                               : Soon{bytes + AHEAD, STEP};
        auto take_row = [&](int r, const Sum<T>(&sums)[2]) { take(row + r, sums[0], sums[1]); };
        if constexpr (ON_TILES<T>) {
            Sum<T> sums[BLOCK_ROWS][2];
            multiply_block(int(end - row), x + row * stride, stride, panel, inputs, soon, sums, NR, false);
            for (int r = 0; r < end - row; ++r) take_row(r, sums[r]);
        } else {
            multiply_rows<MR, 2>(int(end - row), x + row * stride, stride, Packed{panel}, inputs, soon, take_row);
        }
        row = end;
    }
}

// Multiplies all rows with panel `i` and adds the bias: calls `take(row, first, second)` with the panel's two vectors.
template <class T, class Take>
inline void products(const Linear<T>& w, int64_t i, const Rows<T>& x, Take&& take) {
    vf bias0 = {}, bias1 = {};
    if (w.bias) {
        bias0 = load(w.bias + i * NR);
        bias1 = load(w.bias + i * NR + W);
    }
    if (w.scales) {
        const vf scale0 = load(w.scales + i * NR), scale1 = load(w.scales + i * NR + W);
        const vi sum0 = read<vi>(w.sums + i * NR), sum1 = read<vi>(w.sums + i * NR + W);
        multiply_panel(x.count, x.bytes, w.inputs, w.template panel<int8_t>(i), w.inputs,
                       [&](int64_t row, vi first, vi second) {
                           const vf scale = splat(x.scales[row]);
                           take(row, __builtin_convertvector(first - sum0, vf) * (scale0 * scale) + bias0,
                                __builtin_convertvector(second - sum1, vf) * (scale1 * scale) + bias1);
                       });
    } else {
        multiply_panel(x.count, x.values, w.inputs, w.template panel<T>(i), w.inputs,
                       [&](int64_t row, vf first, vf second) { take(row, first + bias0, second + bias1); });
    }
}

// Calls `f(i)` for each panel. With several blocks of rows, a thread keeps to a range of its own, so that it prefetches
// its own next panel.
template <class T, class F>
inline void each_panel(Member& member, const Linear<T>& w, int64_t rows, F&& f) {
    if (rows > (w.scales ? MOST_ROWS<uint8_t> : MOST_ROWS<T>))
        member.each(w.panels(), f);
    else
        member.each_guided(w.panels(), f);
}

}  // namespace vmp
