// The functions that blocks.h declares, compiled for each type of blocks.

#include "blocks.h"

#include "block_tiles.h"
#include "block_types.h"

namespace vmp {
namespace {

// The most rows of a tile for unpacked weights.
#if defined(VMP_TILE_MODEL) || defined(__AMX_TILE__)
constexpr int TILE_OF_ROWS = TILE_HEIGHT;
#elif defined(__AVX512F__)
constexpr int TILE_OF_ROWS = 6;
#else
constexpr int TILE_OF_ROWS = 4;
#endif

// Whether `dot` subtracts 128 from the bytes of wide weights: 16 bits are enough for two products of signed bytes, whose
// sizes are at most 128, but not for bytes up to 255.
constexpr bool SUBTRACTS_128 = VMP_SUMS_IN_16_BITS;

// Adds the products of four inputs: bytes of `weights` from 0 to 255, below 128 unless IS_WIDE, and signed bytes of x,
// from -127 to 127.
template <bool IS_WIDE>
ALWAYS_INLINE vi dot(vi sum, vi weights, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
#elif VMP_SUMS_IN_16_BITS
    __m256i sizes = (__m256i)weights, all = _mm256_set1_epi32(x);
    if constexpr (IS_WIDE) {
        const auto bytes = (__m256i)(weights ^ int32_t(0x80808080));
        sizes = _mm256_abs_epi8(bytes);
        all = _mm256_sign_epi8(all, bytes);
    }
    sum += (vi)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, all), _mm256_set1_epi16(1));
    compute_now(sum);
    return sum;
#else
    for (int i = 0; i < 4; ++i) sum += int32_t(int8_t(x >> (8 * i))) * byte_of(weights, i);
    return sum;
#endif
}

#if VMP_SUMS_IN_16_BITS
// Returns the sums of the products of two inputs each, of four.
ALWAYS_INLINE vs pairs_of(vi weights, int32_t x) {
    return (vs)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x));
}

