// Products with matrices in the block types of GGUF files, read where they lie or from strips.
//
// A vector holds the same weights of W outputs, as in linear.h, so W rows of the matrix are unpacked together. A strip
// has the bytes of W rows in the order in which they are unpacked (StripBlock in block_types.h). Rows to
// multiply are quantized to 8 bits with a scale for each 32 inputs. The products of a group are summed as integers;
// the groups are added in the order of `group_at`, with the scales of both sides, so results are batch-invariant. A few
// rows are multiplied with weights in registers. For more rows, the weights of a panel are unpacked once, into memory
// that stays in a cache. Where results need not be batch-invariant, a panel is dequantized for many rows, and multiplied on
// tiles like a panel of weights in bfloat16.
#pragma once

#include "linear.h"

namespace vmp {

// The most rows that are multiplied with weights in registers: with strips, and with rows of the matrix where they lie.
#if defined(VMP_TILE_MODEL) || defined(__AMX_TILE__)
constexpr int FEW_ROWS = 4;  // tiles multiply more of them faster
#elif defined(__AVX512F__)
constexpr int FEW_ROWS = 8;
#elif defined(__AVX2__)
constexpr int FEW_ROWS = 4;
#else
constexpr int FEW_ROWS = 2;
#endif
constexpr int FEW_ROWS_IN_PLACE = FEW_ROWS < 4 ? FEW_ROWS : 4;

// The least number of rows for which a panel is dequantized.
constexpr int64_t MANY_ROWS = 24;

// 32 inputs of a row, quantized.
struct alignas(64) RowBlock {
    int8_t values[32];
    float scale;
    int32_t less[3];  // minus the sum of the first 16 values, of the last 16, and of all
    float sums[3];    // the same sums, positive, times `scale`
};

// Quantizes 32 inputs. If an input is not finite, the scale is NaN, and so are all products.
template <class T>
inline void quantize_block(const T* x, RowBlock& block) {
    constexpr float LEAST = 1e-36f;            // the inverse of a smaller number may be infinite
    constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: the lowest bits of a sum with it are the rounded number
    vi most = {};
    for (int i = 0; i < 32; i += W) most = larger(most, sizes_of(load(x + i)));
    const float bound = largest(most);
    const bool is_finite = bound < std::numeric_limits<float>::infinity();
    const float units = is_finite && bound > LEAST ? 127 / bound : 0;
    vf sums[2] = {};
    for (int i = 0; i < 32; i += W) {
        const vf value = is_finite ? load(x + i) : vf{};
        const vi whole = (vi)(value * units + TO_INTEGER) - (vi)splat(TO_INTEGER);
        write(block.values + i, __builtin_convertvector(whole, vb));
        sums[i / 16] += to_floats(whole);
    }
    block.scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : units > 0 ? bound / 127 : 0;
    const auto add = [](vf a, vf b) { return a + b; };
    const vf halves = reduce_groups<W / 4>(reduce_pair<W / 2>(sums[0], sums[1], add), add);
    const float all[3] = {halves[0], halves[W / 2], halves[0] + halves[W / 2]};
    for (int i = 0; i < 3; ++i) {
        block.less[i] = -int32_t(all[i]);
        block.sums[i] = all[i] * block.scale;
    }
}

// Bytes to prefetch while others are multiplied: from `at` up to `end`, and then those of `rest`. They go to the L2 cache.
struct SoonBytes {
    struct Part {
        const uint8_t *at = nullptr, *end = nullptr;

        int64_t size() const { return std::max<int64_t>(0, end - at); }
    };

    Part part, rest;
    int64_t lines = 0;  // to prefetch with each group

    // Divides the bytes among so many groups.
    void share_out(int64_t groups) { lines = ((part.size() + rest.size()) / 64 + groups) / groups; }

    // Prefetches what is due with a group.
    ALWAYS_INLINE void ask() {
        for (int64_t i = 0; i < lines; ++i, part.at += 64) {
            if (part.at >= part.end) {
                if (!rest.at) return;
                part = rest;
                rest = {};
            }
            __builtin_prefetch(part.at, 0, 2);
        }
    }
};

// Adds to `total` the product of W rows of a matrix and a group of a row's inputs: `sum` has the sums of their integers,
// and `part` is the half of the 32 inputs, or 2 for all.
template <bool HAS_MINIMUM>
ALWAYS_INLINE vf add_scaled(vf total, vi sum, vf scale, vf minimum, const RowBlock& x, int part) {
    total += to_floats(sum) * (scale * x.scale);
    if constexpr (HAS_MINIMUM) total -= minimum * x.sums[part];
    return total;
}

// Rows to multiply, and the same rows quantized, `stride` blocks each.
template <class T>
struct BlockRows {
    const T* values;
    const RowBlock* blocks;
    int64_t stride;
    int64_t count;
};

// Memory for quantized rows.
template <class T>
struct RowBlocks {
    HugeVector<RowBlock> blocks;
    int64_t stride = 0;

    void fit(int64_t rows, int64_t most_inputs, bool /*quantizes*/) {
        stride = most_inputs / 32;
        vmp::fit(blocks, rows * stride);
    }

    void quantize_row(const T* x, int64_t inputs, int64_t row) {
        for (int64_t i = 0; i < inputs / 32; ++i) quantize_block(x + 32 * i, blocks[row * stride + i]);
    }

