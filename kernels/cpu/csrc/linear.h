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

#include "huge_vector.h"
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

// Whether rows of T are converted to floats, side by side, where they are multiplied.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool CONVERTS_ROWS = false;
#else
template <class T>
constexpr bool CONVERTS_ROWS = std::is_same_v<T, bf16>;
#endif

// Whether many rows of T are converted to floats in advance, once for all panels, and a panel once for all rows: with 16
// registers that takes less time than to convert both where they are multiplied.
template <class T>
constexpr bool WIDENS = CONVERTS_ROWS<T> && W < 16;

// The most rows that are converted where they are multiplied: with 16 registers, the compiler keeps sums of a sixth row in
// memory.
constexpr int MOST_CONVERTED = W < 16 ? 5 : MR;

// The most rows that are multiplied with a panel at a time: if these are all rows, and if there are more. More than 8
// rows need more addresses than there are registers, and the L1 cache keeps 8 lines of the same part of a page; rows that
// are converted lie side by side instead. But up to 12 rows in bfloat16 wait for the memory, and so take less time than
// two reads of the panel.
template <class T>
constexpr int MOST_ROWS = ON_TILES<T>                   ? BLOCK_ROWS
                          : CONVERTS_ROWS<T>            ? MOST_CONVERTED
                          : std::is_same_v<T, uint8_t> ? std::min(MR, 8)
                                                       : MR;
template <class T>
constexpr int MOST_OF_MANY = ON_TILES<T> ? BLOCK_ROWS : CONVERTS_ROWS<T> ? MOST_CONVERTED : std::min(MR, 8);

// The bytes of a panel that are multiplied with one 32-bit word of each row.
constexpr int64_t STEP = 4 * NR;

// The distance in bytes at which weights that are read once are prefetched, and so what is prefetched of a panel that does
// not lie behind the last one.
constexpr int64_t AHEAD = 4096;

// The panel that a thread is expected to multiply after another one.
template <class Weight>
struct Next {
    const Weight* matrix;
    int64_t panel;
};

// With at least this many blocks of rows, the next panel is prefetched before each block instead of with each step, where
// steps are so short that a prefetch makes them up to 1.5 times as long.
constexpr int64_t MANY_BLOCKS = 6;
constexpr bool HAS_MANY_BLOCKS = W < 16;

// The least number of rows that are converted to floats in advance: as floats they are at least MANY_BLOCKS blocks.
constexpr int64_t WIDE_ROWS = (MANY_BLOCKS - 1) * MR + 1;

// Weights to prefetch while others are multiplied: from `at`, `stride` bytes further with each step, at most STEP; none if
// `stride` is 0.
struct Soon {
    const char* at = nullptr;
    int64_t stride = 0;

    // To the L2 cache.
    ALWAYS_INLINE void ask() {
        prefetch_here(at);
        if (stride > 64) prefetch_here(at + 64);
        at += stride;
    }

    // To the L1 cache.
    ALWAYS_INLINE void ask_closer() {
        __builtin_prefetch(at);
        if (stride > 64) __builtin_prefetch(at + 64);
        at += stride;
    }

    // Does what so many steps do, with each cache line once.
    ALWAYS_INLINE void ask(int64_t steps) {
        const char* const end = at + steps * stride;
        for (const char* line = at; line < end; line += 64) prefetch_here(line);
        at = end;
    }
};

// The byte that stands for zero in quantized rows, which have signed bytes where 16 bits must hold the sum of two products.
constexpr int ZERO_BYTE = VMP_SUMS_IN_16_BITS ? 0 : 128;

// The number of inputs whose weights lie side by side.
template <class T>
constexpr int KP = 4 / sizeof(T);

// Rows to multiply and, if the product converts them, the same rows quantized or as floats.
template <class T>
struct Rows {
    const T* values;
    const uint8_t* bytes;
    const float* scales;
    int64_t count;
    const float* floats = nullptr;
};

template <class T>
struct ConvertedRows;

// A matrix in panels of NR columns; the vectors have an element for each column of the panels.
template <class T>
struct Linear {
    using Value = T;
    using Buffer = ConvertedRows<T>;
    using Rows = vmp::Rows<T>;