ALWAYS_INLINE vi add_pairs(vi sum, vs pairs) {
    return sum + (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
#endif

// How many words of a group, with integers of `bits` bits, can be multiplied before a sum of pairs may need more than 16
// bits; signed bytes of x are from -127 to 127.
constexpr int words_in_16_bits(int bits, int group) {
    if (!VMP_SUMS_IN_16_BITS || bits > 6) return 1;
    return std::min(group / 4, 32767 / (2 * 127 * ((1 << bits) - 1)));
}

// How the integers of a group are multiplied; types that agree in this share code for unpacked weights.
template <int GROUP_, bool HAS_MINIMUM_, bool IS_WIDE_, int RUN_ = 1>
struct BlockKind {
    static constexpr int GROUP = GROUP_;
    static constexpr bool HAS_MINIMUM = HAS_MINIMUM_, IS_WIDE = IS_WIDE_;
    // The number of words whose products are summed in 16 bits.
    static constexpr int RUN = RUN_;
    // The vectors of an unpacked group: integers, scale and minimum.
    static constexpr int VECTORS = GROUP / 4 + 1 + HAS_MINIMUM;
};

constexpr int MOST_VECTORS = BlockKind<16, true, false>::VECTORS;
constexpr int MOST_WEIGHTS = 256;  // of a block

template <class Type>
using KindOf = BlockKind<Type::GROUP, Type::HAS_MINIMUM, Type::BITS == 8, words_in_16_bits(Type::BITS, Type::GROUP)>;

// The words of a group that are multiplied without a loop. With vectors of 4 elements, each word takes so many
// instructions that the loop costs nothing, and the code without it is large.
constexpr int WORDS_AT_ONCE = W == 4 ? 1 : 8;

// What the sum of a group of 32 or 16 inputs begins with, so that 2^`offset` is subtracted from its integers.
template <class Kind>
ALWAYS_INLINE vi first_sum(int offset, const RowBlock& x, int part) {
    if (offset < 0 || (Kind::IS_WIDE && SUBTRACTS_128)) return vi{};
    return (vi{} + x.less[part]) << offset;
}

// Adds to `total` the product of a group with inputs of a row; `part` is the half of the 32 inputs, or 2 for all.
template <class Kind>
ALWAYS_INLINE vf add_group(vf total, const vi* words, vf scale, vf minimum, int offset, const RowBlock& x, int part) {
    vi sum = first_sum<Kind>(offset, x, part);
    const int8_t* values = x.values + (part == 1 ? 16 : 0);
#if VMP_SUMS_IN_16_BITS
    if constexpr (Kind::RUN > 1) {
#pragma GCC unroll 4
        for (int i = 0; i < Kind::GROUP / 4; i += Kind::RUN) {
            vs pairs = pairs_of(words[i], read<int32_t>(values + 4 * i));
#pragma GCC unroll 8
            for (int j = i + 1; j < i + Kind::RUN; ++j) {
                pairs += pairs_of(words[j], read<int32_t>(values + 4 * j));
                compute_now(pairs);
            }
            sum = add_pairs(sum, pairs);
        }
    } else
#endif
    {
#pragma GCC unroll 8
        for (int i = 0; i < Kind::GROUP / 4; ++i)
            sum = dot<Kind::IS_WIDE>(sum, words[i], read<int32_t>(values + 4 * i));
    }
    return add_scaled<Kind::HAS_MINIMUM>(total, sum, scale, minimum, x, part);
}

// Does the same for ROWS rows, `x_stride` blocks apart.
template <class Kind, int ROWS>
INLINE_IF_WIDE void add_group_to_rows(vf (&totals)[ROWS], const vi* words, vf scale, vf minimum, int offset,
                                      const RowBlock* x, int64_t x_stride, int part) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
        totals[r] = add_group<Kind>(totals[r], words, scale, minimum, offset, x[r * x_stride], part);
}

// W rows of a matrix, where they lie. They are prefetched while they are multiplied, and then the rows that come `next`.
// The lines go to the L2 cache, BYTES_AHEAD before they are read: 16 rows at once are too many for the processor's own
// prefetching.
template <class Type_>
struct Rows {
    using Type = Type_;
    static constexpr int64_t BYTES_AHEAD = 1024;

    const uint8_t* at;
    int64_t stride;
    const uint8_t* next;
    int64_t row_bytes;

    Rows(const uint8_t* at, int64_t stride, int64_t inputs, const uint8_t* next)
        : at(at), stride(stride), next(next), row_bytes(inputs / Type::WEIGHTS * Type::BYTES) {}

    // Returns the blocks that hold input 32 * k.
    ALWAYS_INLINE RowsBlock block(int64_t k) const { return {at + 32 * k / Type::WEIGHTS * Type::BYTES, stride}; }

    // Asks for the lines of 256 inputs, around input 32 * k, of an eighth of the rows; `index` is that of the group in the block.
    ALWAYS_INLINE void ask(int64_t k, int index) const {
        constexpr int BLOCKS = Type::WEIGHTS / 32;
        if (index * Type::GROUP % 32 != 0) return;
        const int part = BLOCKS == 1 ? int(k % 8) : index * Type::GROUP / 32;
        const int64_t bytes = 8 / BLOCKS * Type::BYTES, ahead = k / 8 * bytes + BYTES_AHEAD;
        const uint8_t* from = ahead < row_bytes ? at + ahead : next + (ahead - row_bytes);
        for (int row = W * part / 8; row < W * (part + 1) / 8; ++row)
            for (int64_t byte = 0; byte < bytes; byte += 64) prefetch_here(from + row * stride + byte);
    }
};

// The distance in bytes at which strips are prefetched.
constexpr int64_t STRIP_BYTES_AHEAD = 8192;

// W rows of a matrix in a strip. Strips lie one after another, so what is STRIP_BYTES_AHEAD is read next.
template <class Type_>
struct Strip {
    using Type = Type_;

    const uint8_t* at;

    Strip(const uint8_t* at, int64_t, int64_t, const uint8_t*) : at(at) {}

    ALWAYS_INLINE StripBlock<Type> block(int64_t k) const { return {at + 32 * k / Type::WEIGHTS * (W * Type::BYTES)}; }

    ALWAYS_INLINE void ask(int64_t k, int index) const {
        constexpr int GROUPS = Type::WEIGHTS / Type::GROUP, LINES = (W * Type::BYTES + 63) / 64;
        for (int line = LINES * index / GROUPS; line < LINES * (index + 1) / GROUPS; ++line)
            prefetch_here(block(k).at + STRIP_BYTES_AHEAD + 64 * line);
    }
};

// Multiplies ROWS rows with `count` times W rows of a matrix, which lie one after another, and writes [count, ROWS]:
// `Source` is Rows or Strip, and made of the arguments from `at` on.
template <class Source, int ROWS>
void multiply_blocks(const RowBlock* x, int64_t x_stride, vf* out, int64_t count, const uint8_t* at, int64_t stride,
                     int64_t inputs, const uint8_t* next) {
    using Type = typename Source::Type;
    for (; count > 0; --count, out += ROWS, at += inputs / Type::WEIGHTS * Type::BYTES * W) {
        const Source source(at, stride, inputs, next);
        vf totals[ROWS] = {};
        for (int64_t k = 0; k < inputs / 32; k += Type::WEIGHTS / 32) {
            int index = 0;
            Type::unpack(source.block(k), [&](const auto& words, vf scale, vf minimum) __attribute__((always_inline)) {
                source.ask(k, index);
                const int group = int(group_at<Type::GROUP>(index++));
                const int64_t block = k + group * Type::GROUP / 32;
                add_group_to_rows<KindOf<Type>, ROWS>(totals, words, scale, minimum, Type::OFFSET, x + block, x_stride,
                                                      Type::GROUP == 32 ? 2 : group % 2);
            });
        }
        std::memcpy(out, totals, sizeof totals);
    }
}

// Subtracts 2^OFFSET from each byte, or nothing if OFFSET is negative.
template <int OFFSET>
ALWAYS_INLINE vi less_offset(vi words) {
    typedef uint8_t vb4 __attribute__((vector_size(4 * W)));
    return OFFSET < 0 ? words : (vi)((vb4)words - uint8_t(1 << std::max(OFFSET, 0)));
}

// Unpacks W rows of a matrix. For tiles, 2^OFFSET is subtracted from the integers, which makes signed bytes of them.
template <class Source>
void unpack_blocks(vf* out, const uint8_t* at, int64_t stride, int64_t inputs, const uint8_t* next) {
    using Type = typename Source::Type;
    const Source source(at, stride, inputs, next);
    for (int64_t k = 0; k < inputs / 32; k += Type::WEIGHTS / 32) {
        int index = 0;
        Type::unpack(source.block(k), [&](const auto& words, vf scale, vf minimum) __attribute__((always_inline)) {
            constexpr int WORDS = Type::GROUP / 4;
            source.ask(k, index++);
#pragma GCC unroll 8
            for (int i = 0; i < WORDS; ++i) out[i] = (vf)(HAS_TILES ? less_offset<Type::OFFSET>(words[i]) : words[i]);
            out[WORDS] = scale;
            if constexpr (Type::HAS_MINIMUM) out[WORDS + 1] = minimum;
            out += KindOf<Type>::VECTORS;
        });
    }
}

// Dequantizes a word of W rows to two vectors with a pair of inputs each, `out` and the second after it; with a `mask`,
// only in its lanes.
INLINE_IF_WIDE void dequantize_word(vi word, vf scale, vf less, const vi* mask, vi* out) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half, out += 2) {
        const vf even = to_floats(byte_of(word, 2 * half)) * scale - less;
        const vf odd = to_floats(byte_of(word, 2 * half + 1)) * scale - less;
        bf16 pairs[NR];
        store(pairs, even, odd);
        constexpr vs order = vector_of<vs>([](int n) { return n / 2 + n % 2 * W; });
        const vi both = (vi)__builtin_shuffle(read<vs>(pairs), order);
        *out = mask ? (both & *mask) | (*out & ~*mask) : both;
    }
}

