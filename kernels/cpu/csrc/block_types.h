// The block types of GGUF files (kernels/block_weight.py defines them), unpacked for W rows of a matrix at once.
//
// A type has WEIGHTS weights in BYTES bytes, in groups of GROUP inputs: weight = scale * (integer - 2^OFFSET) - minimum,
// with integers of BITS bits, and without 2^OFFSET if OFFSET is negative. `unpack(block, take)` reads the same block of W
// rows, which is a RowsBlock or a StripBlock, and calls `take(words, scale, minimum)` for each group, in the order that
// `group_at` gives. An element of a vector belongs to a row; `words` hold the integers of four inputs in each element.
#pragma once

#include "simd.h"

// For functions that take so many instructions with vectors of 4 elements, or with the model's where the processor has
// shorter ones, that a call costs nothing. Inlined, they would be several times as much code.
#if defined(__AVX512F__) || (defined(__AVX2__) && !defined(VMP_TILE_MODEL))
#define INLINE_IF_WIDE ALWAYS_INLINE
#else
#define INLINE_IF_WIDE inline __attribute__((noinline))
#endif

namespace vmp {

// Returns element i of each 128 bits of `a` and `b`, in turns: the first two, or the last two.
template <bool LAST>
ALWAYS_INLINE vi zipped(vi a, vi b) {
    constexpr vi index = vector_of<vi>([](int i) { return i / 4 * 4 + i % 4 / 2 + (LAST ? 2 : 0) + i % 2 * W; });
    return __builtin_shuffle(a, b, index);
}

typedef int64_t vl __attribute__((vector_size(4 * W)));

// Returns the first, or the last, two elements of each 128 bits of `a`, and then of `b`.
template <bool LAST>
ALWAYS_INLINE vi joined(vi a, vi b) {
    constexpr vl index = vector_of<vl>([](int i) { return i / 2 * 2 + (LAST ? 1 : 0) + i % 2 * (W / 2); });
    return (vi)__builtin_shuffle((vl)a, (vl)b, index);
}

#if defined(__AVX2__)
// Reads 16 bytes of a row, and of the fourth row after it.
ALWAYS_INLINE __m256i pair_of_rows(const uint8_t* row, int64_t stride) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(read<__m128i>(row)), read<__m128i>(row + 4 * stride), 1);
}
#endif

// Reads 16 bytes of each of W rows: `words[j]` gets word j of the rows.
ALWAYS_INLINE void transpose(const uint8_t* at, int64_t stride, vi (&words)[4]) {
    vi some[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const uint8_t* row = at + i * stride;
#if defined(__AVX512F__)
        some[i] = (vi)__builtin_shufflevector((__v4di)pair_of_rows(row, stride),
                                              (__v4di)pair_of_rows(row + 8 * stride, stride), 0, 1, 2, 3, 4, 5, 6, 7);
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)  // the model has wider vectors
        some[i] = (vi)pair_of_rows(row, stride);
#else
        for (int lane = 0; lane < W / 4; ++lane)
            std::memcpy((uint8_t*)&some[i] + 16 * lane, row + 4 * lane * stride, 16);
#endif
    }
    const vi low0 = zipped<false>(some[0], some[1]), low1 = zipped<false>(some[2], some[3]);
    const vi high0 = zipped<true>(some[0], some[1]), high1 = zipped<true>(some[2], some[3]);
    words[0] = joined<false>(low0, low1);
    words[1] = joined<true>(low0, low1);
    words[2] = joined<false>(high0, high1);
    words[3] = joined<true>(high0, high1);
}

// Reads 32 bytes of each row.
ALWAYS_INLINE void transpose(const uint8_t* at, int64_t stride, vi (&words)[8]) {
    transpose(at, stride, (vi(&)[4])words[0]);
    transpose(at + 16, stride, (vi(&)[4])words[4]);
}

// Converts the float16 in the low half of each word.
ALWAYS_INLINE vf float16_of(vi words) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)__builtin_convertvector(words, vh));
#elif defined(__AVX2__) && defined(__F16C__) && !defined(VMP_TILE_MODEL)  // the model has wider vectors
    const auto halves = (__m256i)(words & 0xffff);
    return (vf)_mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
    // The product restores the exponent, for subnormal numbers too. Infinity and NaN get the exponent of both.
    const vf size = (vf)((words & 0x7fff) << 13) * 0x1p112f;
    const vi special = (words & 0x7c00) == 0x7c00;
    return (vf)((vi)size | (special & 0x7f800000) | (words & 0x8000) << 16);
#endif
}

// Returns the upper halves of `low` and the lower halves of `high` as one number.
ALWAYS_INLINE vi across(vi low, vi high) { return (vi)((vu)low >> 16) | high << 16; }

