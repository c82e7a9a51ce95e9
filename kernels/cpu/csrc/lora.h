// Low-rank adapters (LoRA, Hu et al. 2021): rows of a product get B (A x) added, each with A and B of its own adapter.
//
// The rows of a step are grouped by adapter once for all layers, as in S-LoRA (Sheng et al. 2023). A x is computed for
// the rows of an adapter at once. B (A x) is computed for one panel of the product, and added to its sums before they
// are rounded. Each output is summed in the order of the inputs, so results are batch-invariant.
#pragma once

#include <algorithm>
#include <vector>

#include "blocks.h"

namespace vmp {

// The adapters of one projection, which may fuse several parts, such as q, k and v; mirrored by CAdapterStack. Both
// matrices are packed in panels of W columns. Memory past the rank of an adapter is not read.
template <class T>
struct AdapterStack {
    const T* a;                  // [num_slots, panels()]: the columns are the ranks of all parts, one after the other
    const T* b;                  // [2 for each panel of the product, num_slots]: its inputs are ranks of `span` parts
    const int32_t* ranks;        // [num_slots], multiples of KP; 0: the adapter does not change this projection
    const int32_t* first_parts;  // for each W columns of the product, the first of the `span` parts
    int64_t num_slots;
    int64_t max_rank;
    int64_t parts;
    int64_t span;
    int64_t inputs;

    int64_t panels() const { return (parts * max_rank + W - 1) / W; }

    const T* a_panel(int64_t slot, int64_t i) const { return a + (slot * panels() + i) * W * inputs; }
    const T* b_panel(int64_t slot, int64_t i) const { return b + (i * num_slots + slot) * W * span * max_rank; }
};

// Up to MR rows that have the same adapter, as places in `AdapterRows::rows`.
struct AdapterTile {
    int32_t slot;
    int64_t first;
    int64_t end;
};

// The rows of a step that have an adapter, in the order of their slots.
struct AdapterRows {
    std::vector<int64_t> rows;
    std::vector<int64_t> places;  // of each row of the step in `rows`; -1: the row has no adapter
    std::vector<AdapterTile> tiles;

    // Groups `count` rows; `slots` has the slot of each, -1 for none, or is null if no row has an adapter.
    void group(const int32_t* slots, int64_t count) {
        rows.clear();
        tiles.clear();
        if (!slots) return;
        places.assign(count, -1);
        for (int64_t i = 0; i < count; ++i)
            if (slots[i] >= 0) rows.push_back(i);
        std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
        const int64_t size = rows.size();
        for (int64_t first = 0, end; first < size; first = end) {
            const int32_t slot = slots[rows[first]];
            for (end = first; end < size && slots[rows[end]] == slot; ++end) places[rows[end]] = end;
            const int64_t own = end - first, parts = (own + MR - 1) / MR;
            for (int64_t i = 0; i < parts; ++i)
                tiles.push_back({slot, first + own * i / parts, first + own * (i + 1) / parts});
        }
    }
};

// Panels of W columns, `size` bytes apart.
struct NarrowPanels {
    const void* at;
    int64_t size;

    template <int VECTORS>
    ALWAYS_INLINE void get(int64_t step, vi (&words)[VECTORS]) const {
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; ++v) words[v] = read<vi>((const char*)at + v * size + step * (STEP / 2));
    }
};

struct NoPrefetch {
    void ask() const {}
};

// Multiplies `rows` rows, at most ROWS, with VECTORS panels of W columns: writes [rows, VECTORS].
template <int ROWS, int VECTORS, class T>
inline void multiply_narrow(int64_t rows, const T* x, int64_t stride, const NarrowPanels& panels, int64_t inputs,
                            vf* out) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return multiply_narrow<ROWS - 1, VECTORS>(rows, x, stride, panels, inputs, out);
        multiply<ROWS, VECTORS>(x, stride, panels, inputs, NoPrefetch{}, *(vf(*)[ROWS][VECTORS])out);
    }
}

// The sums that adapters add to one panel of a product.
struct PanelSums {
    const vf* at;          // null: nothing is added
    int64_t place_stride;  // vectors from a place to the next
    int64_t next;          // vectors from the first half of the panel's columns to the second
};

// What adapters add to one product.
template <class T>
struct Additions {
    const AdapterStack<T>* stack = nullptr;
    const AdapterRows* rows = nullptr;  // null: nothing is added
    const T* ranked = nullptr;          // A x by place, `stack->panels() * W` elements each