// Dequantizes W rows of a matrix into half a panel, from `panel` on; with a `mask`, only in its lanes.
template <class Source>
void dequantize_blocks(vi* panel, const vi* mask, const uint8_t* at, int64_t stride, int64_t inputs, const uint8_t* next) {
    using Type = typename Source::Type;
    const Source source(at, stride, inputs, next);
    for (int64_t k = 0; k < inputs / 32; k += Type::WEIGHTS / 32) {
        int index = 0;
        Type::unpack(source.block(k), [&](const auto& words, vf scale, vf minimum) __attribute__((always_inline)) {
            source.ask(k, index);
            const vf less = Type::HAS_MINIMUM ? minimum : scale * float(1 << std::max(Type::OFFSET, 0));
            vi* out = panel + 32 * k + group_at<Type::GROUP>(index++) * Type::GROUP;  // a pair of inputs has two vectors
#pragma GCC unroll 8
            for (int i = 0; i < Type::GROUP / 4; ++i, out += 4) dequantize_word(words[i], scale, less, mask, out);
        });
    }
}

// Multiplies `rows` rows, at most ROWS, with COLUMNS * W rows of a matrix, which `unpack_blocks` wrote to `panels`:
// writes [rows, COLUMNS].
template <class Kind, int COLUMNS, int ROWS>
void multiply_unpacked(int64_t rows, const vf* const* panels, int64_t inputs, int offset, const RowBlock* x,
                       int64_t x_stride, vf* out, SoonBytes& soon) {
    if constexpr (ROWS > 1)
        if (rows < ROWS)
            return multiply_unpacked<Kind, COLUMNS, ROWS - 1>(rows, panels, inputs, offset, x, x_stride, out, soon);
    constexpr int GROUP = Kind::GROUP;
    vf totals[ROWS][COLUMNS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) totals[r][c] = vf{};
    for (int64_t index = 0; index < inputs / GROUP; ++index) {
        soon.ask();
        const int64_t group = group_at<GROUP>(index);
        const RowBlock* block = x + group * GROUP / 32;
        const int part = GROUP == 32 ? 2 : int(group % 2);
        const int8_t* values = block->values + (part == 1 ? 16 : 0);
        const vf* at[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c) at[c] = panels[c] + index * Kind::VECTORS;
        vi sums[ROWS][COLUMNS];
        auto begin_sums = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int c = 0; c < COLUMNS; ++c) sums[r][c] = first_sum<Kind>(offset, block[r * x_stride], part);
        };
        // Calls `f(r, c, weights, four)` for each row and column, with word `i` of the column and the row's inputs.
        auto each_word = [&](int i, auto&& f) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const int32_t four = read<int32_t>(values + r * x_stride * sizeof(RowBlock) + 4 * i);