// Some bytes of a block of W rows in a file, from byte FROM on: `word` and `half` return the 32 or 16 bits at a byte of
// the block, 16 bits in the low half of each element.
template <int FROM>
struct RowsPart {
    vi words[4];

    ALWAYS_INLINE vi word(int byte) const {
        const int i = (byte - FROM) / 4;
        return (byte - FROM) % 4 ? across(words[i], words[i + 1]) : words[i];
    }
    ALWAYS_INLINE vi half(int byte) const {
        const vi both = words[(byte - FROM) / 4];
        return (byte - FROM) % 4 ? (vi)((vu)both >> 16) : both;
    }
};

// The same block of W rows, `stride` bytes apart, as they lie in files.
struct RowsBlock {
    const uint8_t* at;
    int64_t stride;

    template <int N>
    ALWAYS_INLINE void words(int byte, vi (&out)[N]) const {
        transpose(at + byte, stride, out);
    }
    // Returns the 16 bytes from byte FROM on.
    template <int FROM>
    ALWAYS_INLINE RowsPart<FROM> part() const {
        RowsPart<FROM> some;
        transpose(at + FROM, stride, some.words);
        return some;
    }
};

// The same block of W rows in a strip: vectors with the same word of each row. A block whose size four does not divide
// begins or ends with a number of 16 bits, which lies there for all rows.
template <class Type>
struct StripBlock {
    const uint8_t* at;

    template <int N>
    ALWAYS_INLINE void words(int byte, vi (&out)[N]) const {
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) out[i] = word(byte + 4 * i);
    }
    template <int>
    ALWAYS_INLINE const StripBlock& part() const {
        return *this;
    }
    ALWAYS_INLINE vi word(int byte) const { return read<vi>(at + W * byte); }
    ALWAYS_INLINE vi half(int byte) const {
        if (byte == Type::HALF) return __builtin_convertvector(read<vh>(at + W * byte), vi);
        const int rest = (byte - (Type::HALF == 0 ? 2 : 0)) % 4;
        return rest ? (vi)((vu)word(byte - rest) >> 16) : word(byte);
    }
};

// Writes the block of W rows at `from` as a StripBlock.
template <class Type>
void write_strip(const RowsBlock& from, uint8_t* out) {
    constexpr int FIRST = Type::HALF == 0 ? 2 : 0, END = Type::HALF > 0 ? Type::HALF : Type::BYTES;
    vi some[4];
    auto put = [&](int byte, int count) {
        for (int i = 4 - count; i < 4; ++i) write(out + W * (byte + 4 * i), some[i]);
    };
    int byte = FIRST;
    for (; byte + 16 <= END; byte += 16) {
        from.words(byte, some);
        put(byte, 4);
    }
    if (const int rest = (END - byte) / 4) {
        from.words(END - 16, some);
        put(END - 16, rest);
    }
    if (Type::HALF >= 0)
        for (int row = 0; row < W; ++row)
            std::memcpy(out + W * Type::HALF + 2 * row, from.at + row * from.stride + Type::HALF, 2);
}

// Returns byte i of each word.
ALWAYS_INLINE vi byte_of(vi words, int i) { return (vi)((vu)words >> (8 * i)) & 255; }

ALWAYS_INLINE vi low_nibbles(vi words) { return words & 0x0f0f0f0f; }
ALWAYS_INLINE vi high_nibbles(vi words) { return (words >> 4) & 0x0f0f0f0f; }

// Returns the groups of a block of 32: the low, and then the high nibbles of the 16 bytes from `byte` on.
template <class Block>
ALWAYS_INLINE void nibbles(const Block& block, int byte, vi (&words)[8]) {
    vi packed[4];
    block.words(byte, packed);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        words[i] = low_nibbles(packed[i]);
        words[i + 4] = high_nibbles(packed[i]);
    }
}

// Adds the fifth bits, of which `bits` has one for each of 32 inputs.
ALWAYS_INLINE void add_fifth_bits(vi bits, vi (&words)[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#if defined(__AVX512F__)
        constexpr vi spread = vector_of<vi>([](int n) { return (n * 0x02040810) & 0x10101010; });
        words[i] |= __builtin_shuffle(spread, (vi)((vu)bits >> (4 * i)) & 15);
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)
        // Each byte gets a copy of the byte with its bit.
        const auto bytes = (__m256i)(LANES % 4 * 0x04040404 + i / 2 * 0x01010101);
        const auto own = _mm256_set1_epi32(i % 2 ? int32_t(0x80402010) : 0x08040201);
        const auto copies = _mm256_and_si256(_mm256_shuffle_epi8((__m256i)bits, bytes), own);
        words[i] |= (vi)_mm256_cmpeq_epi8(copies, own) & 0x10101010;
#else
        // The product puts copies of the four bits 7 bits apart, so that each byte has its bit in a copy.
        words[i] |= (((vi)((vu)bits >> (4 * i)) & 15) * 0x02040810) & 0x10101010;
#endif
    }
}

