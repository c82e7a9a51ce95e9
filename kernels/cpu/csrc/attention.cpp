// The functions that attention.h declares, compiled for each type of queries.

#include "attention.h"

#include <cmath>
#include <limits>

#include "huge_vector.h"
#include "multiply.h"

namespace vmp {
namespace {

constexpr int KEYS = 64;       // keys of a tile
constexpr int PART = 512;      // keys of a part
// The most rows of a tile of queries: query tokens times heads that share a KV head. More of them read and pack the keys
// before them less often, but also multiply more keys that come after them, which counts less the more come before.
constexpr int TILE_ROWS = HAS_TILES ? 96 : 48, LATE_TILE_ROWS = 192;
constexpr int64_t LATE = 1024;  // the position from which on there are LATE_TILE_ROWS
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Whether the elements of a cache are integers of 8 bits, which have scales.
template <class E>
constexpr bool IS_INT8 = std::is_same_v<E, int8_t>;

// The type to which many queries of T, and the keys and values for them, are converted before they are multiplied.
template <class T>
using Wide = std::conditional_t<WIDENS<T>, float, T>;

// Positions of a row, from `begin` up to but without `end`.
struct Span {
    int32_t row;
    int64_t begin, end;
};

// The position of the first query of a tile.
inline int64_t first_position(const AttentionMetadata& step, const QueryTile& tile) {
    return step.seq_lens[tile.row] - (step.query_start[tile.row + 1] - int64_t(tile.first));
}

// The positions that the queries of a tile see: all, or those of its part.
inline Span keys_of(const AttentionMetadata& step, const Heads& heads, const QueryTile& tile) {
    const int64_t first = first_position(step, tile), last = tile.count - 1;
    const int64_t end = step.end_of(tile.first + last, first + last);
    const int64_t begin = heads.window ? std::max<int64_t>(0, first + 1 - heads.window) : 0;
    if (tile.parts == 1) return {tile.row, begin, end};
    const int64_t start = (begin / PART + tile.part) * PART;
    return {tile.row, std::max(begin, start), std::min(end, start + PART)};
}

// The cache cells of KEYS positions from `start` on; only those from index `from` up to `to` exist.
struct KeyTile {
    int64_t start;
    int from, to;
    const int64_t* cells;
};

// The tile of `span` that contains position `at`; `cells` are those of the span, from the start of its first tile on.
inline KeyTile tile_at(const Span& span, int64_t at, const int64_t* cells) {
    const int64_t first = span.begin / KEYS * KEYS, start = at / KEYS * KEYS;
    return {start, int(std::max<int64_t>(0, span.begin - start)), int(std::min<int64_t>(KEYS, span.end - start)),
            cells + (start - first)};
}

// The span with all positions of its groups of W keys; their cells exist where keys lie in groups.
inline Span in_groups(const Span& span) { return {span.row, span.begin / W * W, (span.end + W - 1) / W * W}; }

// Writes the cell of each position of `span` to `cells`, which begins at the first tile of the span.
inline void find_cells(const AttentionMetadata& step, const Span& span, int64_t* cells) {
    const int32_t* blocks = step.block_table + span.row * step.block_table_stride;
    cells += span.begin % KEYS;
    for (int64_t position = span.begin; position < span.end;) {
        const uint32_t at = uint32_t(position), size = uint32_t(step.block_size);
        const int64_t first = int64_t(blocks[at / size]) * size;
        for (uint32_t offset = at % size; offset < size && position < span.end; ++offset, ++position)
            *cells++ = first + offset;
    }
}

// Keys or values of one head: `dim` elements for each cell, and `stride` elements from one group of 2^log_group cells to
// the next. A group of one cell has the elements in their order; a group of W keys has their words side by side.
template <class E>
struct Cache {
    const E* of_head;
    int64_t stride;
    int64_t dim;
    int log_group = 0;
    bool has_runs = false;  // whether the cells of W positions from a multiple of W on follow one another

    bool is_grouped() const { return log_group > 0; }
    int group_size() const { return 1 << log_group; }
    const E* group_of(int64_t cell) const { return of_head + (cell >> log_group) * stride; }

    // Returns the elements of a cell or, of a group of keys, the part of its memory that has the same offset there.
    const E* at(int64_t cell) const { return group_of(cell) + (cell & (group_size() - 1)) * dim; }

    // The elements from a cell to the next one of a run.
    int64_t to_next() const { return is_grouped() ? dim : stride; }

    // Points `out` to the rows of a tile's first `count` keys, and to `zeros` for keys that do not exist.
    void rows(const KeyTile& tile, int count, const E* zeros, const E** out) const {
        for (int first = 0; first < count; first += W) {
            if (has_runs && first >= tile.from && first + W <= tile.to) {
                const E* row = at(tile.cells[first]);
                for (int i = first; i < first + W; ++i, row += to_next()) out[i] = row;
            } else {
                for (int i = first; i < first + W; ++i)
                    out[i] = i >= tile.from && i < tile.to ? at(tile.cells[i]) : zeros;
            }
        }
    }

