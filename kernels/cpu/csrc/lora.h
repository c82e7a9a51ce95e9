// Low-rank adapters (LoRA, Hu et al. 2021): rows of a product get B (A x) added, each with A and B of its own adapter.
//
// The rows of a step are grouped by adapter once for all layers, as in S-LoRA (Sheng et al. 2023). A x is computed for
// the rows of an adapter at once. B (A x) is computed for one panel of the product, and added to its sums before they
// are rounded. Each output is summed in the order of the inputs, so results are batch-invariant.
#pragma once

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

// Up to MR rows that have the same adapter, as indices in `AdapterRows::rows`.
struct AdapterTile {
    int32_t slot;
    int64_t first;
    int64_t end;
};

// The rows of a step that have an adapter, in the order of their slots.
struct AdapterRows {
    std::vector<int64_t> rows;
    std::vector<int64_t> indices;  // of each row of the step in `rows`; -1: the row has no adapter
    std::vector<AdapterTile> tiles;

    // Groups `count` rows; `slots` has the slot of each, -1 for none, or is null if no row has an adapter.
    void group(const int32_t* slots, int64_t count);
};

// A panel of a product and the rows that are multiplied with it together, from `first` up to `end`.
struct Panel {
    int64_t number;
    int64_t first, end;
};

// The sums that adapters add to one panel of a product.
struct PanelSums {
    const vf* at;          // null: nothing is added
    int64_t row_stride;  // vectors from the sums of a row to the next
    int64_t next;          // vectors from the first half of the panel's columns to the second
};

// What adapters add to one product.
template <class T>
struct Additions {
    const AdapterStack<T>* stack = nullptr;
    const AdapterRows* rows = nullptr;  // null: nothing is added
    const T* ranked = nullptr;          // A x by index, `stack->panels() * W` elements each

    // Returns the sums to add to a panel of the product, which are valid until this thread's next call.
    PanelSums sums(const Panel& panel) const;
};

// Computes A x with all members of a team into `ranked`, which has room for all of `AdapterRows::rows`; `x` [rows, inputs].
template <class T>
Additions<T> additions(Member& member, const AdapterStack<T>* stack, const AdapterRows& rows, const T* x, T* ranked);

// Does what `products` does for the rows of a panel, with additions; `Weight` and `Input` are Linear and Rows, or
// BlockLinear and BlockRows.
template <class T, class Weight, class Input, class Take>
inline void products(const Weight& w, const Panel& panel, const Next<Weight>& next, const Input& x,
                     const Additions<T>& added, Take&& take) {
    const PanelSums sums = added.sums(panel);
    products(w, panel.number, next, w.part(x, panel.first, panel.end - panel.first), [&](int64_t row, vf first, vf second) {
        row += panel.first;
        const int64_t index = sums.at ? added.rows->indices[row] : -1;
        if (index >= 0) {
            const vf* at = sums.at + index * sums.row_stride;
            first += at[0];
            second += at[sums.next];
        }
        take(row, first, second);
    });
}

// Into how many parts `rows` rows are divided for a product. On tiles, each thread multiplies some of many rows with all
// panels, rather than all rows with some panels: so it finds in its L2 cache the rows that it has written before. The
// weights are then read by each thread, so there must be enough rows for each.
inline int64_t parts_of_rows(const Member& member, int64_t rows) {
    constexpr int64_t ROWS_OF_PART = 128;
    return HAS_TILES ? std::clamp<int64_t>(rows / ROWS_OF_PART, 1, member.size()) : 1;
}

// Calls `f(panel, next)` for the panels of a product of `rows` rows with all members of a team; `following` is the matrix
// with which they multiply the same number of rows after this one, or null.
template <class Weight, class F>
inline void each_panel(Member& member, const Weight& w, const Weight* following, int64_t rows, F&& f) {
    const int64_t parts = parts_of_rows(member, rows), panels = w.panels(), count = parts * panels;
    const int64_t end = member.end_of_stretch(count);
    member.each_in_stretches(count, [&](int64_t i) {
        const int64_t part = i / panels;
        const Panel panel{i % panels, rows * part / parts, rows * (part + 1) / parts};
        if (i + 1 == end && following)
            f(panel, Next<Weight>{following, member.begin_of_stretch(parts * following->panels()) % following->panels()});
        else
            f(panel, Next<Weight>{&w, std::min(i + 1, count - 1) % panels});
    });
}

// Multiplies all rows with the whole matrix: calls `put(row, column, first, second, count)` for each `count` outputs of a
// row, at most NR, in two vectors. `following` as in `each_panel`.
template <class T, class Weight, class Input, class Put>
inline void multiply_all(Member& member, const Weight& w, const Weight* following, const Input& x,
                         const Additions<T>& added, Put&& put) {
    each_panel(member, w, following, x.count, [&](const Panel& panel, const Next<Weight>& next) {
        const int64_t column = panel.number * NR;
        const int count = int(std::min<int64_t>(NR, w.outputs - column));
        products(w, panel, next, x, added,
                 [&](int64_t row, vf first, vf second) { put(row, column, first, second, count); });
    });
}

}  // namespace vmp
