// Attention over the paged cache, for decodes and prefills alike (PagedAttention, Kwon et al. 2023, with the online
// softmax of Milakov & Gimelshein 2018).
//
// A tile of queries that share a KV head goes over the keys of its row in tiles of KEYS, each packed like a weight
// matrix. Tiles of keys, and the parts of PART keys whose results are merged at the end, begin at multiples of their
// size from the start of the sequence: the result of a query is the same in any company and any chunk of a prompt.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "linear.h"

namespace vmp {

constexpr int KEYS = 64;
constexpr int PART = 512;
constexpr int TILE_ROWS = 48;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Where the tokens of a step stand in the cache; the fields are those of ops.AttentionMetadata.
struct Step {
    int64_t num_tokens;
    int64_t num_rows;
    const int32_t* query_start;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t block_table_stride;
    int64_t block_size;
    const int64_t* slot_mapping;
    int64_t isolates;
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

// Some queries of a row, for each KV head; `part` of its keys, or all where it is negative.
struct QueryTile {
    int32_t row;
    int32_t first;  // query token of the step
    int32_t count;
    int32_t part;
    int64_t partial;  // where the results of its parts begin, in parts
};

struct Attention {
    std::vector<QueryTile> tiles;
    std::vector<QueryTile> merges;  // one for each decode whose keys were divided; `part` is the number of parts
    int64_t partials = 0;           // of a query head
};

inline Attention plan(const Step& step, const Heads& heads) {
    Attention done;
    const int most = step.isolates ? 1 : int(std::max<int64_t>(1, TILE_ROWS / heads.group()));
    for (int32_t row = 0; row < step.num_rows; ++row) {
        const int32_t begin = step.query_start[row], end = step.query_start[row + 1];
        const int64_t context = step.seq_lens[row];
        if (end - begin == 1) {
            const int64_t lowest = heads.window ? std::max<int64_t>(0, context - heads.window) : 0;
            const int32_t parts = int32_t((context - 1) / PART - lowest / PART + 1);
            if (parts > 1) {
                done.merges.push_back({row, begin, 1, parts, done.partials});
                for (int32_t part = 0; part < parts; ++part)
                    done.tiles.push_back({row, begin, 1, part, done.partials++});
                continue;
            }
        }
        for (int32_t first = begin; first < end; first += most)
            done.tiles.push_back({row, first, std::min(most, end - first), -1, 0});
    }
    return done;
}

// Scratch memory of a thread.
template <class T>
struct Scratch {
    std::vector<T> q, k, v, p;
    std::vector<float> scores, part, total, highest, sums, total_highest, total_sums;