    // Points `out` to the groups of a tile's first `count` keys, and to `zeros` [W, dim] for groups without a key.
    void groups(const KeyTile& tile, int count, const E* zeros, const E** out) const {
        for (int i = 0; i < count; i += W) *out++ = i + W > tile.from && i < tile.to ? group_of(tile.cells[i]) : zeros;
    }

    // Writes the scales of a tile's first `count` keys or values to `out`, and 0 for those that do not exist.
    void scales(const KeyTile& tile, int count, float* out) const {
        static_assert(IS_INT8<E>);
        for (int i = 0; i < count; i += W) {
            if (is_grouped()) {
                const bool exists = i + W > tile.from && i < tile.to;
                const vf all = exists ? read<vf>(group_of(tile.cells[i]) + W * dim) : vf{};
                const vi position = LANES + i;
                store(out + i, select((position >= tile.from) & (position < tile.to), all, vf{}));
            } else {
                for (int n = i; n < i + W; ++n)
                    out[n] = n >= tile.from && n < tile.to ? read<float>(at(tile.cells[n]) + dim) : 0;
            }
        }
    }
};

// The keys or values of one head in a cache of `num_heads`.
template <class E>
Cache<E> cache_of_head(const void* cache, int64_t num_heads, int64_t head, int64_t dim, bool is_grouped, bool has_runs) {
    const int log_group = is_grouped ? LOG_W : 0;
    const int64_t size = (dim + (IS_INT8<E> ? SCALE_BYTES : 0)) << log_group;
    return {(const E*)cache + head * size, num_heads * size, dim, log_group, has_runs};
}

template <class E, class T>
Cache<E> keys_in(const Caches<T>& caches, const Heads& heads, int64_t head) {
    return cache_of_head<E>(caches.k, heads.keys, head, heads.key_dim, caches.in_groups, caches.in_groups);
}

template <class E, class T>
Cache<E> values_in(const Caches<T>& caches, const Heads& heads, int64_t head) {
    return cache_of_head<E>(caches.v, heads.keys, head, heads.value_dim, IS_INT8<E> && caches.in_groups, caches.in_groups);
}

// Rows of the cache to prefetch while other rows are multiplied, ROWS_A_STEP with each step.
template <class E>
struct SoonRows {
    Cache<E> cache;
    const int64_t* cells;
    int at, end;
    const E* row = nullptr;

    SoonRows(const Cache<E>& cache, const KeyTile& tile)
        : cache(cache),
          cells(tile.cells),
          at(tile.from & -cache.group_size()),
          end((tile.to + cache.group_size() - 1) & -cache.group_size()) {
        if (at < end) row = cache.at(cells[at]);
    }

    ALWAYS_INLINE void ask() {
        for (int n = 0; n < ROWS_A_STEP; ++n)
            if (at < end) prefetch();
    }

    ALWAYS_INLINE void ask(int64_t steps) {
        const int until = int(std::min<int64_t>(end, at + steps * ROWS_A_STEP));
        while (at < until) prefetch();
    }

    // Prefetches the rows that are left after `steps` steps.
    ALWAYS_INLINE void ask_rest(int64_t steps) const {
        if (at + steps * ROWS_A_STEP >= end) return;
        SoonRows rest = *this;
        rest.at += int(steps * ROWS_A_STEP);
        rest.row = cache.at(cells[rest.at]);
        while (rest.at < end) rest.prefetch();
    }

   private:
    static constexpr int ROWS_A_STEP = 2;

    // Asks for the next row. The lines go to the L2 cache: on their way to the L1 cache they keep loads waiting.
    ALWAYS_INLINE void prefetch() {
        for (int64_t n = 0; n < cache.dim; n += 64 / int64_t(sizeof(E))) prefetch_here(row + n);
        const int last = cache.group_size() - 1;
        if (IS_INT8<E> && (cells[at] & last) == last) prefetch_here(row + cache.dim);  // the scales
        ++at;
        if (cache.has_runs && at % W)
            row += cache.to_next();
        else if (at < end)
            row = cache.at(cells[at]);
    }
};

// The scratch memory of one thread, for products of type T with a cache of E.
template <class T, class E>
struct Scratch {
    HugeVector<T> q, k, v, p;
    HugeVector<T> wide;  // the keys of a tile, if they are rows of another type
    std::vector<E> zeros;
    HugeVector<float> scores, part, total, highest, sums, total_highest, total_sums;

    // The highest scores and the sums of a KV head's rows are read and written in whole vectors, so they begin at
    // multiples of this.
    static int64_t padded(int64_t rows) { return (rows + W - 1) / W * W; }

