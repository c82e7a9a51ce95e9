// A model of the tile instructions of Intel AMX in plain C++: their arithmetic to the bit, and their faults as exceptions.
// Tests run the kernels with it on processors without tiles. The rules are those of Intel's Software Developer's Manual,
// volume 2 (LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS, TDPBSSD, TDPBUSD, and the exception classes AMX-E1 to AMX-E6).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace vmp {

// The tiles of one thread.
class TileModel {
   public:
    static constexpr int TILES = 8, MOST_ROWS = 16, MOST_BYTES = 64;

    // Takes the 64 bytes of a configuration; all tiles are zero then.
    void configure(const void* config) {
        uint8_t bytes[64];
        uint16_t row_bytes[TILES];
        std::memcpy(bytes, config, sizeof bytes);
        std::memcpy(row_bytes, bytes + 16, sizeof row_bytes);
        require(bytes[0] <= 1, "palette ", bytes[0], " is unknown");
        if (bytes[0] == 0) return release();
        require(bytes[1] == 0, "start row ", bytes[1], " is only for instructions that were interrupted");
        for (int i = 2; i < 64; ++i)
            require((i >= 16 && i < 32) || (i >= 48 && i < 56) || bytes[i] == 0, "reserved byte ", i, " is not zero");
        for (int i = 0; i < TILES; ++i) {
            const int rows = bytes[48 + i];
            require(rows <= MOST_ROWS && row_bytes[i] <= MOST_BYTES, "tile ", i, " is too large");
            require((rows == 0) == (row_bytes[i] == 0), "tile ", i, " has rows without bytes, or bytes without rows");
        }
        configured_ = true;
        for (int i = 0; i < TILES; ++i) tiles_[i] = {bytes[48 + i], row_bytes[i], {}};
    }

    bool is_configured() const { return configured_; }

    void release() {
        configured_ = false;
        for (Tile& tile : tiles_) tile = {};
    }

    void zero(int i) { std::memset(valid(i).bytes, 0, sizeof(Tile::bytes)); }

    void load(int i, const void* at, int64_t stride) {
        zero(i);
        for (int row = 0; row < tiles_[i].rows; ++row)
            std::memcpy(tiles_[i].bytes[row], (const char*)at + row * stride, tiles_[i].row_bytes);
    }

    void store(int i, void* at, int64_t stride) {
        const Tile& tile = valid(i);
        for (int row = 0; row < tile.rows; ++row)
            std::memcpy((char*)at + row * stride, tile.bytes[row], tile.row_bytes);
    }

    // Adds to each float of `sums` the products of the pairs of `a` and `b`: those of the first of each pair and those
    // of the second are summed from zero by fused multiply-adds, and the two sums are added to each other and to `sums`.
    // Numbers below the least normal float count as zero everywhere.
    void product_bf16(int sums, int a, int b) {
        check_product(sums, a, b);
        float rows_of_b[2][MOST_ROWS][MOST_ROWS];
        for (int k = 0; k < tiles_[b].rows; ++k)
            for (int n = 0; n < MOST_ROWS; ++n)
                for (int i = 0; i < 2; ++i) rows_of_b[i][k][n] = bf16_at(tiles_[b].bytes[k] + 4 * n + 2 * i);
        for (int m = 0; m < tiles_[sums].rows; ++m) {
            float total[2][MOST_ROWS] = {};
            for (int k = 0; k < tiles_[b].rows; ++k)
                for (int i = 0; i < 2; ++i) {
                    const float x = bf16_at(tiles_[a].bytes[m] + 4 * k + 2 * i);
                    for (int n = 0; n < MOST_ROWS; ++n)
                        total[i][n] = flushed(std::fma(x, rows_of_b[i][k][n], total[i][n]));
                }
            float row[MOST_ROWS];
            std::memcpy(row, tiles_[sums].bytes[m], sizeof row);
            for (int n = 0; n < MOST_ROWS; ++n) row[n] = flushed(flushed(row[n]) + flushed(total[0][n] + total[1][n]));
            std::memcpy(tiles_[sums].bytes[m], row, tiles_[sums].row_bytes);
        }
    }

    // Adds to each integer of `sums` the products of the bytes of `a`, of type A, and the signed bytes of `b`, by fours.
    template <class A>
    void product_of_bytes(int sums, int a, int b) {
        check_product(sums, a, b);
        for (int m = 0; m < tiles_[sums].rows; ++m) {
            uint32_t row[MOST_ROWS];
            std::memcpy(row, tiles_[sums].bytes[m], sizeof row);
            for (int k = 0; k < tiles_[b].rows; ++k)
                for (int n = 0; n < MOST_ROWS; ++n)
                    for (int i = 4 * n; i < 4 * n + 4; ++i)
                        row[n] += uint32_t(A(tiles_[a].bytes[m][4 * k + i % 4]) * int8_t(tiles_[b].bytes[k][i]));
            std::memcpy(tiles_[sums].bytes[m], row, tiles_[sums].row_bytes);
        }
    }

   private:
    struct Tile {
        int rows = 0, row_bytes = 0;
        uint8_t bytes[MOST_ROWS][MOST_BYTES] = {};
    };

    Tile tiles_[TILES];
    bool configured_ = false;

    static void require(bool holds, const char* what, int number = 0, const char* wrong = "") {
        if (!holds) throw std::logic_error("a tile instruction faults: " + (what + std::to_string(number) + wrong));
    }

    Tile& valid(int i) {
        require(configured_, "no configuration is loaded for tile ", i);
        require(i >= 0 && i < TILES && tiles_[i].rows > 0, "tile ", i, " is not configured");
        return tiles_[i];
    }

    void check_product(int sums, int a, int b) {
        const Tile &of_sums = valid(sums), &of_a = valid(a), &of_b = valid(b);
        require(sums != a && a != b && sums != b, "tile ", a, " is used twice in a product");
        require(of_sums.row_bytes % 4 == 0 && of_a.row_bytes % 4 == 0 && of_b.row_bytes % 4 == 0,
                "a row is not a multiple of four bytes in a product into tile ", sums);
        require(of_sums.rows == of_a.rows, "rows differ between the sums and the first factor, tile ", a);
        require(of_sums.row_bytes == of_b.row_bytes, "columns differ between the sums and the second factor, tile ", b);
        require(of_a.row_bytes / 4 == of_b.rows, "the first factor has other columns than the second rows, tile ", b);
    }

    static float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }

    static float bf16_at(const uint8_t* at) {
        uint16_t bits;
        std::memcpy(&bits, at, sizeof bits);
        const uint32_t wide = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &wide, sizeof x);
        return flushed(x);
    }
};

// The model of this thread's tiles.
inline TileModel& tile_model() {
    thread_local TileModel model;
    return model;
}

}  // namespace vmp

// Under these names, the intrinsics of compilers for AMX give the instructions.
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig(config) vmp::tile_model().configure(config)
#define _tile_release() vmp::tile_model().release()
#define _tile_zero(tile) vmp::tile_model().zero(tile)
#define _tile_loadd(tile, at, stride) vmp::tile_model().load(tile, at, stride)
#define _tile_stored(tile, at, stride) vmp::tile_model().store(tile, at, stride)
#define _tile_dpbf16ps(sums, a, b) vmp::tile_model().product_bf16(sums, a, b)
#define _tile_dpbssd(sums, a, b) vmp::tile_model().product_of_bytes<int8_t>(sums, a, b)
#define _tile_dpbusd(sums, a, b) vmp::tile_model().product_of_bytes<uint8_t>(sums, a, b)