// Replaces the 4-bit codes of IQ4_NL and IQ4_XS by 128 more than their values.
INLINE_IF_WIDE void to_iq4_values(vi (&words)[8]) {
    static constexpr uint8_t VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
#if defined(__AVX512BW__)
    const __m512i values = _mm512_broadcast_i32x4(read<__m128i>(VALUES));
#pragma GCC unroll 8
    for (vi& some : words) some = (vi)_mm512_shuffle_epi8(values, (__m512i)some);
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)
    const __m256i values = _mm256_broadcastsi128_si256(read<__m128i>(VALUES));
#pragma GCC unroll 8
    for (vi& some : words) some = (vi)_mm256_shuffle_epi8(values, (__m256i)some);
#else
    uint8_t bytes[sizeof words];
    std::memcpy(bytes, words, sizeof words);
    for (uint8_t& byte : bytes) byte = VALUES[byte];
    std::memcpy(words, bytes, sizeof words);
#endif
}

template <int WEIGHTS_, int BYTES_, int GROUP_, int BITS_, bool HAS_MINIMUM_>
struct BlockLayout {
    static constexpr int WEIGHTS = WEIGHTS_, BYTES = BYTES_, GROUP = GROUP_;
    static constexpr int BITS = BITS_;  // of an integer
    static constexpr bool HAS_MINIMUM = HAS_MINIMUM_;
    static constexpr int OFFSET = HAS_MINIMUM ? -1 : BITS - 1;
    // Where the block has a number of 16 bits beside words of 32, or -1.
    static constexpr int HALF = BYTES % 4 == 0 ? -1 : WEIGHTS == 32 ? 0 : BYTES - 2;
};

struct Q4_0 : BlockLayout<32, 18, 32, 4, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        nibbles(block, 2, words);
        take(words, float16_of(head.half(0)), vf{});
    }
};

struct Q4_1 : BlockLayout<32, 20, 32, 4, true> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        nibbles(block, 4, words);
        take(words, float16_of(head.half(0)), -float16_of(head.half(2)));
    }
};

struct Q5_0 : BlockLayout<32, 22, 32, 5, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        nibbles(block, 6, words);
        add_fifth_bits(head.word(2), words);
        take(words, float16_of(head.half(0)), vf{});
    }
};

struct Q5_1 : BlockLayout<32, 24, 32, 5, true> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        nibbles(block, 8, words);
        add_fifth_bits(head.word(4), words);
        take(words, float16_of(head.half(0)), -float16_of(head.half(2)));
    }
};

struct Q8_0 : BlockLayout<32, 34, 32, 8, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        block.words(2, words);
#pragma GCC unroll 8
        for (vi& some : words) some ^= int32_t(0x80808080);
        take(words, float16_of(head.half(0)), vf{});
    }
};

struct IQ4_NL : BlockLayout<32, 18, 32, 8, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        vi words[8];
        nibbles(block, 2, words);
        to_iq4_values(words);
        take(words, float16_of(head.half(0)), vf{});
    }
};

struct IQ4_XS : BlockLayout<256, 136, 32, 8, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto head = block.template part<0>();
        const vf d = float16_of(head.half(0));
        const vi high = head.half(2), low = head.word(4);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            vi words[8];
            nibbles(block, 8 + 16 * i, words);
            to_iq4_values(words);
            const vi scale = ((low >> (4 * i)) & 15) | ((high >> (2 * i)) & 3) << 4;
            take(words, d * to_floats(scale - 32), vf{});
        }
    }
};

// The eight scales and minima of Q4_K and Q5_K.
struct KScales {
    vf d, minimum;
    vi scales[2], minima[2];  // four bytes in each element

    template <class Block>
    ALWAYS_INLINE explicit KScales(const Block& block) {
        vi words[4];
        block.words(0, words);
        d = float16_of(words[0]);
        minimum = float16_of(words[0] >> 16);
        scales[0] = words[1] & 0x3f3f3f3f;
        minima[0] = words[2] & 0x3f3f3f3f;
        scales[1] = low_nibbles(words[3]) | ((words[1] >> 2) & 0x30303030);
        minima[1] = high_nibbles(words[3]) | ((words[2] >> 2) & 0x30303030);
    }

    ALWAYS_INLINE vf scale(int i) const { return d * to_floats(byte_of(scales[i / 4], i % 4)); }
    ALWAYS_INLINE vf smallest(int i) const { return minimum * to_floats(byte_of(minima[i / 4], i % 4)); }
};