    // Makes room for `rows` rows of each of `num_heads` KV heads.
    void fit(int64_t rows, int64_t num_heads, const Heads& heads) {
        const int64_t dim = heads.padded_value_dim(), all = rows * num_heads, padded_all = padded(rows) * num_heads;
        q.resize(all * heads.key_dim);
        k.resize(KEYS * heads.key_dim);
        v.resize(KEYS * dim);
        if (!std::is_same_v<T, E>) wide.resize(KEYS * heads.key_dim);
        zeros.resize(std::max(W * heads.key_dim, heads.value_dim));
        p.resize(rows * KEYS);
        scores.resize(rows * KEYS);
        part.resize(all * dim);
        total.resize(all * dim);
        highest.resize(padded_all);
        sums.resize(padded_all);
        total_highest.resize(padded_all);
        total_sums.resize(padded_all);
    }
};

// Returns the scratch memory of the calling thread. Not inlined: loops would ask for the thread's address in each round.
template <class T, class E>
__attribute__((noinline, noclone)) Scratch<T, E>& scratch_of_thread() {
    thread_local Scratch<T, E> scratch;
    return scratch;
}

// Transposes a W x W matrix of 32-bit values in place, by log2(W) perfect shuffles.
inline void transpose(vi (&m)[W]) {
    constexpr vi low = vector_of<vi>([](int i) { return i / 2 + i % 2 * W; }), high = low + W / 2;
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

// Packs `count` keys into panels of NR columns, a column for each key.
template <class T>
inline void pack_keys(const T* const* keys, int count, int64_t dim, T* panels) {
    const int64_t words = dim / KP<T>;
    for (int first = 0; first < count; first += W) {
        auto key = [&](int i) { return (const int32_t*)keys[first + i]; };
        int32_t* out = (int32_t*)panels + first / NR * NR * words + first % NR;
        int64_t word = 0;
        for (; word + W <= words; word += W) {
            vi block[W];
            for (int i = 0; i < W; ++i) block[i] = read<vi>(key(i) + word);
            transpose(block);
            for (int i = 0; i < W; ++i) write(out + (word + i) * NR, block[i]);
        }
        for (; word < words; ++word)
            for (int i = 0; i < W; ++i) out[word * NR + i] = key(i)[word];
    }
}

// Returns the 32-bit words that consecutive integers of `even` and of `odd` are in type T; floats need no `odd`.
template <class T>
ALWAYS_INLINE vi words_of(vf even, vf odd) {
    if constexpr (std::is_same_v<T, float>)
        return (vi)even;
    else
        return (vi)((vu)even >> 16 | (vu)odd);  // integers of 8 bits leave the lower half of a float zero
}

// Keys in groups, as panels: each group is a vector of columns.
template <class T, class E>
struct KeyGroups {
    const E* const* groups;

    template <int VECTORS>
    ALWAYS_INLINE void get(int64_t step, vi (&words)[VECTORS]) const {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            const E* at = groups[v] + step * W * KP<T>;
            if constexpr (IS_INT8<E>)
                words[v] = words_of<T>(load(at), load(at + (KP<T> - 1) * W));
            else if constexpr (std::is_same_v<T, E>)
                words[v] = read<vi>(at);
            else
                words[v] = (vi)half_of(read<vu>(groups[v] + step / 2 * W * KP<E>), step % 2);
        }
    }
};

// Does what `pack_keys` does, for keys in groups.
template <class T, class E>
inline void pack_groups(const E* const* groups, int count, int64_t dim, T* panels) {
    for (int panel = 0; panel < count / NR; ++panel)
        for (int64_t step = 0; step < dim / KP<T>; ++step, panels += NR * KP<T>) {
            vi words[2];
            KeyGroups<T, E>{groups + 2 * panel}.get(step, words);
            write(panels, words[0]);
            write(panels + W * KP<T>, words[1]);
        }
}

// Values as a panel whose columns are their dimensions, from `column` on, and whose inputs are the keys.
// `part(key, column)` gives one vector of dimensions; of another type than T, their floats.
template <class T, class E, class Part>
struct Values {
    const Part& part;
    int64_t column;

