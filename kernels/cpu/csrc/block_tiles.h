// Products with unpacked weights in block types on tiles (tiles.h).
//
// A product of tiles sums a group of inputs, for up to 16 rows and W outputs. The integer sums are stored, and then
// scaled and added as they are without tiles, so the results are the same to the bit.
#pragma once

#include "block_types.h"
#include "blocks.h"

namespace vmp {

#if defined(VMP_TILE_MODEL) || defined(__AMX_TILE__)

// Writes the integer sums of a group to `sums` [rows of the tiles, COLUMNS]: the products of signed bytes of rows,
// `stride` bytes apart, and of weights. Neighbouring groups use different tiles, so that they do not wait for each other.
template <bool IS_ODD, int COLUMNS>
ALWAYS_INLINE void sum_group(const int8_t* values, int64_t stride, const vf* const (&words)[COLUMNS], vi* sums) {
    constexpr int64_t SUMS_STRIDE = COLUMNS * sizeof(vi);
    constexpr bool HAS_TWO = COLUMNS == 2;
    if constexpr (!IS_ODD) {
        _tile_loadd(4, values, stride);
        _tile_zero(0);
        _tile_loadd(6, words[0], TILE_BYTES);
        _tile_dpbssd(0, 4, 6);
        if constexpr (HAS_TWO) {
            _tile_zero(1);
            _tile_loadd(7, words[1], TILE_BYTES);
            _tile_dpbssd(1, 4, 7);
            _tile_stored(1, sums + 1, SUMS_STRIDE);
        }
        _tile_stored(0, sums, SUMS_STRIDE);
    } else {
        _tile_loadd(5, values, stride);
        _tile_zero(2);
        _tile_loadd(6, words[0], TILE_BYTES);
        _tile_dpbssd(2, 5, 6);
        if constexpr (HAS_TWO) {
            _tile_zero(3);
            _tile_loadd(7, words[1], TILE_BYTES);
            _tile_dpbssd(3, 5, 7);
            _tile_stored(3, sums + 1, SUMS_STRIDE);
        }
        _tile_stored(2, sums, SUMS_STRIDE);
    }
}

// Adds to `totals` [rows, COLUMNS] the products of COUNT groups, one or two, from the group at `index` on.
template <int GROUP, bool HAS_MINIMUM, int COLUMNS, int COUNT>
ALWAYS_INLINE void add_groups(int64_t rows, const vf* const* panels, int64_t index, const RowBlock* x, int64_t x_stride,
                              vf* totals) {
    constexpr int VECTORS = GROUP / 4 + 1 + HAS_MINIMUM;
    vi sums[COUNT][TILE_HEIGHT][COLUMNS];
    vf scales[COUNT][COLUMNS], minima[COUNT][COLUMNS];
    const RowBlock* blocks[COUNT];
    int parts[COUNT];
#pragma GCC unroll 2
    for (int i = 0; i < COUNT; ++i) {
        const int64_t group = group_at<GROUP>(index + i);
        blocks[i] = x + group * GROUP / 32;
        parts[i] = GROUP == 32 ? 2 : int(group % 2);
        const vf* words[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) {
            words[c] = panels[c] + (index + i) * VECTORS;
            scales[i][c] = words[c][GROUP / 4];
            minima[i][c] = words[c][VECTORS - 1];
        }
        const int8_t* const values = blocks[i]->values + (parts[i] == 1 ? 16 : 0);
        if (i == 0)
            sum_group<false>(values, x_stride * sizeof(RowBlock), words, sums[i][0]);
        else
            sum_group<true>(values, x_stride * sizeof(RowBlock), words, sums[i][0]);
    }
    for (int64_t r = 0; r < rows; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) {
            vf total = totals[r * COLUMNS + c];
#pragma GCC unroll 2
            for (int i = 0; i < COUNT; ++i)
                total = add_scaled<HAS_MINIMUM>(total, sums[i][r][c], scales[i][c], minima[i][c],
                                                blocks[i][r * x_stride], parts[i]);
            totals[r * COLUMNS + c] = total;
        }
}

// Multiplies `rows` rows, at most TILE_HEIGHT, with COLUMNS * W unpacked rows of a matrix, whose integers are signed
// bytes: writes [rows, COLUMNS].
template <int GROUP, bool HAS_MINIMUM, int COLUMNS>
void multiply_on_tiles(int64_t rows, const vf* const* panels, int64_t inputs, int, const RowBlock* x, int64_t x_stride,
                       vf* out, SoonBytes& soon) {
    const int64_t groups = inputs / GROUP;
    configure_tiles(int(rows), int(rows), GROUP);
    finish_writes(panels);
    std::fill_n(out, rows * COLUMNS, vf{});
    int64_t index = 0;
    for (; index + 2 <= groups; index += 2) {
        soon.ask();
        soon.ask();
        add_groups<GROUP, HAS_MINIMUM, COLUMNS, 2>(rows, panels, index, x, x_stride, out);
    }
    if (index < groups) add_groups<GROUP, HAS_MINIMUM, COLUMNS, 1>(rows, panels, index, x, x_stride, out);
}

#else

template <int GROUP, bool HAS_MINIMUM, int COLUMNS>
void multiply_on_tiles(int64_t, const vf* const*, int64_t, int, const RowBlock*, int64_t, vf*, SoonBytes&);

#endif

}  // namespace vmp