struct Q4_K : BlockLayout<256, 144, 32, 4, true> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const KScales k(block);
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            vi packed[8], words[8];
            block.words(16 + 16 * i, packed);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) words[j] = low_nibbles(packed[j]);
            take(words, k.scale(i), k.smallest(i));
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) words[j] = high_nibbles(packed[j]);
            take(words, k.scale(i + 1), k.smallest(i + 1));
        }
    }
};

struct Q5_K : BlockLayout<256, 176, 32, 5, true> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const KScales k(block);
        vi bits[8];
        block.words(16, bits);
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            vi packed[8], words[8];
            block.words(48 + 16 * i, packed);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) words[j] = low_nibbles(packed[j]) | ((bits[j] >> i) & 0x01010101) << 4;
            take(words, k.scale(i), k.smallest(i));
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) words[j] = high_nibbles(packed[j]) | ((bits[j] >> (i + 1)) & 0x01010101) << 4;
            take(words, k.scale(i + 1), k.smallest(i + 1));
        }
    }
};

struct Q6_K : BlockLayout<256, 210, 16, 6, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        vi scales[4];
        block.words(192, scales);
        const vf d = float16_of(block.template part<194>().half(208));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2, from = 16 * (i % 2);
            vi low[4], next[4], bits[4], words[4];
            block.words(64 * half + from, low);
            block.words(64 * half + from + 32, next);
            block.words(128 + 32 * half + from, bits);
            auto take_part = [&](int part) {
                const int group = 8 * half + 2 * part + i % 2;
                take(words, d * to_floats(scales[group / 4] << (24 - group % 4 * 8) >> 24), vf{});
            };
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) words[j] = low_nibbles(low[j]) | (bits[j] & 0x03030303) << 4;
            take_part(0);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) words[j] = low_nibbles(next[j]) | (bits[j] & 0x0c0c0c0c) << 2;
            take_part(1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) words[j] = high_nibbles(low[j]) | (bits[j] & 0x30303030);
            take_part(2);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) words[j] = high_nibbles(next[j]) | ((bits[j] >> 2) & 0x30303030);
            take_part(3);
        }
    }
};

struct Q2_K : BlockLayout<256, 84, 16, 2, true> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        vi scales[4];
        block.words(0, scales);
        const auto last = block.template part<68>();
        const vf d = float16_of(last.half(80)), minimum = float16_of(last.half(82));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            vi packed[4], words[4];
            block.words(16 + 16 * i, packed);
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                const int group = i / 2 * 8 + 2 * part + i % 2;
                const vi both = byte_of(scales[group / 4], group % 4);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) words[j] = (packed[j] >> (2 * part)) & 0x03030303;
                take(words, d * to_floats(both & 15), minimum * to_floats(both >> 4));
            }
        }
    }
};

struct Q3_K : BlockLayout<256, 110, 16, 3, false> {
    template <class Block, class Take>
    ALWAYS_INLINE static void unpack(const Block& block, Take&& take) {
        const auto last = block.template part<94>();
        const vf d = float16_of(last.half(108));
        const vi low0 = last.word(96), low1 = last.word(100), high = last.word(104);
        const vi scales[4] = {low_nibbles(low0) | (high & 0x03030303) << 4,
                              low_nibbles(low1) | (high & 0x0c0c0c0c) << 2,
                              high_nibbles(low0) | (high & 0x30303030),
                              high_nibbles(low1) | ((high >> 2) & 0x30303030)};
        vi bits[8];
        block.words(0, bits);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            vi packed[4], words[4];
            block.words(32 + 16 * i, packed);
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) {
                const int group = i / 2 * 8 + 2 * part + i % 2;
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j)
                    words[j] = ((packed[j] >> (2 * part)) & 0x03030303) |
                               ((bits[i % 2 * 4 + j] >> (i / 2 * 4 + part)) & 0x01010101) << 2;
                take(words, d * to_floats(byte_of(scales[group / 4], group % 4) - 32), vf{});
            }
        }
    }
};

// Returns the group that `unpack` takes at `index`; groups are counted from the first of the row.
template <int GROUP>
ALWAYS_INLINE int64_t group_at(int64_t index) {
    return GROUP == 32 ? index : index / 8 * 8 + index % 4 * 2 + index % 8 / 4;
}

// Calls `f` with the type whose number in files is `number`, which kernels/cpu/block_linear.py has checked.
template <class F>
inline void with_block_type(int64_t number, F&& f) {
    switch (number) {
        case 2: return f(Q4_0{});
        case 3: return f(Q4_1{});
        case 6: return f(Q5_0{});
        case 7: return f(Q5_1{});
        case 8: return f(Q8_0{});
        case 10: return f(Q2_K{});
        case 11: return f(Q3_K{});
        case 12: return f(Q4_K{});
        case 13: return f(Q5_K{});
        case 14: return f(Q6_K{});
        case 20: return f(IQ4_NL{});
        case 23: return f(IQ4_XS{});
    }
}

}  // namespace vmp