    template <int VECTORS>
    ALWAYS_INLINE void get(int64_t step, vi (&words)[VECTORS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v += 2) {
            const int64_t from = column + v * W;
            if constexpr (!std::is_same_v<T, E>) {
                const int64_t even = KP<T> * step, odd = even + KP<T> - 1;
                words[v] = words_of<T>(part(even, from), part(odd, from));
                words[v + 1] = words_of<T>(part(even, from + W), part(odd, from + W));
            } else if constexpr (std::is_same_v<T, float>) {
                words[v] = part(step, from);
                words[v + 1] = part(step, from + W);
            } else {
                // The shuffles interleave two vectors of 16-bit values: a0 b0 a1 b1 ...
                constexpr vs low = vector_of<vs>([](int i) { return i / 2 + i % 2 * NR; });
                constexpr vs high = low + int16_t(NR / 2);
                const vs even = (vs)part(2 * step, from), odd = (vs)part(2 * step + 1, from);
                words[v] = (vi)__builtin_shuffle(even, odd, low);
                words[v + 1] = (vi)__builtin_shuffle(even, odd, high);
            }
        }
    }
};

// Returns one vector of a value's dimensions for `Values`.
template <class T, class E>
ALWAYS_INLINE auto part_at(const E* at) {
    if constexpr (std::is_same_v<T, E>)
        return read<vi>(at);
    else
        return load(at);
}

// Packs the values into panels of that form; dimensions that only fill a vector are zeros.
template <class T, class E>
inline void pack_values(const E* const* values, int count, int64_t dim, int64_t padded_dim, T* panels) {
    constexpr int64_t IN_VECTOR = std::is_same_v<T, E> ? 4 * W / int64_t(sizeof(E)) : W;
    auto part = [&](int64_t key, int64_t from) {
        if (from + IN_VECTOR <= dim) return part_at<T>(values[key] + from);
        E some[IN_VECTOR] = {};
        if (from < dim) std::memcpy(some, values[key] + from, sizeof(E) * (dim - from));
        return part_at<T>(some);
    };
    for (int64_t column = 0; column < padded_dim; column += NR)
        for (int64_t step = 0; step < count / KP<T>; ++step, panels += NR * KP<T>) {
            vi words[2];
            Values<T, E, decltype(part)>{part, column}.get(step, words);
            write(panels, words[0]);
            write(panels + NR * KP<T> / 2, words[1]);
        }
}

// Packs `count` keys that lie in rows; those of another type are converted into `wide` [KEYS, dim] first.
template <class T, class E>
inline void pack_rows(const E* const* keys, int count, int64_t dim, T* wide, T* panels) {
    if constexpr (!std::is_same_v<T, E>) {
        const T* rows[KEYS];
        for (int i = 0; i < count; ++i) {
            rows[i] = wide + i * dim;
            convert(keys[i], dim, wide + i * dim);
        }
        pack_keys(rows, count, dim, panels);
    } else {
        pack_keys(keys, count, dim, panels);
    }
}

// Merges the result over other keys, whose highest score is `other_highest`, into a running result. Scores are multiplied
// with `unit`.
inline void merge(float* total, float& total_highest, float& total_sum, const float* other, float other_highest,
                  float other_sum, int64_t dim, float unit) {
    const float most = std::max(total_highest, other_highest);
    auto weight = [&](float highest) { return highest == NONE ? 0 : exp(splat((highest - most) * unit))[0]; };
    const float of_total = weight(total_highest), of_other = weight(other_highest);
    for (int64_t i = 0; i < dim; i += W) store(total + i, load(total + i) * of_total + load(other + i) * of_other);
    total_sum = total_sum * of_total + other_sum * of_other;
    total_highest = most;
}

// The running result of the queries of one KV head: `part` [rows, padded value dim]; `highest` and `sums` [rows], which
// may be read and written up to a multiple of W.
struct Running {
    float* part;
    float* highest;
    float* sums;
};

constexpr float LOG2_E = 1.44269504f;

// What the scores of a running result are multiplied with; those with a soft cap are multiplied before it.
inline float unit_of_scores(const Heads& heads) { return heads.soft_cap > 0 ? 1 : heads.scale; }

// The greatest sum of weights of a tile of keys for which the row keeps the score that it subtracts.
constexpr float MOST = 0x1p64f;

// Writes 2 to the power of the difference between `scores` [count], times `unit`, and `shift`, times `scales` if there are
// any, to `weights`, rounded to T. Returns partial sums of the powers.
template <bool HAS_SCALES, class T, class M>
ALWAYS_INLINE vf put_weights(const float* scores, int count, float unit, float shift, const float* scales, M* weights) {
    vf sums = {};
    for (int i = 0; i < count; i += NR) {
        vf weight0 = exp2(load(scores + i) * unit - shift), weight1 = exp2(load(scores + i + W) * unit - shift);
        sums += weight0;
        sums += weight1;
        if constexpr (HAS_SCALES) {
            weight0 *= load(scales + i);
            weight1 *= load(scales + i + W);
        }
        if constexpr (!std::is_same_v<T, M>) {
            weight0 = rounded<T>(weight0);
            weight1 = rounded<T>(weight1);
        }
        store(weights + i, weight0, weight1);
    }
    return sums;
}

// Turns `scores` [rows, KEYS] of a tile of keys into `weights` of the same shape, rounded to T, and the running result into
// the one before the weighted values are added. What a row subtracts from its scores is the highest of the first tile in
// which it sees keys. It remains until the weights of a tile become too large, so most tiles need no search for the highest
// score. A score that is NaN makes the sum of its row NaN, and so its result. The rows are those of the queries from number
// `first_row` on. Scales are those of caches with integers.
template <bool HAS_SCALES, class T, class M>
void weigh(const Heads& heads, const KeyTile& keys, int count, int64_t first_row, int64_t rows, int64_t first_position,
           const int32_t* ends, const float* key_scales, const float* value_scales, const Running& running,
           float* scores, M* weights) {
    const int64_t group = heads.group(), dim = heads.padded_value_dim();
    const bool masks = keys.from > 0 || keys.start + count > first_position + 1 || heads.window;
    const float soft_cap = heads.soft_cap, in_caps = soft_cap > 0 ? 2 * heads.scale / soft_cap : 0;
    const bool changes = HAS_SCALES || masks || soft_cap > 0;
    const float unit = LOG2_E * unit_of_scores(heads);
    for (int64_t first = 0; first < rows; first += W) {
        const int some = int(std::min<int64_t>(W, rows - first));
        float* const some_scores = scores + first * KEYS;
        M* const some_weights = weights + first * KEYS;
        const vf before = load(running.highest + first), sums_before = load(running.sums + first);
        const bool is_first = lanes_of(before == NONE) != 0;
        vf of_rows[W];
        for (int r = 0; (is_first || changes) && r < some; ++r) {
            float* const of_row = some_scores + r * KEYS;
            vf most = splat(NONE);
            if (!changes) {
                for (int i = 0; i < count; i += W) most = max(load(of_row + i), most);
                of_rows[r] = most;
                continue;
            }
            vi from = {}, to = {};
            if (masks) {
                const int64_t token = (first_row + first + r) / group, position = first_position + token;
                const int64_t lowest = heads.window ? position - heads.window + 1 - keys.start : 0;
                const int64_t end = ends ? ends[token] : position + 1;
                from += int32_t(std::max<int64_t>(keys.from, lowest));
                to += int32_t(std::min<int64_t>(keys.to, end - keys.start));
            }
            for (int i = 0; i < count; i += W) {
                vf score = load(of_row + i);
                if constexpr (HAS_SCALES) score *= load(key_scales + i);
                if (soft_cap > 0) score = soft_cap * (1.0f - 2.0f / (exp(score * in_caps) + 1.0f));
                if (masks) score = select((LANES + i >= from) & (LANES + i < to), score, splat(NONE));
                store(of_row + i, score);
                most = max(score, most);
            }
            of_rows[r] = most;
        }
        const vf now = is_first ? select(before == NONE, reduce_some(of_rows, some, max), before) : before;
        float shifts[W];
        store(running.highest + first, now);
        store(shifts, select(now == NONE, vf{}, now * unit));
        auto put = [&](int r, float shift) {
            return put_weights<HAS_SCALES, T>(some_scores + r * KEYS, count, unit, shift, value_scales,
                                           some_weights + r * KEYS);
        };
        for (int r = 0; r < some; ++r) of_rows[r] = put(r, shifts[r]);
        const vf sums = reduce_some(of_rows, some, [](vf a, vf b) { return a + b; });
        store(running.sums + first, sums_before + sums);
        if (lanes_of(sums > MOST) == 0) continue;
        for (int r = 0; r < some; ++r) {
            if (!(sums[r] > MOST)) continue;
            vf most = splat(now[r]);
            for (int i = 0; i < count; i += W) most = max(load(some_scores + r * KEYS + i), most);
            const float highest = reduce(most, max), kept = exp2(splat((now[r] - highest) * unit))[0];
            running.highest[first + r] = highest;
            running.sums[first + r] = sums_before[r] * kept + sum(put(r, highest * unit));
            float* const out = running.part + (first + r) * dim;
            for (int64_t i = 0; i < dim; i += W) store(out + i, load(out + i) * kept);
        }
    }
}

// Adds a tile of keys to the result of the queries `q` [rows, key dim] of one KV head. `ends` are those of the query
// tokens, or null. Products are of type M: T or, of more than MR queries, Wide<T>. Few queries read the values in the cache;
// for many queries, packing the values is faster.
template <class T, class E, class M>
void attend_keys(const Heads& heads, const KeyTile& keys, const Cache<E>& k, const Cache<E>& v,
                 const SoonRows<E>& soon_keys, const SoonRows<E>& soon_values, const M* q, int64_t rows,
                 int64_t first_position, const int32_t* ends, const Running& running, Scratch<M, E>& s) {
    const int64_t dim = heads.padded_value_dim();
    const int count = (keys.to + NR - 1) / NR * NR;
    const E* rows_of_keys[KEYS];  // or groups
    float key_scales[KEYS], value_scales[KEYS];
    if constexpr (IS_INT8<E>) {
        k.scales(keys, count, key_scales);
        v.scales(keys, count, value_scales);
    }
    const bool are_few = std::is_same_v<T, M> && rows <= MR, reads_groups = k.is_grouped() && !ON_TILES<M> && are_few;
    if (k.is_grouped())
        k.groups(keys, count, s.zeros.data(), rows_of_keys);
    else
        k.rows(keys, count, s.zeros.data(), rows_of_keys);
    if (!k.is_grouped())
        pack_rows(rows_of_keys, count, k.dim, s.wide.data(), s.k.data());
    else if (!reads_groups)
        pack_groups(rows_of_keys, count, k.dim, s.k.data());
    // Local, because the compiler would read the pointers again after each store of a float.
    float* const all_scores = s.scores.data();
    M* const weights = s.p.data();
    auto put_scores = [&](int64_t row, int64_t column, vf some) { store(all_scores + row * KEYS + column, some); };
    if constexpr (ON_TILES<M>) {
        const E* values[KEYS];
        v.rows(keys, count, s.zeros.data(), values);
        pack_values(values, count, v.dim, dim, s.v.data());
        SoonRows<E> next_keys = soon_keys, next_values = soon_values;
        // So few rows at a time that scores, weights and sums stay in the L1 cache.
        for (int64_t first = 0; first < rows; first += TILE_HEIGHT) {
            const int some = int(std::min<int64_t>(TILE_HEIGHT, rows - first));
            const Running own{running.part + first * dim, running.highest + first, running.sums + first};
            for (int panel = 0; panel < count; panel += NR)
                multiply_block(some, q + first * k.dim, k.dim, s.k.data() + panel * k.dim, k.dim, next_keys,
                               all_scores + panel, KEYS, false);
            weigh<IS_INT8<E>, T>(heads, keys, count, first, some, first_position, ends, key_scales, value_scales, own,
                                 all_scores, weights);
            for (int64_t column = 0; column < dim; column += NR)
                multiply_block(some, weights, KEYS, s.v.data() + column * count, count, next_values, own.part + column, dim,
                               true);
        }
        next_keys.ask_rest(0);
        next_values.ask_rest(0);
        return;
    } else if (reads_groups) {
        auto panel_at = [&](int64_t column) { return KeyGroups<M, E>{rows_of_keys + column / W}; };
        multiply_few(int(rows), q, k.dim, panel_at, count, k.dim, soon_keys, put_scores);
        soon_keys.ask_rest(k.dim / KP<M>);
    } else if (are_few) {
        auto panel_at = [&](int64_t column) {
            return Packed{s.k.data() + column * k.dim, NR * k.dim * int64_t(sizeof(M))};
        };
        multiply_few(int(rows), q, k.dim, panel_at, count, k.dim, soon_keys, put_scores);
        soon_keys.ask_rest(k.dim / KP<M>);
    } else {
        for (int panel = 0; panel < count; panel += NR)
            multiply_into(rows, q, k.dim, s.k.data() + panel * k.dim, k.dim, all_scores + panel, KEYS, false);
        soon_keys.ask_rest(0);
    }
    weigh<IS_INT8<E>, T>(heads, keys, count, 0, rows, first_position, ends, key_scales, value_scales, running, all_scores,
                         weights);
    const E* values[KEYS];
    v.rows(keys, count, s.zeros.data(), values);
    auto add = [&](int64_t row, int64_t column, vf some) {
        float* out = running.part + row * dim + column;
        store(out, load(out) + some);
    };
    if (are_few && v.dim == dim) {
        auto part = [&](int64_t key, int64_t from) { return part_at<M>(values[key] + from); };
        auto panel_at = [&](int64_t column) { return Values<M, E, decltype(part)>{part, column}; };
        multiply_few(int(rows), weights, KEYS, panel_at, dim, count, soon_values, add);
        soon_values.ask_rest(count / KP<M>);
        return;
    }
    soon_values.ask_rest(0);
    pack_values(values, count, v.dim, dim, s.v.data());
    for (int64_t column = 0; column < dim; column += NR)
        multiply_into(rows, weights, KEYS, s.v.data() + column * count, count, running.part + column, dim, true);
}

// Attends from the queries of a tile, for `num_heads` KV heads from `first_head` on, to the keys of `span`, which lie
// in one part. The result goes to part, highest and sums of the scratch memory. Of `next`, the first keys of `next_head` are
// prefetched.
template <class T, class E, class M>
void attend_part(const AttentionMetadata& step, const Heads& heads, int64_t first_head, int64_t num_heads,
                 const QueryTile& tile, const Span& span, const Span& next, int64_t next_head, const Caches<T>& caches,
                 Scratch<M, E>& s) {
    const int64_t rows = tile.count * heads.group(), padded = s.padded(rows), dim = heads.padded_value_dim();
    const int32_t* ends = step.attention_ends ? step.attention_ends + tile.first : nullptr;
    std::fill_n(s.part.begin(), num_heads * rows * dim, 0.0f);
    std::fill_n(s.highest.begin(), num_heads * padded, NONE);
    std::fill_n(s.sums.begin(), num_heads * padded, 0.0f);
    int64_t cells[PART], next_cells[KEYS];
    const Span first_of_next{next.row, next.begin, std::min(next.end, next.begin / KEYS * KEYS + KEYS)};
    find_cells(step, caches.in_groups ? in_groups(span) : span, cells);
    find_cells(step, caches.in_groups ? in_groups(first_of_next) : first_of_next, next_cells);
    for (int64_t i = 0; i < num_heads; ++i) {
        const int64_t head = first_head + i;
        const Running running{s.part.data() + i * rows * dim, s.highest.data() + i * padded,
                              s.sums.data() + i * padded};
        for (int64_t at = span.begin / KEYS * KEYS; at < span.end; at += KEYS) {
            // Prefetched meanwhile: the next keys of this head, or the first keys of the next head or of `next`.
            const bool goes_on = at + KEYS < span.end, has_more_heads = i + 1 < num_heads;
            const int64_t then_head = goes_on ? head : has_more_heads ? head + 1 : next_head;
            const KeyTile then = goes_on          ? tile_at(span, at + KEYS, cells)
                                 : has_more_heads ? tile_at(span, span.begin, cells)
                                                  : tile_at(first_of_next, first_of_next.begin, next_cells);
            attend_keys<T>(heads, tile_at(span, at, cells), keys_in<E>(caches, heads, head), values_in<E>(caches, heads, head),
                        SoonRows<E>(keys_in<E>(caches, heads, then_head), then),
                        SoonRows<E>(values_in<E>(caches, heads, then_head), then),
                        s.q.data() + i * rows * heads.key_dim, rows, first_position(step, tile), ends, running, s);
        }
    }
}

// Divides the weighted sum of values by the sum of weights.
template <class T>
inline void put_result(const float* total, float sum, int64_t dim, T* out) {
    for (int64_t i = 0; i < dim; i += W) store_some(out + i, load(total + i) / sum, int(std::min<int64_t>(W, dim - i)));
}

// Computes the attention of one tile, for `num_heads` KV heads from `first_head` on. `q` and `out` have a row for each
// query token, `q_stride` and `out_stride` elements apart. Of `next`, the first keys of `next_head` are prefetched.
template <class T, class E, class M>
void attend(const AttentionMetadata& step, const Heads& heads, int64_t first_head, int64_t num_heads,
            const QueryTile& tile, const Span& next, int64_t next_head, const T* q, int64_t q_stride,
            const Caches<T>& caches, T* out, int64_t out_stride, float* partials, Scratch<M, E>& s) {
    const int64_t group = heads.group(), head_rows = tile.count * group, rows = num_heads * head_rows;
    const int64_t dim = heads.padded_value_dim();
    s.fit(head_rows, num_heads, heads);
    // The query head of a row of the scratch memory, and the query token.
    auto head_of = [&](int64_t row) { return (first_head + row / head_rows) * group + row % group; };
    auto token_of = [&](int64_t row) { return tile.first + row % head_rows / group; };
    // Where the highest score and the sum of a row are.
    auto state_of = [&](int64_t row) { return row / head_rows * s.padded(head_rows) + row % head_rows; };
    for (int64_t row = 0; row < rows; ++row)
        convert(q + token_of(row) * q_stride + head_of(row) * heads.key_dim, heads.key_dim,
                s.q.data() + row * heads.key_dim);
    const Span span = keys_of(step, heads, tile);
    if (tile.parts > 1) {
        attend_part(step, heads, first_head, num_heads, tile, span, next, next_head, caches, s);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t at = tile.partial + (token_of(row) - tile.first) * tile.parts + tile.part;
            float* partial = partials + (at * heads.queries + head_of(row)) * heads.partial_size();
            std::memcpy(partial, s.part.data() + row * dim, sizeof(float) * dim);
            partial[dim] = s.highest[state_of(row)];
            partial[dim + 1] = s.sums[state_of(row)];
        }
        return;
    }
    auto put_results = [&](const HugeVector<float>& totals, const HugeVector<float>& sums) {
        for (int64_t row = 0; row < rows; ++row)
            put_result(totals.data() + row * dim, sums[state_of(row)], heads.value_dim,
                       out + token_of(row) * out_stride + head_of(row) * heads.value_dim);
    };
    const int64_t first_part = span.begin / PART * PART;
    if (span.end <= first_part + PART) {
        attend_part(step, heads, first_head, num_heads, tile, span, next, next_head, caches, s);
        return put_results(s.part, s.sums);
    }
    std::fill_n(s.total.begin(), rows * dim, 0.0f);
    std::fill(s.total_highest.begin(), s.total_highest.end(), NONE);
    std::fill(s.total_sums.begin(), s.total_sums.end(), 0.0f);
    for (int64_t start = first_part; start < span.end; start += PART) {
        const int64_t end = std::min(span.end, start + PART);
        const Span part{span.row, std::max(span.begin, start), end};
        if (end < span.end)
            attend_part(step, heads, first_head, num_heads, tile, part, {span.row, end, span.end}, first_head, caches, s);
        else
            attend_part(step, heads, first_head, num_heads, tile, part, next, next_head, caches, s);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t at = state_of(row);
            merge(s.total.data() + row * dim, s.total_highest[at], s.total_sums[at], s.part.data() + row * dim,
                  s.highest[at], s.sums[at], dim, unit_of_scores(heads));
        }
    }
    put_results(s.total, s.total_sums);
}

