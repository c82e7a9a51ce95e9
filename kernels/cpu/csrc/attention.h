// Attention over the paged cache, for decodes and prefills alike (PagedAttention, Kwon et al. 2023, with the online
// softmax of Milakov & Gimelshein 2018).
//
// A tile of queries that share a KV head goes over the keys of its row in tiles of KEYS, each multiplied like a weight
// matrix. Tiles of keys, and the parts of PART keys whose results are merged at the end, begin at multiples of their
// size from the start of the sequence. So results are batch-invariant, and the same in any chunk of a prompt.
//
// A cache may have its keys in groups: the words of W keys lie side by side, as in a packed matrix. So nothing has to be
// packed for a decode, which multiplies each key with few queries.
//
// A cache of 8 bits has integers from -127 to 127 in place of the elements of a key or value, and behind them a float, the
// scale by which they are multiplied. In groups, the W scales lie behind the elements of all W keys or values, and each
// element of a key lies beside those of the other keys. The scale of a key multiplies its score, and that of a value the
// weight of the value, so products take the integers, which every type of queries holds exactly.
#pragma once

#include <limits>
#include <vector>

#include "linear.h"

namespace vmp {

// Where the tokens of a step stand in the cache; the fields are those of kernels/attention_metadata.py.
struct AttentionMetadata {
    int64_t num_tokens;
    int64_t num_rows;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    int64_t block_size;
    const int64_t* cell_mapping;
    int64_t isolates;
    const int32_t* attention_ends;  // [num_tokens], or null: each query sees the keys up to its own position
    int64_t has_int8_caches;        // whether caches hold integers of 8 bits with scales, not elements of the queries' type

    // The end of the keys that a query token of the step sees, which is at `position` of its row.
    int64_t end_of(int64_t token, int64_t position) const {
        return attention_ends ? attention_ends[token] : position + 1;
    }
};

struct Heads {
    int64_t queries;
    int64_t keys;
    int64_t key_dim;
    int64_t value_dim;
    int64_t window;  // 0: none
    float scale;
    float soft_cap;  // 0: none

    int64_t group() const { return queries / keys; }
    int64_t padded_value_dim() const { return (value_dim + NR - 1) / NR * NR; }
    int64_t partial_size() const { return padded_value_dim() + 2; }
};

// Consecutive queries of a row, which attend to part number `part` of its keys, or to all keys if `parts` is 1.
struct QueryTile {
    int32_t row;
    int32_t first;  // query token of the step
    int32_t count;
    int32_t part;
    int32_t parts;    // into which the keys of the row are divided
    int64_t partial;  // index of the first query's result of the first part; the results of a query lie side by side
};

// The work of one step, as `plan` divides it.
struct Attention {
    std::vector<QueryTile> tiles;
    std::vector<QueryTile> merges;  // one entry per query token whose keys were divided
    int64_t partials = 0;           // results of parts, per query head
};

// Divides the queries of a step into tiles, and the long keys of a tile that has its row for itself, such as a decode
// with drafts, into parts. If the step isolates, each tile has one query, so that no query is multiplied with later keys.
Attention plan(const AttentionMetadata& step, const Heads& heads);

// Writes a key to its cell of a group; `group` is that of one head.
template <class T>
inline void put_in_group(const T* key, int64_t dim, int64_t cell, T* group) {
    for (int64_t i = 0; i < dim; i += KP<T>)
        std::memcpy(group + i * W + cell % W * KP<T>, key + i, sizeof(T) * KP<T>);
}

// The bytes of the scale of a key or value in a cache of 8 bits.
constexpr int64_t SCALE_BYTES = sizeof(float);

// Rounds a key or value to integers of 8 bits, and writes them to `out`, `stride` bytes apart. Returns the scale; NaN if
// any element is not finite.
template <class T>
inline float quantize_cell(const T* x, int64_t dim, int8_t* out, int64_t stride) {
    constexpr float MOST = 127;
    // Added to a value and subtracted again, it rounds to the nearest integer, ties to even.
    constexpr float ROUNDS = 0x1.8p23f;
    auto part = [&](int64_t i) { return load_some(x + i, int(std::min<int64_t>(W, dim - i))); };
    vi most = {};
    for (int64_t i = 0; i < dim; i += W) most = larger(most, sizes_of(part(i)));
    const float bound = largest(most);
    const bool is_finite = bound < std::numeric_limits<float>::infinity();
    const float scale = bound / MOST;
    // An element that is too small for its scale to be a normal number becomes 0.
    const float units = is_finite && scale >= std::numeric_limits<float>::min() ? MOST / bound : 0;
    for (int64_t i = 0; i < dim; i += W) {
        const vf value = is_finite ? part(i) : vf{};
        const vc wholes = __builtin_convertvector(__builtin_convertvector(value * units + ROUNDS - ROUNDS, vi), vc);
        if (stride == 1 && i + W <= dim)
            write(out + i, wholes);
        else
            for (int64_t n = 0; n < std::min<int64_t>(W, dim - i); ++n) out[(i + n) * stride] = wholes[n];
    }
    return is_finite ? scale : std::numeric_limits<float>::quiet_NaN();
}

// The caches of one layer, whose elements are of type T, or int8 with scales.
template <class T>
struct Caches {
    void* k;
    void* v;
    bool in_groups;  // whether keys are in groups, and values of 8 bits too; only if W divides the size of blocks
    bool is_int8;

    // Writes the key of a token to its cell.
    void put_key(const Heads& heads, int64_t head, int64_t cell, const T* key) const {
        const int64_t dim = heads.key_dim;
        if (is_int8)
            put_int8((int8_t*)k, heads.keys, head, cell, key, dim, in_groups ? cell % W : 0, in_groups ? W : 1);
        else if (in_groups)
            put_in_group(key, dim, cell, (T*)k + (cell / W * heads.keys + head) * W * dim);
        else
            std::memcpy((T*)k + (cell * heads.keys + head) * dim, key, sizeof(T) * dim);
    }

    void put_value(const Heads& heads, int64_t head, int64_t cell, const T* value) const {
        const int64_t dim = heads.value_dim;
        if (is_int8)
            put_int8((int8_t*)v, heads.keys, head, cell, value, dim, in_groups ? cell % W * dim : 0, 1);
        else
            std::memcpy((T*)v + (cell * heads.keys + head) * dim, value, sizeof(T) * dim);
    }

   private:
    // Writes the integers of a key or value, from byte `offset` of its group on, and the scale.
    void put_int8(int8_t* cache, int64_t num_heads, int64_t head, int64_t cell, const T* x, int64_t dim, int64_t offset,
                  int64_t stride) const {
        const int64_t size = in_groups ? W : 1;
        int8_t* group = cache + (cell / size * num_heads + head) * size * (dim + SCALE_BYTES);
        const float scale = quantize_cell(x, dim, group + offset, stride);
        write(group + size * dim + cell % size * SCALE_BYTES, scale);
    }
};

// Computes the attention of all queries of a step; `todo` is its plan.
template <class T>
void attend_all(Member& member, const AttentionMetadata& step, const Heads& heads, const Attention& todo, const T* q,
                int64_t q_stride, const Caches<T>& caches, T* out, int64_t out_stride, float* partials);

}  // namespace vmp