    const void* weight;
    const T* bias;        // or null
    const float* scales;  // the scale of each column's int8 weights; null for other types
    const int32_t* sums;  // the sum of each column's weights, times 128
    int64_t inputs;
    int64_t outputs;

    // Whether rows are quantized before they are multiplied.
    bool quantizes() const { return scales; }
    // Whether so many rows are quantized or converted to floats before they are multiplied.
    bool converts(int64_t rows) const { return quantizes() || (WIDENS<T> && rows >= WIDE_ROWS); }
    int64_t panels() const { return (outputs + NR - 1) / NR; }

    void convert_row(Buffer& buffer, const T* x, int64_t row) const {
        quantizes() ? buffer.quantize_row(x, inputs, row) : buffer.widen_row(x, inputs, row);
    }

    // Returns `count` rows to multiply with this matrix, which `buffer` has converted if they must be.
    Rows rows(const Buffer& buffer, const T* x, int64_t count) const {
        Rows all = buffer.rows(x, count);
        if (!quantizes() && converts(count)) all.floats = buffer.floats.data();
        return all;
    }

    // Returns `count` rows of those to multiply with this matrix, from row `first` on.
    Rows part(const Rows& x, int64_t first, int64_t count) const {
        const int64_t from = first * inputs;
        if (quantizes()) return {nullptr, x.bytes + from, x.scales + first, count};
        return {x.values + from, nullptr, nullptr, count, x.floats ? x.floats + from : nullptr};
    }

    template <class Weight>
    const Weight* panel(int64_t i) const {
        return (const Weight*)weight + i * NR * inputs;
    }

    const void* address_of_panel(int64_t i) const { return quantizes() ? (const void*)panel<int8_t>(i) : panel<T>(i); }
};

// The most values that are rotated together.
constexpr int64_t MOST_ROTATED = 512;