// Merges the results of a query's parts, for one query head.
template <class T, class E>
void merge_parts(const Heads& heads, int64_t head, const QueryTile& tile, const float* partials, T* out,
                 int64_t out_stride, Scratch<T, E>& s) {
    const int64_t dim = heads.padded_value_dim();
    s.fit(1, 1, heads);
    std::fill_n(s.total.begin(), dim, 0.0f);
    float most = NONE, sum = 0;
    for (int64_t part = 0; part < tile.parts; ++part) {
        const float* partial = partials + ((tile.partial + part) * heads.queries + head) * heads.partial_size();
        merge(s.total.data(), most, sum, partial, partial[dim], partial[dim + 1], dim, unit_of_scores(heads));
    }
    put_result(s.total.data(), sum, heads.value_dim, out + tile.first * out_stride + head * heads.value_dim);
}

// Computes `attend_all` for caches with elements of type E.
template <class E, class T>
void attend_to(Member& member, const AttentionMetadata& step, const Heads& heads, const Attention& todo, const T* q,
                int64_t q_stride, const Caches<T>& caches, T* out, int64_t out_stride, float* partials) {
    Scratch<T, E>& scratch = scratch_of_thread<T, E>();
    Scratch<Wide<T>, E>& of_many = scratch_of_thread<Wide<T>, E>();
    const int64_t num_tiles = int64_t(todo.tiles.size());
    // The heads of a tile lie side by side in the cache, so they stay together if there are enough tiles.
    const bool together = num_tiles >= 16;
    auto attend_heads = [&](int64_t i, int64_t first_head, int64_t num_heads) {
        const int64_t end_head = first_head + num_heads, next_head = end_head < heads.keys ? end_head : 0;
        const int64_t next_tile = i + (next_head == 0);
        const Span next = next_tile < num_tiles ? keys_of(step, heads, todo.tiles[next_tile]) : Span{};
        const QueryTile& tile = todo.tiles[i];
        auto attend_in = [&](auto& memory) {
            attend(step, heads, first_head, num_heads, tile, next, next_head, q, q_stride, caches, out, out_stride, partials,
                   memory);
        };
        tile.count * heads.group() > MR ? attend_in(of_many) : attend_in(scratch);
    };
    if (together)
        member.each_in_stretches(num_tiles, [&](int64_t i) {
            const int64_t num_heads = todo.tiles[i].count == 1 ? heads.keys : 1;
            for (int64_t head = 0; head < heads.keys; head += num_heads) attend_heads(i, head, num_heads);
        });
    else
        member.each_in_stretches(num_tiles * heads.keys,
                                 [&](int64_t i) { attend_heads(i / heads.keys, i % heads.keys, 1); });
    if (todo.merges.empty()) return;
    member.each(int64_t(todo.merges.size()) * heads.queries, [&](int64_t i) {
        merge_parts(heads, i % heads.queries, todo.merges[i / heads.queries], partials, out, out_stride, scratch);
    });
}

}  // namespace