#pragma GCC unroll 2
                for (int c = 0; c < COLUMNS; ++c) f(r, c, (vi)at[c][i], four);
            }
        };
#if VMP_SUMS_IN_16_BITS
        if constexpr (Kind::RUN > 1) {
#pragma GCC unroll 4
            for (int i = 0; i < GROUP / 4; i += Kind::RUN) {
                vs pairs[ROWS][COLUMNS];
#pragma GCC unroll 8
                for (int j = i; j < i + Kind::RUN; ++j)
                    each_word(j, [&](int r, int c, vi weights, int32_t four) __attribute__((always_inline)) {
                        const vs product = pairs_of(weights, four);
                        pairs[r][c] = j == i ? product : pairs[r][c] + product;
                        compute_now(pairs[r][c]);
                    });
                if (i == 0) begin_sums();
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                    for (int c = 0; c < COLUMNS; ++c) sums[r][c] = add_pairs(sums[r][c], pairs[r][c]);
            }
        } else
#endif
        {
            begin_sums();
#pragma GCC unroll WORDS_AT_ONCE
            for (int i = 0; i < GROUP / 4; ++i)
                each_word(i, [&](int r, int c, vi weights, int32_t four) __attribute__((always_inline)) {
                    sums[r][c] = dot<Kind::IS_WIDE>(sums[r][c], weights, four);
                });
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; ++c)
                totals[r][c] = add_scaled<Kind::HAS_MINIMUM>(totals[r][c], sums[r][c], at[c][GROUP / 4],
                                                             at[c][Kind::VECTORS - 1], block[r * x_stride], part);
    }
    std::memcpy(out, totals, sizeof totals);
}

using MultiplyUnpacked = void(int64_t, const vf* const*, int64_t, int, const RowBlock*, int64_t, vf*, SoonBytes&);

