// Products on tiles: registers of 16 rows of 64 bytes, and an instruction that multiplies two (Intel AMX).
//
// A panel of packed weights is two tiles beside each other, because a tile also takes two inputs (bfloat16) or four
// (int8) of 16 columns side by side. A block of up to 32 rows is multiplied with a panel in four tiles of sums, over 64
// bytes of each row at a time. A product of tiles does not round as the products of vectors do: it sums the first and the
// second inputs of pairs separately. So where there are tiles, all numbers of rows use them, and rows are summed in the
// same way in any company.
#pragma once

#include <algorithm>

#include "simd.h"

#if defined(VMP_TILE_MODEL)
#include "tile_model.h"
#endif

namespace vmp {

#if defined(VMP_TILE_MODEL) || defined(__AMX_TILE__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif

// Whether rows of T are multiplied on tiles.
template <class T>
constexpr bool ON_TILES = HAS_TILES && !std::is_same_v<T, float>;

// The rows of a tile, of a block, and the bytes of a tile's row.
constexpr int TILE_HEIGHT = 16, BLOCK_ROWS = 2 * TILE_HEIGHT, TILE_BYTES = 64;

// Ends the use of tiles in this thread, so that the system need not save them and other code is not slowed.
inline void release_tiles();

// Multiplies `rows` rows of x, at most BLOCK_ROWS, with a panel. Writes the sums, float or int32, to `out` [rows, 32], with
// `out_stride` elements from a row to the next; or adds to those in `out` if `adds`. Calls `soon.ask(steps)` for steps of a
// 32-bit word of each row.
template <class T, class Ask>
inline void multiply_block(int rows, const T* x, int64_t stride, const void* panel, int64_t inputs, Ask& soon, void* out,
                           int64_t out_stride, bool adds);

#if defined(VMP_TILE_MODEL) || defined(__AMX_TILE__)

// Makes the compiler write `memory` before the next instruction on tiles, whose intrinsics do not say that they read it.
inline void finish_writes(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// What this thread's tiles are configured for; 0: nothing.
inline uint32_t& configuration() {
    thread_local uint32_t key = 0;
    return key;
}

inline void release_tiles() {
    if (configuration() == 0) return;
    _tile_release();
    configuration() = 0;
}

// Configures tiles 0 to 3 for sums, 4 and 5 for `row_bytes` bytes of rows, 6 and 7 for a panel. Tiles 0, 1 and 4 have
// `first` rows, tiles 2, 3 and 5 `second`, and the tiles of the panel a row for each 32-bit word of the other rows.
inline void configure_tiles(int first, int second, int row_bytes) {
    const uint32_t key = uint32_t(first | second << 8 | row_bytes << 16);
    if (configuration() == key) return;
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved0[14] = {};
        uint16_t row_bytes[8] = {}, reserved1[8] = {};
        uint8_t rows[8] = {}, reserved2[8] = {};
    } config;
    static_assert(sizeof config == 64);
    const int rows_of[8] = {first, first, second, second, first, second, row_bytes / 4, row_bytes / 4};
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = uint8_t(rows_of[i]);
        config.row_bytes[i] = uint16_t(rows_of[i] == 0 ? 0 : i == 4 || i == 5 ? row_bytes : TILE_BYTES);
    }
    finish_writes(&config);
    _tile_loadconfig(&config);
    configuration() = key;
}

// Multiplies TILE_BYTES of each row; strides are in bytes.
template <bool IS_TALL, class T>
ALWAYS_INLINE void multiply_tiles(const void* x, int64_t stride, const char* panel) {
    constexpr int64_t STEP = 2 * TILE_BYTES;
    _tile_loadd(6, panel, STEP);
    _tile_loadd(7, panel + TILE_BYTES, STEP);
    _tile_loadd(4, x, stride);
    if constexpr (IS_TALL) _tile_loadd(5, (const char*)x + TILE_HEIGHT * stride, stride);
    if constexpr (std::is_same_v<T, bf16>) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (IS_TALL) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    } else {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if constexpr (IS_TALL) {
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
}

template <bool IS_TALL, class T, class Ask>
inline void multiply_block(int rows, const T* x, int64_t stride, const char* panel, int64_t inputs, Ask& soon, char* out,
                           int64_t out_stride, bool adds) {
    constexpr int64_t INPUTS = TILE_BYTES / sizeof(T), STEP = 2 * TILE_BYTES;
    char* const lower = out + TILE_HEIGHT * out_stride;
    const int first = std::min(rows, TILE_HEIGHT);
    configure_tiles(first, rows - first, TILE_BYTES);
    finish_writes(x);
    if (adds) {
        _tile_loadd(0, out, out_stride);
        _tile_loadd(1, out + TILE_BYTES, out_stride);
        if constexpr (IS_TALL) {
            _tile_loadd(2, lower, out_stride);
            _tile_loadd(3, lower + TILE_BYTES, out_stride);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (IS_TALL) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    int64_t k = 0;
    for (; k + INPUTS <= inputs; k += INPUTS, panel += TILE_HEIGHT * STEP) {
        soon.ask(TILE_HEIGHT);
        multiply_tiles<IS_TALL, T>(x + k, stride * sizeof(T), panel);
    }
    if (const int64_t rest = (inputs - k) * sizeof(T)) {
        // The inputs that are left, filled up with zeros, which add nothing to the sums.
        alignas(64) char last_x[BLOCK_ROWS][TILE_BYTES] = {}, last_of_panel[TILE_HEIGHT * STEP] = {};
        for (int row = 0; row < rows; ++row) std::memcpy(last_x[row], x + row * stride + k, rest);
        std::memcpy(last_of_panel, panel, rest / 4 * STEP);
        finish_writes(last_x);
        finish_writes(last_of_panel);
        multiply_tiles<IS_TALL, T>(last_x, TILE_BYTES, last_of_panel);
    }
    _tile_stored(0, out, out_stride);
    _tile_stored(1, out + TILE_BYTES, out_stride);
    if constexpr (IS_TALL) {
        _tile_stored(2, lower, out_stride);
        _tile_stored(3, lower + TILE_BYTES, out_stride);
    }
}

template <class T, class Ask>
inline void multiply_block(int rows, const T* x, int64_t stride, const void* panel, int64_t inputs, Ask& soon, void* out,
                           int64_t out_stride, bool adds) {
    if (rows > TILE_HEIGHT)
        multiply_block<true>(rows, x, stride, (const char*)panel, inputs, soon, (char*)out, 4 * out_stride, adds);
    else
        multiply_block<false>(rows, x, stride, (const char*)panel, inputs, soon, (char*)out, 4 * out_stride, adds);
}

#else
inline void release_tiles() {}
#endif

}  // namespace vmp