Attention plan(const AttentionMetadata& step, const Heads& heads) {
    Attention done;
    auto most_tokens = [&](int rows) { return step.isolates ? 1 : std::max(1, rows / int(heads.group())); };
    const int most = most_tokens(TILE_ROWS), most_late = most_tokens(LATE_TILE_ROWS);
    for (int32_t row = 0; row < step.num_rows; ++row) {
        const int32_t begin = step.query_start[row], end = step.query_start[row + 1];
        const int64_t context = step.seq_lens[row];
        const int32_t count = end - begin;
        if (count > 0 && count <= most) {
            const int64_t lowest = heads.window ? std::max<int64_t>(0, context - count + 1 - heads.window) : 0;
            const int32_t parts = int32_t((context - 1) / PART - lowest / PART + 1);
            for (int32_t part = 0; part < parts; ++part)
                done.tiles.push_back({row, begin, count, part, parts, done.partials});
            if (parts == 1) continue;
            for (int32_t i = 0; i < count; ++i, done.partials += parts)
                done.merges.push_back({row, begin + i, 1, 0, parts, done.partials});
            continue;
        }
        for (int32_t first = begin; first < end;) {
            const int size = std::min(context - (end - first) < LATE ? most : most_late, end - first);
            done.tiles.push_back({row, first, size, 0, 1, 0});
            first += size;
        }
    }
    return done;
}

template <class T>
void attend_all(Member& member, const AttentionMetadata& step, const Heads& heads, const Attention& todo, const T* q,
                int64_t q_stride, const Caches<T>& caches, T* out, int64_t out_stride, float* partials) {
    if (caches.is_int8)
        attend_to<int8_t>(member, step, heads, todo, q, q_stride, caches, out, out_stride, partials);
    else
        attend_to<T>(member, step, heads, todo, q, q_stride, caches, out, out_stride, partials);
}

template void attend_all(Member&, const AttentionMetadata&, const Heads&, const Attention&, const float*, int64_t,
                         const Caches<float>&, float*, int64_t, float*);
template void attend_all(Member&, const AttentionMetadata&, const Heads&, const Attention&, const bf16*, int64_t,
                         const Caches<bf16>&, bf16*, int64_t, float*);

}  // namespace vmp
