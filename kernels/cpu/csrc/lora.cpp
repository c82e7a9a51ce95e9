// The functions that lora.h declares, compiled for each type of rows.

#include "lora.h"

#include <algorithm>

#include "multiply.h"

namespace vmp {
namespace {

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

// Multiplies `rows` rows, at most ROWS, with VECTORS panels of W columns: writes [rows, VECTORS].
template <int ROWS, int VECTORS, class T>
inline void multiply_narrow(int64_t rows, const T* x, int64_t stride, const NarrowPanels& panels, int64_t inputs,
                            vf* out) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return multiply_narrow<ROWS - 1, VECTORS>(rows, x, stride, panels, inputs, out);
        multiply<ROWS, VECTORS>(x, stride, panels, inputs, SoonNothing{}, *(vf(*)[ROWS][VECTORS])out);
    }
}

}  // namespace

void AdapterRows::group(const int32_t* slots, int64_t count) {
    rows.clear();
    tiles.clear();
    if (!slots) return;
    indices.assign(count, -1);
    for (int64_t i = 0; i < count; ++i)
        if (slots[i] >= 0) rows.push_back(i);
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
    const int64_t size = rows.size();
    for (int64_t first = 0, end; first < size; first = end) {
        const int32_t slot = slots[rows[first]];
        for (end = first; end < size && slots[rows[end]] == slot; ++end) indices[rows[end]] = end;
        const int64_t own = end - first, parts = (own + MR - 1) / MR;
        for (int64_t i = 0; i < parts; ++i)
            tiles.push_back({slot, first + own * i / parts, first + own * (i + 1) / parts});
    }
}

template <class T>
PanelSums Additions<T>::sums(const Panel& panel) const {
    if (!rows) return {};
    const int64_t i = panel.number;
    thread_local std::vector<vf> sums;
    const AdapterStack<T>& w = *stack;
    const int64_t num_rows = rows->rows.size(), stride = w.panels() * W;
    fit(sums, 2 * num_rows);
    const int64_t part0 = w.first_parts[2 * i], part1 = w.first_parts[2 * i + 1];
    const bool is_one_part = part0 == part1;
    for (const AdapterTile& tile : rows->tiles) {
        if (rows->rows[tile.first] >= panel.end || rows->rows[tile.end - 1] < panel.first) continue;
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
            multiply_narrow<MR, 1>(count, x1, stride, {b1, 0}, inputs, out + num_rows);
        }
    }
    return is_one_part ? PanelSums{sums.data(), 2, 1} : PanelSums{sums.data(), 1, num_rows};
}

template <class T>
Additions<T> additions(Member& member, const AdapterStack<T>* stack, const AdapterRows& rows, const T* x, T* ranked) {
    if (!stack || rows.tiles.empty()) return {};
    const AdapterStack<T>& w = *stack;
    const int64_t panels = w.panels(), stride = panels * W, pairs = (panels + 1) / 2;
    thread_local std::vector<T> gathered;
    fit(gathered, MR * w.inputs);
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

template struct Additions<float>;
template struct Additions<bf16>;
template Additions<float> additions(Member&, const AdapterStack<float>*, const AdapterRows&, const float*, float*);
template Additions<bf16> additions(Member&, const AdapterStack<bf16>*, const AdapterRows&, const bf16*, bf16*);

}  // namespace vmp