template <class Kind, int COLUMNS>
constexpr MultiplyUnpacked* fastest_for_unpacked() {
    if constexpr (HAS_TILES)
        return multiply_on_tiles<Kind::GROUP, Kind::HAS_MINIMUM, COLUMNS>;
    else
        return multiply_unpacked<Kind, COLUMNS, TILE_OF_ROWS>;
}

template <class Source>
constexpr auto dequantize_on_tiles() {
    using Dequantize = void(vi*, const vi*, const uint8_t*, int64_t, int64_t, const uint8_t*);
    if constexpr (HAS_TILES)
        return dequantize_blocks<Source>;
    else
        return (Dequantize*)nullptr;
}

// The functions above for a type of blocks, where they lie or in strips.
struct BlockFunctions {
    int weights, bytes;  // of a block
    int group, offset;
    void (*unpack)(vf*, const uint8_t*, int64_t, int64_t, const uint8_t*);
    void (*multiply[FEW_ROWS])(const RowBlock*, int64_t, vf*, int64_t, const uint8_t*, int64_t, int64_t, const uint8_t*);
    MultiplyUnpacked* multiply_unpacked[2];
    void (*dequantize)(vi*, const vi*, const uint8_t*, int64_t, int64_t, const uint8_t*);  // null without tiles
};

template <class Source, int... FEW>
constexpr BlockFunctions block_functions(std::integer_sequence<int, FEW...>) {
    using Type = typename Source::Type;
    using Kind = KindOf<Type>;
    return {Type::WEIGHTS,
            Type::BYTES,
            Type::GROUP,
            Type::OFFSET,
            unpack_blocks<Source>,
            {multiply_blocks<Source, FEW + 1>...},
            {fastest_for_unpacked<Kind, 1>(), fastest_for_unpacked<Kind, 2>()},
            dequantize_on_tiles<Source>()};
}

inline const BlockFunctions& block_functions(int64_t number, bool is_strip) {
    const BlockFunctions* found = nullptr;
    with_block_type(number, [&](auto type) {
        static constexpr BlockFunctions OF_ROWS =
            block_functions<Rows<decltype(type)>>(std::make_integer_sequence<int, FEW_ROWS_IN_PLACE>{});
        static constexpr BlockFunctions OF_STRIPS =
            block_functions<Strip<decltype(type)>>(std::make_integer_sequence<int, FEW_ROWS>{});
        found = is_strip ? &OF_STRIPS : &OF_ROWS;
    });
    return *found;
}

// W rows of a matrix, or fewer for some elements of a vector: `first` up to `end`.
struct BlockSlice {
    const uint8_t* at;
    int64_t type;
    int64_t row_bytes;
    int first, end;

    bool is_whole() const { return end - first == W; }
};

// The slices of one vector of a panel.
struct BlockSlices {
    BlockSlice some[W];
    int count = 0;

    const uint8_t* begin() const { return count ? some[0].at : nullptr; }
};

// Returns the slices of vector `half` of panel `i`, where the parts lie.
BlockSlices slices_of_parts(const BlockMatrix& w, int64_t i, int half) {
    BlockSlices slices;
    const int64_t begin = w.is_pair ? half * (w.outputs / 2) + i * W : i * NR + half * W;
    const int64_t end = std::min(begin + W, w.is_pair && half == 0 ? w.outputs / 2 : w.outputs);
    int64_t first = 0;  // the first row of the part
    for (int64_t p = 0; p < w.num_parts; ++p) {
        const BlockPart& part = w.parts[p];
        const int64_t from = std::max(begin, first), to = std::min(end, first + part.outputs);
        if (from < to)
            slices.some[slices.count++] = {part.data + (from - first) * part.row_bytes, part.type, part.row_bytes,
                                           int(from - begin), int(to - begin)};
        first += part.outputs;
    }
    return slices;
}

// Returns the slices of vector `half` of panel `i`: a strip, or those where the parts lie.
inline BlockSlices block_slices(const BlockMatrix& w, int64_t i, int half) {
    if (!w.strips) return slices_of_parts(w, i, half);
    BlockSlices slices;
    const BlockStrip& strip = w.strips[2 * i + half];
    if (strip.at) slices.some[slices.count++] = {strip.at, strip.type, 0, 0, W};
    return slices;
}