    // Returns the sums to add to panel `i` of the product, which are valid until this thread's next call.
    PanelSums panel(int64_t i) const {
        if (!rows) return {};
        thread_local std::vector<vf> sums;
        const AdapterStack<T>& w = *stack;
        const int64_t places = rows->rows.size(), stride = w.panels() * W;
        sums.resize(std::max<int64_t>(sums.size(), 2 * places));
        const int64_t part0 = w.first_parts[2 * i], part1 = w.first_parts[2 * i + 1];
        const bool is_one_part = part0 == part1;
        for (const AdapterTile& tile : rows->tiles) {
            const int64_t rank = w.ranks[tile.slot], inputs = w.span * rank, count = tile.end - tile.first;
            const T* x = ranked + tile.first * stride;
            const T *x0 = x + part0 * rank, *x1 = x + part1 * rank;
            const T *b0 = w.b_panel(tile.slot, 2 * i), *b1 = w.b_panel(tile.slot, 2 * i + 1);
            vf* out = sums.data() + tile.first;
            if (is_one_part) {
                const NarrowPanels both{b0, (b1 - b0) * int64_t(sizeof(T))};
                multiply_narrow<MR, 2>(count, x0, stride, both, inputs, out + tile.first);
            } else {
                multiply_narrow<MR, 1>(count, x0, stride, {b0, 0}, inputs, out);
                multiply_narrow<MR, 1>(count, x1, stride, {b1, 0}, inputs, out + places);
            }
        }
        return is_one_part ? PanelSums{sums.data(), 2, 1} : PanelSums{sums.data(), 1, places};
    }
};

// Computes A x with all members of a team into `ranked`, which has room for all places; `x` [rows, inputs].
template <class T>
Additions<T> additions(Member& member, const AdapterStack<T>* stack, const AdapterRows& rows, const T* x, T* ranked) {
    if (!stack || rows.tiles.empty()) return {};
    const AdapterStack<T>& w = *stack;
    const int64_t panels = w.panels(), stride = panels * W, pairs = (panels + 1) / 2;
    thread_local std::vector<T> gathered;
    gathered.resize(std::max<int64_t>(gathered.size(), MR * w.inputs));
    member.each(int64_t(rows.tiles.size()) * pairs, [&](int64_t i) {
        const AdapterTile& tile = rows.tiles[i / pairs];
        const int64_t left = w.parts * w.ranks[tile.slot] - i % pairs * NR, count = tile.end - tile.first;
        if (left <= 0) return;
        const int64_t* which = rows.rows.data() + tile.first;
        const T* from = x + which[0] * w.inputs;
        if (which[count - 1] != which[0] + count - 1) {
            for (int64_t r = 0; r < count; ++r)
                std::memcpy(gathered.data() + r * w.inputs, x + which[r] * w.inputs, sizeof(T) * w.inputs);
            from = gathered.data();
        }
        T* out = ranked + tile.first * stride + i % pairs * NR;
        const NarrowPanels panel{w.a_panel(tile.slot, i % pairs * 2), W * w.inputs * int64_t(sizeof(T))};
        vf sums[2 * MR];
        if (left > W)
            multiply_narrow<MR, 2>(count, from, w.inputs, panel, w.inputs, sums);
        else
            multiply_narrow<MR, 1>(count, from, w.inputs, panel, w.inputs, sums);
        const int64_t vectors = left > W ? 2 : 1;
        for (int64_t v = 0; v < count * vectors; ++v) store(out + v / vectors * stride + v % vectors * W, sums[v]);
    });
    return {stack, &rows, ranked};
}

// Does what `products` does, with additions; `Weight` and `Input` are Linear and Rows, or BlockLinear and BlockRows.
template <class T, class Weight, class Input, class Take>
inline void products(const Weight& w, int64_t i, const Input& x, const Additions<T>& added, Take&& take) {
    const PanelSums sums = added.panel(i);
    products(w, i, x, [&](int64_t row, vf first, vf second) {
        const int64_t place = sums.at ? added.rows->places[row] : -1;
        if (place >= 0) {
            const vf* at = sums.at + place * sums.place_stride;
            first += at[0];
            second += at[sums.next];
        }
        take(row, first, second);
    });
}

// Multiplies all rows with the whole matrix: calls `put(row, column, vector, count)` for each vector of outputs.
template <class T, class Weight, class Input, class Put>
inline void multiply_all(Member& member, const Weight& w, const Input& x, const Additions<T>& added, Put&& put) {
    each_panel(member, w, x.count, [&](int64_t i) {
        const int64_t column = i * NR;
        const int count0 = int(std::min<int64_t>(W, w.outputs - column));
        const int count1 = int(std::min<int64_t>(W, w.outputs - column - W));
        products(w, i, x, added, [&](int64_t row, vf first, vf second) {
            put(row, column, first, count0);
            if (count1 > 0) put(row, column + W, second, count1);
        });
    });
}

}  // namespace vmp