    // Copies a quantized row of `x`.
    void copy_row(const BlockRows<T>& x, int64_t from, int64_t inputs, int64_t row) {
        std::copy_n(x.blocks + from * x.stride, inputs / 32, blocks.data() + row * stride);
    }

    BlockRows<T> rows(const T* x, int64_t count) const { return {x, blocks.data(), stride, count}; }
};

// A matrix in a block type, contiguous; mirrored by CBlockPart.
struct BlockPart {
    const uint8_t* data;
    int64_t outputs;
    int64_t type;
    int64_t row_bytes;
};

// W rows of a matrix, rewritten; mirrored by CBlockStrip. `at` is null where a panel has no rows.
struct BlockStrip {
    const uint8_t* at;
    int64_t type;
};

// Matrices one below another; mirrored by CBlockLinear. If `is_pair` is set, the first half of all rows is multiplied in
// pairs with the second: a panel has W columns of each.
struct BlockMatrix {
    const BlockPart* parts;
    int64_t num_parts;
    const float* bias;  // for each column of the panels, or null
    int64_t inputs;
    int64_t outputs;    // rows of all parts
    int64_t is_pair;
    const BlockStrip* strips;  // the two of each panel; or null: the rows are read where the parts lie
    int64_t is_batch_invariant;

    int64_t panels() const { return is_pair ? (outputs / 2 + W - 1) / W : (outputs + NR - 1) / NR; }
};

// Takes the sums of some rows, from `first` up to `end`: the two vectors of a panel for each.
struct TakeSums {
    void* context;
    void (*call)(void* context, int64_t first, int64_t end, const vf* sums);

    void operator()(int64_t first, int64_t end, const vf* sums) const { call(context, first, end, sums); }
};

// Multiplies `rows` rows, `stride` blocks each, with panel `i`: calls `take` until it has had each row once. Meanwhile
// the panel that comes `next` is prefetched, or its beginning.
void multiply_panel(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next, const RowBlock* x, int64_t stride,
                    int64_t rows, TakeSums take);

// Dequantizes panel `i` into memory of the calling thread, as a panel of a matrix in bfloat16 (linear.h).
const bf16* dequantized_panel(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next);

// Returns the address of the first weights of a panel.
const uint8_t* address_of_panel(const BlockMatrix& w, int64_t i);

// Returns the bytes that strips of the matrix take; 0 if W rows have more than one type, so that they make no strip.
int64_t strip_bytes(const BlockMatrix& w);

// Writes the strips of the matrix to `out`, and where they are to `strips`, two for each panel.
void write_strips(const BlockMatrix& w, uint8_t* out, BlockStrip* strips, int threads);

// Writes a row of a matrix, dequantized, to `out` [inputs].
void dequantize(const BlockPart& weight, int64_t row, int64_t inputs, float* out);

// A matrix for rows of T.
template <class T>
struct BlockLinear : BlockMatrix {
    using Value = T;
    using Buffer = RowBlocks<T>;
    using Rows = BlockRows<T>;

    bool quantizes() const { return true; }

    // Whether so many rows are quantized; else they are multiplied with dequantized weights.
    bool converts(int64_t rows) const {
        return !std::is_same_v<T, bf16> || !HAS_TILES || is_batch_invariant || rows < MANY_ROWS;
    }

    void convert_row(RowBlocks<T>& buffer, const T* x, int64_t row) const { buffer.quantize_row(x, inputs, row); }

    // Returns `count` rows to multiply with this matrix, which `buffer` has quantized if they must be.
    BlockRows<T> rows(const RowBlocks<T>& buffer, const T* x, int64_t count) const {
        if (converts(count)) return buffer.rows(x, count);
        return {x, nullptr, 0, count};
    }

    // Returns `count` rows of those to multiply with this matrix, from row `first` on.
    BlockRows<T> part(const BlockRows<T>& x, int64_t first, int64_t count) const {
        if (!x.blocks) return {x.values + first * inputs, nullptr, 0, count};
        return {nullptr, x.blocks + first * x.stride, x.stride, count};
    }
};

// Multiplies all rows with panel `i` and adds the bias: calls `take(row, first, second)` with the panel's two vectors.
template <class T, class Take>
inline void products(const BlockLinear<T>& w, int64_t i, const Next<BlockLinear<T>>& next, const BlockRows<T>& x,
                     Take&& take) {
    if constexpr (ON_TILES<T>)
        if (!x.blocks) {
            vf bias[2] = {};
            if (w.bias)
                for (int half = 0; half < 2; ++half) bias[half] = load(w.bias + i * NR + half * W);
            const bf16* const panel = dequantized_panel(w, i, {next.matrix, next.panel});
            const void* const after = address_of_panel(*next.matrix, next.panel);
            return multiply_panel<bf16>(
                x.count, x.values, w.inputs, panel, w.inputs, after,
                [&](int64_t row, vf first, vf second) { take(row, first + bias[0], second + bias[1]); });
        }
    auto take_some = [&](int64_t first, int64_t end, const vf* sums) {
        for (int64_t r = first; r < end; ++r, sums += 2) take(r, sums[0], sums[1]);
    };
    multiply_panel(w, i, {next.matrix, next.panel}, x.blocks, x.stride, x.count,
                   {&take_some, [](void* context, int64_t first, int64_t end, const vf* sums) {
                        (*(decltype(take_some)*)context)(first, end, sums);
                    }});
}

}  // namespace vmp