// Returns the bytes of panel `i`: of the first slice of each vector.
SoonBytes bytes_of_panel(const BlockMatrix& w, int64_t i) {
    SoonBytes soon;
    for (int half = 0; half < 2; ++half) {
        const BlockSlices slices = block_slices(w, i, half);
        if (!slices.count) continue;
        const BlockSlice& slice = slices.some[0];
        const BlockFunctions& functions = block_functions(slice.type, w.strips);
        const int64_t row_bytes = w.inputs / functions.weights * functions.bytes;
        (half == 0 ? soon.part : soon.rest) = {slice.at, slice.at + (slice.end - slice.first) * row_bytes};
    }
    return soon;
}

// Copies the rows of a slice to `copy` [W, bytes of a row].
inline void copy_rows(const BlockSlice& slice, uint8_t* copy) {
    std::memcpy(copy + slice.first * slice.row_bytes, slice.at, (slice.end - slice.first) * slice.row_bytes);
}

// Returns the address from which W rows can be read: a copy of the rows of a slice that has fewer.
inline const uint8_t* whole_rows(const BlockSlice& slice) {
    if (slice.is_whole()) return slice.at;
    thread_local std::vector<uint8_t> copy;
    copy.assign(W * slice.row_bytes, 0);
    copy_rows(slice, copy.data());
    return copy.data();
}

// The slices of both vectors of a panel.
struct PanelSlices {
    BlockSlices halves[2];
    const uint8_t* after;  // the address of what is read after the panel
    bool are_strips;

    PanelSlices(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next)
        : halves{block_slices(w, i, 0), block_slices(w, i, 1)},
          after(address_of_panel(*next.matrix, next.panel)),
          are_strips(w.strips) {}

    // Calls `f` for each slice, with its functions and the address of the rows that are read after it.
    template <class F>
    void each(F&& f) const {
        for (int half = 0; half < 2; ++half)
            for (int s = 0; s < halves[half].count; ++s) {
                const BlockSlice& slice = halves[half].some[s];
                f(half, slice, block_functions(slice.type, are_strips),
                  half == 0 && halves[1].count ? halves[1].begin() : after);
            }
    }
};

// Replaces the elements of `sums` that belong to the slice.
inline void put_slice(const BlockSlice& slice, vf value, vf& sums) {
    if (slice.is_whole()) {
        sums = value;
        return;
    }
    for (int i = slice.first; i < slice.end; ++i) sums[i] = value[i];
}

// The rows whose sums are taken at once, or a few more: their sums stay in the L1 cache.
constexpr int ROWS_AT_ONCE = 64;

// Multiplies all rows with COLUMNS * W unpacked rows of a matrix: calls `take(first, end, vectors)` for some rows each
// time. Meanwhile what comes `soon` is prefetched.
template <int COLUMNS, class Take>
void multiply_tiles(const BlockFunctions& functions, const vf* const (&panels)[COLUMNS], int64_t inputs,
                    const RowBlock* x, int64_t stride, int64_t rows, SoonBytes& soon, Take&& take) {
    const int64_t tiles = (rows + TILE_OF_ROWS - 1) / TILE_OF_ROWS;
    soon.share_out(tiles * (inputs / functions.group));
    vf out[ROWS_AT_ONCE + TILE_OF_ROWS][COLUMNS];
    for (int64_t tile = 0, first = 0, row = 0; tile < tiles; ++tile) {
        const int64_t end = rows * (tile + 1) / tiles;
        functions.multiply_unpacked[COLUMNS - 1](end - row, panels, inputs, functions.offset, x + row * stride, stride,
                                                 out[row - first], soon);
        row = end;
        if (row < rows && row < first + ROWS_AT_ONCE) continue;
        take(first, row, out);
        first = row;
    }
}