// The last steps of the Hadamard transform of a vector: sums and differences of elements whose indices differ by HALF.
template <int HALF = 1>
ALWAYS_INLINE vf hadamard_lanes(vf x) {
    constexpr vi others = vector_of<vi>([](int i) { return i ^ HALF; });
    constexpr vf signs = vector_of<vf>([](int i) { return i & HALF ? -1.0f : 1.0f; });
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

// Rotates a row and quantizes it to integers of 8 bits, from -127 to 127, stored as bytes in which ZERO_BYTE stands for
// zero. Returns the scale; NaN if the row is not finite.
template <class T>
inline float quantize(const T* x, int64_t dim, uint8_t* bytes) {
    constexpr float MOST = 127;
    thread_local std::vector<float> rotated;
    fit(rotated, dim + W);
    float* row = rotated.data();
    for (int64_t i = 0; i < dim; i += W) store(row + i, load_some(x + i, int(std::min<int64_t>(W, dim - i))));
    hadamard(row, dim);
    vi most = {};
    for (int64_t i = 0; i < dim; i += W) most = larger(most, sizes_of(load(row + i)));
    const float bound = largest(most);
    if (!(bound < std::numeric_limits<float>::infinity())) {
        std::memset(bytes, ZERO_BYTE, dim);
        return std::numeric_limits<float>::quiet_NaN();
    }
    const float units = bound > 0 ? MOST / bound : 0;
    auto wholes = [&](int64_t i) {
        // The offset makes the values positive, so that truncation rounds down.
        const vi positive = __builtin_convertvector(load(row + i) * units + 128.5f, vi);
        return __builtin_convertvector(positive + (ZERO_BYTE - 128), vb);
    };
    int64_t i = 0;
    for (; i + W <= dim; i += W) write(bytes + i, wholes(i));
    if (i < dim) {
        const vb some = wholes(i);
        std::memcpy(bytes + i, &some, dim - i);
    }
    return bound / MOST;
}

// Memory for rows that are quantized or converted to floats.
template <class T>
struct ConvertedRows {
    HugeVector<uint8_t> bytes;
    std::vector<float> scales;
    HugeVector<float> floats;

    void fit(int64_t rows, int64_t most_inputs, bool quantizes) {
        if (!quantizes) return vmp::fit(floats, rows * most_inputs);
        vmp::fit(bytes, rows * most_inputs);
        vmp::fit(scales, rows);
    }

    void widen_row(const T* x, int64_t inputs, int64_t row) { convert(x, inputs, floats.data() + row * inputs); }

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

// The type of a sum of products with rows of T, and of a vector of such sums.
template <class T>
using Element = std::conditional_t<std::is_same_v<T, uint8_t>, int32_t, float>;
template <class T>
using Sum = std::conditional_t<std::is_same_v<T, uint8_t>, vi, vf>;

// Multiplies `rows` rows, at most MOST_ROWS<T>, with a panel. Writes the NR sums of each row to `out`, `out_stride`
// elements apart, or adds them to those in `out` if `adds`. Not inlined: the code for every number of rows is large, and
// would be compiled again for each use of the sums.
template <class T>
void multiply_some(int rows, const T* x, int64_t stride, const void* panel, int64_t inputs, Soon soon, Element<T>* out,
                   int64_t out_stride, bool adds);

// Divides any number of rows into blocks of about the same height for `multiply_some`: calls `f(first, end, soon)` for
// each. With more than one block, the later blocks read the weights from a cache, and meanwhile the panel that comes
// `next` is prefetched.
template <class T, class F>
inline void each_block(int64_t rows, const void* panel, int64_t panel_bytes, const void* next, F&& f) {
    const int64_t most = rows > MOST_ROWS<T> ? MOST_OF_MANY<T> : MOST_ROWS<T>;
    const int64_t blocks = (rows + most - 1) / most;
    const char *bytes = (const char*)panel, *next_bytes = (const char*)next;
    for (int64_t i = 0, row = 0; i < blocks; ++i) {
        const int64_t end = rows * (i + 1) / blocks, from = panel_bytes * i / blocks;
        if (blocks == 1) {
            f(row, end, Soon{bytes + AHEAD, STEP});
        } else if (HAS_MANY_BLOCKS && blocks >= MANY_BLOCKS) {
            prefetch_all(next_bytes + from, panel_bytes * (i + 1) / blocks - from);
            f(row, end, Soon{});
        } else {
            f(row, end, Soon{next_bytes + from, (STEP + blocks - 1) / blocks});
        }
        row = end;
    }
    if (blocks == 1 && next_bytes != bytes + panel_bytes) prefetch_all(next, AHEAD);
}

// The sums of a block of rows that are not taken yet.
template <class T, class Take>
struct SumsToTake {
    Take& take;
    const Sum<T> (*sums)[2] = nullptr;  // of the rows from `at` on
    int64_t at = 0, end = 0;

    ALWAYS_INLINE void take_rows(int64_t count) {
        for (const int64_t until = std::min(end, at + count); at < until; ++at, ++sums) take(at, (*sums)[0], (*sums)[1]);
    }
};

// What is done while a block of rows is multiplied on tiles: the panel that comes next is prefetched, and the sums of the
// block before are taken, some rows with each step, because the processor computes with vectors and tiles at the same time.
template <class T, class Take>
struct Meanwhile {
    Soon soon;
    SumsToTake<T, Take>& before;
    int64_t rows_a_step;

    ALWAYS_INLINE void ask(int64_t words) {
        soon.ask(words);
        before.take_rows(rows_a_step);
    }
};

// Does what `multiply_panel` does, on tiles.
template <class T, class Take>
inline void multiply_on_tiles(int64_t rows, const T* x, int64_t stride, const void* panel, int64_t inputs,
                              const void* next, Take& take) {
    const int64_t steps = std::max<int64_t>(1, inputs / (TILE_BYTES / int64_t(sizeof(T))));
    Sum<T> sums[2][BLOCK_ROWS][2];  // of two blocks in turns
    SumsToTake<T, Take> before{take};
    int turn = 0;
    each_block<T>(rows, panel, inputs * NR * int64_t(sizeof(T)), next, [&](int64_t first, int64_t end, Soon soon) {
        Meanwhile<T, Take> meanwhile{soon, before, (BLOCK_ROWS + steps - 1) / steps};
        multiply_block(int(end - first), x + first * stride, stride, panel, inputs, meanwhile, sums[turn], NR, false);
        before.take_rows(BLOCK_ROWS);
        before.sums = sums[turn];
        before.at = first;
        before.end = end;
        turn = !turn;
    });
    before.take_rows(BLOCK_ROWS);
}

// Multiplies any number of rows with a panel: calls `take(row, first, second)` with the two vectors of each row. The
// panel that comes `next` has elements of type Stored.
template <class Stored, class T, class Weight, class Take>
inline void multiply_panel(int64_t rows, const T* x, int64_t stride, const Weight* panel, int64_t inputs,
                           const void* next, Take&& take) {
    if constexpr (ON_TILES<T>) {
        multiply_on_tiles(rows, x, stride, panel, inputs, next, take);
    } else {
        const int64_t panel_bytes = inputs * NR * int64_t(sizeof(Stored));
        each_block<T>(rows, panel, panel_bytes, next, [&](int64_t first, int64_t end, Soon soon) {
            Sum<T> sums[MOST_ROWS<T>][2];
            multiply_some(int(end - first), x + first * stride, stride, panel, inputs, soon, (Element<T>*)sums, NR, false);
            for (int64_t r = first; r < end; ++r) take(r, sums[r - first][0], sums[r - first][1]);
        });
    }
}

// Multiplies any number of rows of T with a panel, and writes or adds the sums as `multiply_some` does.
template <class T>
inline void multiply_into(int64_t rows, const T* x, int64_t stride, const T* panel, int64_t inputs, float* out,
                          int64_t out_stride, bool adds) {
    const int64_t panel_bytes = inputs * NR * int64_t(sizeof(T));
    each_block<T>(rows, panel, panel_bytes, (const char*)panel + panel_bytes, [&](int64_t first, int64_t end, Soon soon) {
        multiply_some(int(end - first), x + first * stride, stride, panel, inputs, soon, out + first * out_stride,
                      out_stride, adds);
    });
}

// Returns a panel of weights in bfloat16 as floats, in memory of the calling thread.
inline const float* widened_panel(const bf16* panel, int64_t inputs) {
    thread_local HugeVector<float> floats;
    fit(floats, inputs * NR);
    float* out = floats.data();
    for (int64_t k = 0; k < inputs; k += 2, panel += 2 * NR, out += 2 * NR)
        for (int half = 0; half < 2; ++half)
            for (int v = 0; v < 2; ++v) store(out + half * NR + v * W, half_of(read<vu>(panel + v * 2 * W), half));
    return floats.data();
}

// Multiplies all rows with panel `i` and adds the bias: calls `take(row, first, second)` with the panel's two vectors.
// Meanwhile the panel that comes `next` is prefetched, or its beginning.
template <class T, class Take>
inline void products(const Linear<T>& w, int64_t i, const Next<Linear<T>>& next, const Rows<T>& x, Take&& take) {
    vf bias0 = {}, bias1 = {};
    if (w.bias) {
        bias0 = load(w.bias + i * NR);
        bias1 = load(w.bias + i * NR + W);
    }
    const void* const after = next.matrix->address_of_panel(next.panel);
    if (w.scales) {
        const vf scale0 = load(w.scales + i * NR), scale1 = load(w.scales + i * NR + W);
        vi sum0 = {}, sum1 = {};
        if constexpr (ZERO_BYTE) {
            sum0 = read<vi>(w.sums + i * NR);
            sum1 = read<vi>(w.sums + i * NR + W);
        }
        multiply_panel<int8_t>(x.count, x.bytes, w.inputs, w.template panel<int8_t>(i), w.inputs, after,
                               [&](int64_t row, vi first, vi second) {
                                   const vf scale = splat(x.scales[row]);
                                   take(row, __builtin_convertvector(first - sum0, vf) * (scale0 * scale) + bias0,
                                        __builtin_convertvector(second - sum1, vf) * (scale1 * scale) + bias1);
                               });
        return;
    }
    auto take_sums = [&](int64_t row, vf first, vf second) { take(row, first + bias0, second + bias1); };
    const T* const panel = w.template panel<T>(i);
    if constexpr (WIDENS<T>)
        if (x.floats)
            return multiply_panel<T>(x.count, x.floats, w.inputs, widened_panel(panel, w.inputs), w.inputs, after, take_sums);
    multiply_panel<T>(x.count, x.values, w.inputs, panel, w.inputs, after, take_sums);
}

}  // namespace vmp