    void fit(int64_t rows, const Heads& heads) {
        const int64_t dim = heads.padded_value_dim();
        q.resize(rows * heads.key_dim);
        k.resize(KEYS * heads.key_dim);
        v.resize(KEYS * dim);
        p.resize(rows * KEYS);
        scores.resize(rows * KEYS);
        part.resize(rows * dim);
        total.resize(rows * dim);
        highest.resize(rows);
        sums.resize(rows);
        total_highest.resize(rows);
        total_sums.resize(rows);
    }
};

template <class T>
inline void prefetch(const T* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i);
}

// Rows of a W x W matrix of 32-bit values become columns: log2(W) perfect shuffles.
inline void transpose(vi (&m)[W]) {
    vi low, high;
    for (int i = 0; i < W; ++i) {
        low[i] = i / 2 + (i % 2) * W;
        high[i] = low[i] + W / 2;
    }
    for (int width = 1; width < W; width *= 2) {
        vi next[W];
#pragma GCC unroll 16
        for (int i = 0; i < W / 2; ++i) {
            next[2 * i] = __builtin_shuffle(m[i], m[i + W / 2], low);
            next[2 * i + 1] = __builtin_shuffle(m[i], m[i + W / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; ++i) m[i] = next[i];
    }
}

// Keys as panels of NR columns, one for each key; a null key is zeros.
template <class T>
inline void pack_keys(const T* const keys[KEYS], int count, int64_t dim, T* panels) {
    const int64_t words = dim / KP<T>;
    for (int first = 0; first < count; first += W) {
        int32_t* out = (int32_t*)panels + first / NR * NR * words + first % NR;
        int64_t word = 0;
        for (; word + W <= words; word += W) {
            vi block[W];
            for (int i = 0; i < W; ++i)
                block[i] = keys[first + i] ? read<vi>((const int32_t*)keys[first + i] + word) : vi{};
            transpose(block);
            for (int i = 0; i < W; ++i) write(out + (word + i) * NR, block[i]);
        }
        for (; word < words; ++word)
            for (int i = 0; i < W; ++i)
                out[word * NR + i] = keys[first + i] ? read<int32_t>((const int32_t*)keys[first + i] + word) : 0;
    }
}

// Values as panels of NR of their dimensions, whose inputs are the keys; a null value is zeros.
inline void pack_values(const float* const values[KEYS], int count, int64_t dim, float* panels) {
    for (int64_t column = 0; column < dim; column += NR)
        for (int i = 0; i < count; ++i, panels += NR)
            for (int half = 0; half < NR; half += W) {
                const int64_t left = dim - column - half;
                store(panels + half,
                      values[i] && left > 0 ? load_some(values[i] + column + half, int(std::min<int64_t>(W, left)))
                                            : vf{});
            }
}

inline void pack_values(const bf16* const values[KEYS], int count, int64_t dim, bf16* panels) {
    typedef uint16_t vs __attribute__((vector_size(4 * W)));
    vs low, high;
    for (int i = 0; i < NR; ++i) {
        low[i] = uint16_t(i / 2 + (i % 2) * NR);
        high[i] = uint16_t(low[i] + NR / 2);
    }
    auto row = [&](const bf16* value, int64_t column) {
        if (value && column + NR <= dim) return read<vs>(value + column);
        uint16_t some[NR] = {};
        if (value) std::memcpy(some, value + column, sizeof(bf16) * (dim - column));
        return read<vs>(some);
    };
    for (int64_t column = 0; column < dim; column += NR)
        for (int i = 0; i < count; i += 2, panels += 2 * NR) {
            vs even = row(values[i], column), odd = row(values[i + 1], column);
            write(panels, __builtin_shuffle(even, odd, low));
            write(panels + NR, __builtin_shuffle(even, odd, high));
        }
}

// Takes what comes from some keys, weighted for the highest score `other_highest`, into a running result.
inline void merge(float* total, float& total_highest, float& total_sum, const float* other, float other_highest,
                  float other_sum, int64_t dim) {
    const float most = std::max(total_highest, other_highest);
    if (most == NONE && total_highest == total_highest && other_highest == other_highest) return;
    auto weight = [&](float highest) { return exp(splat(highest == NONE ? -100.0f : highest - most))[0]; };
    const float of_total = weight(total_highest), of_other = weight(other_highest);
    for (int64_t i = 0; i < dim; i += W) store(total + i, load(total + i) * of_total + load(other + i) * of_other);
    total_sum = total_sum * of_total + other_sum * of_other;
    total_highest = most;
}

// Attention of `count` query tokens, the heads of one KV head, over the keys of positions [begin, end): into
// scratch.part [rows, padded value dim], scratch.highest and scratch.sums [rows].
template <class T>
void attend_part(const Step& step, const Heads& heads, int64_t head, const QueryTile& tile, int64_t begin, int64_t end,
                 const T* k_cache, const T* v_cache, Scratch<T>& s) {
    const int64_t group = heads.group(), rows = tile.count * group, dim = heads.padded_value_dim();
    const int64_t first_position =
        step.seq_lens[tile.row] - (step.query_start[tile.row + 1] - int64_t(tile.first));
    const int32_t* blocks = step.block_table + tile.row * step.block_table_stride;
    auto slot_of = [&](int64_t position) {
        const uint32_t at = uint32_t(position), size = uint32_t(step.block_size);
        return int64_t(blocks[at / size]) * size + at % size;
    };
    std::fill_n(s.part.begin(), rows * dim, 0.0f);
    std::fill_n(s.highest.begin(), rows, NONE);
    std::fill_n(s.sums.begin(), rows, 0.0f);
    for (int64_t start = begin / KEYS * KEYS; start < end; start += KEYS) {
        const int count = int(std::min<int64_t>(KEYS, (end - start + NR - 1) / NR * NR));
        const T *keys[KEYS], *values[KEYS];
        for (int i = 0; i < KEYS; ++i) {
            const bool is_there = start + i >= begin && start + i < end;
            const int64_t slot = is_there ? slot_of(start + i) : 0;
            keys[i] = is_there ? k_cache + (slot * heads.keys + head) * heads.key_dim : nullptr;
            values[i] = is_there ? v_cache + (slot * heads.keys + head) * heads.value_dim : nullptr;
            // What is needed next: the next keys of this head, or the first of the next head.
            const bool goes_on = start + KEYS < end;
            const int64_t next = goes_on ? start + KEYS + i : begin + i, of = head + !goes_on;
            if (next < end && of < heads.keys) {
                const int64_t slot = slot_of(next);
                prefetch(k_cache + (slot * heads.keys + of) * heads.key_dim, heads.key_dim);
                prefetch(v_cache + (slot * heads.keys + of) * heads.value_dim, heads.value_dim);
            }
        }
        pack_keys(keys, count, heads.key_dim, s.k.data());
        pack_values(values, count, heads.value_dim, s.v.data());
        for (int panel = 0; panel < count; panel += NR)
            multiply_panel(rows, s.q.data(), heads.key_dim, s.k.data() + panel * heads.key_dim, heads.key_dim,
                           [&](int64_t row, vf first, vf second) {
                               float* out = s.scores.data() + row * KEYS + panel;
                               store(out, first);
                               store(out + W, second);
                           });
        const bool masks = start < begin || start + count > first_position + 1 || heads.window;
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t position = first_position + row / group;
            float* scores = s.scores.data() + row * KEYS;
            vf most = splat(NONE);
            for (int i = 0; i < count; i += W) {
                vf score = load(scores + i) * heads.scale;
                if (heads.soft_cap > 0) {
                    vf twice = exp(score * (2 / heads.soft_cap));
                    score = heads.soft_cap * (1.0f - 2.0f / (twice + 1.0f));
                }
                if (masks) {
                    const int64_t lowest = heads.window ? std::max(begin, position - heads.window + 1) : begin;
                    const int32_t from = int32_t(std::max<int64_t>(0, lowest - start));
                    const int32_t to = int32_t(std::min<int64_t>(KEYS, std::min(end, position + 1) - start));
                    vi at;
                    for (int n = 0; n < W; ++n) at[n] = i + n;
                    score = select((at >= from) & (at < to), score, splat(NONE));
                }
                store(scores + i, score);
                most = select(score > most, score, select(score != score, score, most));
            }
            const float tile_highest = highest(most), before = s.highest[row];
            const float now = tile_highest > before || tile_highest != tile_highest ? tile_highest : before;
            s.highest[row] = now;
            const vf shift = splat(now == NONE ? 0.0f : now);
            vf sums = {};
            for (int i = 0; i < count; i += W) {
                vf weight = exp(load(scores + i) - shift);
                sums += weight;
                store(s.p.data() + row * KEYS + i, weight);
            }
            float kept = 1;
            if (now != before) {
                kept = before == NONE ? 0.0f : exp(splat(before - now))[0];
                float* out = s.part.data() + row * dim;
                if (before != NONE)
                    for (int64_t i = 0; i < dim; i += W) store(out + i, load(out + i) * kept);
            }
            s.sums[row] = s.sums[row] * kept + sum(sums);
        }
        for (int64_t column = 0; column < dim; column += NR)
            multiply_panel(rows, s.p.data(), KEYS, s.v.data() + column * count, count,
                           [&](int64_t row, vf first, vf second) {
                               float* out = s.part.data() + row * dim + column;
                               store(out, load(out) + first);
                               store(out + W, load(out + W) + second);
                           });
    }
}

template <class T>
inline void put_result(const float* total, float sum, int64_t dim, T* out) {
    for (int64_t i = 0; i < dim; i += W) store_some(out + i, load(total + i) / sum, int(std::min<int64_t>(W, dim - i)));
}

// One tile and KV head. `q` and `out` have a row for each query token, `q_stride` and `out_stride` apart.
template <class T>
void attend(const Step& step, const Heads& heads, int64_t head, const QueryTile& tile, const T* q, int64_t q_stride,
            const T* k_cache, const T* v_cache, T* out, int64_t out_stride, float* partials, Scratch<T>& s) {
    const int64_t group = heads.group(), rows = tile.count * group, dim = heads.padded_value_dim();
    s.fit(rows, heads);
    for (int64_t row = 0; row < rows; ++row)
        std::memcpy(s.q.data() + row * heads.key_dim,
                    q + (tile.first + row / group) * q_stride + (head * group + row % group) * heads.key_dim,
                    sizeof(T) * heads.key_dim);
    const int64_t end = step.seq_lens[tile.row] - (step.query_start[tile.row + 1] - int64_t(tile.first)) + tile.count;
    const int64_t begin = heads.window ? std::max<int64_t>(0, end - tile.count + 1 - heads.window) : 0;
    if (tile.part >= 0) {
        const int64_t start = (begin / PART + tile.part) * PART;
        attend_part(step, heads, head, tile, std::max(begin, start), std::min(end, start + PART), k_cache, v_cache, s);
        for (int64_t row = 0; row < rows; ++row) {
            float* partial = partials + (tile.partial * heads.queries + head * group + row) * heads.partial_size();
            std::memcpy(partial, s.part.data() + row * dim, sizeof(float) * dim);
            partial[dim] = s.highest[row];
            partial[dim + 1] = s.sums[row];
        }
        return;
    }
    std::fill_n(s.total.begin(), rows * dim, 0.0f);
    std::fill_n(s.total_highest.begin(), rows, NONE);
    std::fill_n(s.total_sums.begin(), rows, 0.0f);
    for (int64_t start = begin / PART * PART; start < end; start += PART) {
        attend_part(step, heads, head, tile, std::max(begin, start), std::min(end, start + PART), k_cache, v_cache, s);
        for (int64_t row = 0; row < rows; ++row)
            merge(s.total.data() + row * dim, s.total_highest[row], s.total_sums[row], s.part.data() + row * dim,
                  s.highest[row], s.sums[row], dim);
    }
    for (int64_t row = 0; row < rows; ++row)
        put_result(s.total.data() + row * dim, s.total_sums[row], heads.value_dim,
                   out + (tile.first + row / group) * out_stride + (head * group + row % group) * heads.value_dim);
}

// The results of a decode's parts, for one query head.
template <class T>
void merge_parts(const Heads& heads, int64_t head, const QueryTile& tile, const float* partials, T* out,
                 int64_t out_stride, Scratch<T>& s) {
    const int64_t dim = heads.padded_value_dim();
    s.fit(1, heads);
    std::fill_n(s.total.begin(), dim, 0.0f);
    float most = NONE, sum = 0;
    for (int64_t part = 0; part < tile.part; ++part) {
        const float* partial = partials + ((tile.partial + part) * heads.queries + head) * heads.partial_size();
        merge(s.total.data(), most, sum, partial, partial[dim], partial[dim + 1], dim);
    }
    put_result(s.total.data(), sum, heads.value_dim, out + tile.first * out_stride + head * heads.value_dim);
}

// All queries of a step; `todo` is its plan.
template <class T>
void attend_all(Member& member, const Step& step, const Heads& heads, const Attention& todo, const T* q,
                int64_t q_stride, const T* k_cache, const T* v_cache, T* out, int64_t out_stride, float* partials) {
    thread_local Scratch<T> scratch;
    // The heads of a tile lie side by side in the cache: where there is enough to do for all, they stay together.
    const int64_t num_tiles = int64_t(todo.tiles.size());
    member.each_in_turn(num_tiles * heads.keys, num_tiles >= 16 ? heads.keys : 1, [&](int64_t i) {
        attend(step, heads, i % heads.keys, todo.tiles[i / heads.keys], q, q_stride, k_cache, v_cache, out, out_stride,
               partials, scratch);
    });
    if (todo.merges.empty()) return;
    member.each(int64_t(todo.merges.size()) * heads.queries, [&](int64_t i) {
        merge_parts(heads, i % heads.queries, todo.merges[i / heads.queries], partials, out, out_stride, scratch);
    });
}

}  // namespace vmp