// Does what `multiply_panel` does with strips for a few rows. With few inputs a panel takes a fraction of a microsecond, so
// it must be found fast.
inline void multiply_strips(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next, const RowBlock* x,
                            int64_t stride, int64_t rows, TakeSums take) {
    const BlockStrip &strip0 = w.strips[2 * i], &strip1 = w.strips[2 * i + 1];
    vf got[2 * FEW_ROWS] = {}, sums[FEW_ROWS][2];
    auto multiply = [&](const BlockStrip& strip, int64_t count, vf* out) {
        block_functions(strip.type, true).multiply[rows - 1](x, stride, out, count, strip.at, 0, w.inputs, nullptr);
    };
    const bool are_alike = strip1.at && strip1.type == strip0.type;
    multiply(strip0, are_alike ? 2 : 1, got);
    if (strip1.at && !are_alike) multiply(strip1, 1, got + rows);
    for (int half = 0; half < 2; ++half) {
        const vf bias = w.bias ? load(w.bias + i * NR + half * W) : vf{};
        for (int64_t r = 0; r < rows; ++r) sums[r][half] = got[half * rows + r] + bias;
    }
    if (next.matrix != &w) prefetch_all(address_of_panel(*next.matrix, next.panel), STRIP_BYTES_AHEAD);
    take(0, rows, sums[0]);
}

}  // namespace

void multiply_panel(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next, const RowBlock* x, int64_t stride,
                    int64_t rows, TakeSums take) {
    if (w.strips && rows <= FEW_ROWS) return multiply_strips(w, i, next, x, stride, rows, take);
    const PanelSlices panel(w, i, next);
    const BlockSlices(&slices)[2] = panel.halves;
    vf bias[2] = {};
    if (w.bias)
        for (int half = 0; half < 2; ++half) bias[half] = load(w.bias + i * NR + half * W);
    // The sums of all rows, if they are not taken tile by tile.
    auto all_sums = [&] {
        thread_local std::vector<vf> sums;
        fit(sums, 2 * rows);
        if (!slices[1].count)
            for (int64_t r = 0; r < rows; ++r) sums[2 * r + 1] = vf{};
        return sums.data();
    };
    if (rows <= FEW_ROWS_IN_PLACE) {
        vf* const sums = all_sums();
        panel.each([&](int half, const BlockSlice& slice, const BlockFunctions& functions, const uint8_t* next) {
            vf got[FEW_ROWS];
            functions.multiply[rows - 1](x, stride, got, 1, whole_rows(slice), slice.row_bytes, w.inputs, next);
            for (int64_t r = 0; r < rows; ++r) put_slice(slice, got[r] + bias[half], sums[2 * r + half]);
        });
        return take(0, rows, sums);
    }
    thread_local std::vector<vf> unpacked;
    const int64_t size = w.inputs / 16 * MOST_VECTORS;
    fit(unpacked, 2 * size);
    SoonBytes soon = bytes_of_panel(*next.matrix, next.panel);
    const BlockSlice &slice0 = slices[0].some[0], &slice1 = slices[1].some[0];
    if (slices[0].count == 1 && slices[1].count == 1 && slice0.type == slice1.type) {
        panel.each([&](int half, const BlockSlice& slice, const BlockFunctions& functions, const uint8_t* next) {
            functions.unpack(unpacked.data() + half * size, whole_rows(slice), slice.row_bytes, w.inputs, next);
        });
        const vf* const panels[2] = {unpacked.data(), unpacked.data() + size};
        return multiply_tiles(block_functions(slice0.type, w.strips), panels, w.inputs, x, stride, rows, soon,
                              [&](int64_t first, int64_t end, vf (*got)[2]) {
                                  for (int64_t r = 0; r < end - first; ++r)
                                      for (int half = 0; half < 2; ++half) got[r][half] += bias[half];
                                  take(first, end, got[0]);
                              });
    }
    vf* const sums = all_sums();
    panel.each([&](int half, const BlockSlice& slice, const BlockFunctions& functions, const uint8_t* next) {
        functions.unpack(unpacked.data(), whole_rows(slice), slice.row_bytes, w.inputs, next);
        const vf* const panels[1] = {unpacked.data()};
        multiply_tiles(functions, panels, w.inputs, x, stride, rows, soon,
                       [&](int64_t first, int64_t end, vf (*got)[1]) {
                           for (int64_t r = first; r < end; ++r)
                               put_slice(slice, got[r - first][0] + bias[half], sums[2 * r + half]);
                       });
    });
    take(0, rows, sums);
}

