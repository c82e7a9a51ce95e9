// Attention over the paged cache, for decodes and prefills alike (PagedAttention, Kwon et al. 2023, with the online
// softmax of Milakov & Gimelshein 2018).
//
// A tile of queries that share a KV head goes over the keys of its row in tiles of KEYS, each multiplied like a weight
// matrix. Tiles of keys, and the parts of PART keys whose results are merged at the end, begin at multiples of their
// size from the start of the sequence. So results are batch-invariant, and the same in any chunk of a prompt.
//
// A cache may have its keys in groups: the words of W keys lie side by side, as in a packed matrix. So nothing has to be
// packed for a decode, which multiplies each key with few queries.
#pragma once

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

// The caches of one layer.
template <class T>
struct Caches {
    T* k;
    T* v;
    bool groups_keys;  // only if W divides the size of blocks

    // Writes the key of a token to its cell.
    void put_key(const Heads& heads, int64_t head, int64_t cell, const T* key) const {
        const int64_t dim = heads.key_dim;
        if (groups_keys)
            put_in_group(key, dim, cell, k + (cell / W * heads.keys + head) * W * dim);
        else
            std::memcpy(k + (cell * heads.keys + head) * dim, key, sizeof(T) * dim);
    }

    void put_value(const Heads& heads, int64_t head, int64_t cell, const T* value) const {
        std::memcpy(v + (cell * heads.keys + head) * heads.value_dim, value, sizeof(T) * heads.value_dim);
    }
};

// Computes the attention of all queries of a step; `todo` is its plan.
template <class T>
void attend_all(Member& member, const AttentionMetadata& step, const Heads& heads, const Attention& todo, const T* q,
                int64_t q_stride, const Caches<T>& caches, T* out, int64_t out_stride, float* partials);

}  // namespace vmp
