// Token masks: bit t % 32 of word t / 32 is set if token t is allowed. A forbidden token's logit becomes -inf.
#pragma once

#include <vector>

#include "simd.h"
#include "team.h"

namespace vmp {

constexpr int64_t MASK_WORD = 32;        // tokens of a word of a mask
constexpr int64_t MASK_PART_WORDS = 64;  // words that a thread takes at a time

// Writes -inf over the logits whose bit of `word` is not set; `logits` are the first `count` of MASK_WORD tokens. The
// other logits keep their bits, also those of a NaN.
template <class T>
inline void mask_word(T* logits, uint32_t word, int64_t count) {
    typedef std::conditional_t<std::is_same_v<T, float>, uint32_t, uint16_t> Bits;
    typedef std::conditional_t<std::is_same_v<T, float>, vu, vh> Vector;
    if (count < MASK_WORD) {
        T some[MASK_WORD] = {};
        std::memcpy(some, logits, sizeof(T) * count);
        mask_word(some, word, MASK_WORD);
        std::memcpy(logits, some, sizeof(T) * count);
        return;
    }
    const Vector infinity = Vector{} + Bits(0xff800000u >> (32 - 8 * sizeof(T)));
    constexpr Vector lanes = vector_of<Vector>([](int i) { return 1u << i; });
    for (int64_t i = 0; i < MASK_WORD; i += W) {
        const Bits bits = Bits(word >> i);
        const Vector is_allowed = (Vector)(((Vector{} + bits) & lanes) != Vector{});
        write(logits + i, (read<Vector>(logits + i) & is_allowed) | (infinity & ~is_allowed));
    }
}

// Masks of some rows; mirrors `kernels.sampling.TokenMasks`.
struct TokenMasks {
    const uint32_t* words;  // [count, num_words]
    int64_t num_words;
    const int64_t* rows;  // the row that each mask applies to
    int64_t count;

    // Returns the mask of each of `num_rows` rows, null for a row without.
    std::vector<const uint32_t*> of_rows(int64_t num_rows) const {
        std::vector<const uint32_t*> masks(num_rows);
        for (int64_t i = 0; i < count; ++i) masks[rows[i]] = words + i * num_words;
        return masks;
    }
};

// Returns which of the W tokens from `token` on are allowed; W divides `token`.
inline vi allowed(const uint32_t* mask, int64_t token) {
    constexpr vu lanes = vector_of<vu>([](int i) { return 1u << i; });
    return (vi)((((vu{} + (mask[token / MASK_WORD] >> token % MASK_WORD)) & lanes) != vu{}));
}

// Applies `masks` [count, num_words] to the rows `rows` [count] of `logits` [n, vocab_size].
template <class T>
void apply_token_masks(T* logits, int64_t vocab_size, const uint32_t* masks, int64_t num_words, const int64_t* rows,
                       int64_t count, int threads) {
    const int64_t words = (vocab_size + MASK_WORD - 1) / MASK_WORD;
    const int64_t parts = (words + MASK_PART_WORDS - 1) / MASK_PART_WORDS;
    team().run(threads, [&](Member& member) {
        member.each_in_stretches(count * parts, [&](int64_t i) {
            const uint32_t* mask = masks + i / parts * num_words;
            T* row = logits + rows[i / parts] * vocab_size;
            const int64_t first = i % parts * MASK_PART_WORDS;
            for (int64_t w = first, end = std::min(words, first + MASK_PART_WORDS); w < end; ++w)
                if (mask[w] != 0xffffffffu)
                    mask_word(row + w * MASK_WORD, mask[w], std::min(MASK_WORD, vocab_size - w * MASK_WORD));
        });
    });
}

}  // namespace vmp