const bf16* dequantized_panel(const BlockMatrix& w, int64_t i, const Next<BlockMatrix>& next) {
    thread_local std::vector<vi> panel;
    fit(panel, w.inputs);
    const PanelSlices slices(w, i, next);
    if (!slices.halves[1].count)
        for (int64_t k = 1; k < w.inputs; k += 2) panel[k] = vi{};
    slices.each([&](int half, const BlockSlice& slice, const BlockFunctions& functions, const uint8_t* next) {
        const vi mask = (LANES >= slice.first) & (LANES < slice.end);
        functions.dequantize(panel.data() + half, slice.is_whole() ? nullptr : &mask, whole_rows(slice), slice.row_bytes,
                             w.inputs, next);
    });
    return (const bf16*)panel.data();
}

const uint8_t* address_of_panel(const BlockMatrix& w, int64_t i) {
    return w.strips ? w.strips[2 * i].at : slices_of_parts(w, i, 0).begin();
}

int64_t strip_bytes(const BlockMatrix& w) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < 2 * w.panels(); ++i) {
        const BlockSlices slices = slices_of_parts(w, i / 2, int(i % 2));
        for (int s = 1; s < slices.count; ++s)
            if (slices.some[s].type != slices.some[0].type) return 0;
        if (slices.count) bytes += W * slices.some[0].row_bytes;
    }
    return bytes;
}

void write_strips(const BlockMatrix& w, uint8_t* out, BlockStrip* strips, int threads) {
    const int64_t count = 2 * w.panels();
    for (int64_t i = 0; i < count; ++i) {
        const BlockSlices slices = slices_of_parts(w, i / 2, int(i % 2));
        strips[i] = {};
        if (!slices.count) continue;
        strips[i] = {out, slices.some[0].type};
        out += W * slices.some[0].row_bytes;
    }
    team().run(threads, [&](Member& member) {
        std::vector<uint8_t> copy;
        member.each_in_stretches(count, [&](int64_t i) {
            const BlockSlices slices = slices_of_parts(w, i / 2, int(i % 2));
            if (!slices.count) return;
            const BlockSlice& first = slices.some[0];
            const uint8_t* rows = first.at;
            if (!first.is_whole()) {
                copy.assign(W * first.row_bytes, 0);
                for (int s = 0; s < slices.count; ++s) copy_rows(slices.some[s], copy.data());
                rows = copy.data();
            }
            with_block_type(first.type, [&](auto type) {
                using Type = decltype(type);
                uint8_t* to = const_cast<uint8_t*>(strips[i].at);
                for (int64_t byte = 0; byte < first.row_bytes; byte += Type::BYTES)
                    write_strip<Type>({rows + byte, first.row_bytes}, to + W * byte);
            });
        });
    });
}

void dequantize(const BlockPart& weight, int64_t row, int64_t inputs, float* out) {
    const BlockFunctions& functions = block_functions(weight.type, false);
    const int words = functions.group / 4;
    const bool has_minimum = functions.offset < 0, is_signed = HAS_TILES && !has_minimum;
    // With its highest bit flipped, a signed byte is 128 more.
    const uint8_t flipped = is_signed ? 128 : 0;
    const int zero = is_signed ? 128 : has_minimum ? 0 : 1 << functions.offset;
    const uint8_t* at = weight.data + row * weight.row_bytes;
    vf unpacked[MOST_WEIGHTS / 16 * MOST_VECTORS];
    for (int64_t k = 0; k < inputs; k += functions.weights, at += functions.bytes) {
        functions.unpack(unpacked, at, 0, functions.weights, at);  // each element of a vector gets the same row
        const vf* group = unpacked;
        for (int64_t index = 0; index < functions.weights / functions.group; ++index) {
            float* to = out + k + functions.group * (words == 8 ? group_at<32>(index) : group_at<16>(index));
            const float scale = group[words][0], minimum = has_minimum ? group[words + 1][0] : 0;
            for (int word = 0; word < words; word += 4, to += 16) {
                typedef int32_t Four __attribute__((vector_size(16)));
                auto first = [&](int i) { return ((vi)group[word + i])[0]; };
                uint8_t bytes[16];
                write(bytes, Four{first(0), first(1), first(2), first(3)});
                for (int i = 0; i < 16; ++i) to[i] = scale * float((bytes[i] ^ flipped) - zero) - minimum;
            }
            group += words + 1 + has_minimum;
        }
    }
}

}  // namespace vmp
