// The highest score of each row.
#pragma once

#include <cmath>
#include <limits>

#include "simd.h"
#include "team.h"

namespace vmp {

// Returns the index of the highest of `size` scores, the first of equal scores; -1 if it is not finite or any is NaN.
template <class T>
inline int64_t argmax_of_row(const T* scores, int64_t size) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    vf best = splat(LOWEST);
    vi place = {}, lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    auto take = [&](vf value, int64_t at) {
        const vi is_new = (value > best) | (value != value);
        best = select(is_new, value, best);
        place = ((lane + int32_t(at)) & is_new) | (place & ~is_new);
    };
    int64_t at = 0;
    for (; at + W <= size; at += W) take(load(scores + at), at);
    if (at < size) take(load_some(scores + at, int(size - at), LOWEST), at);
    const float bound = highest(best);
    if (!std::isfinite(bound)) return -1;
    int32_t first = std::numeric_limits<int32_t>::max();
    for (int i = 0; i < W; ++i)
        if (best[i] == bound) first = std::min(first, place[i]);
    return first;
}

// Writes the result of `argmax_of_row` for `count` rows, `stride` scores apart.
template <class T>
void argmax_rows(const T* scores, int64_t stride, int64_t size, int64_t count, int64_t* places, int threads) {
    team().run(threads, [&](Member& member) {
        member.each_guided(count, [&](int64_t row) { places[row] = argmax_of_row(scores + row * stride, size); });
    });
}

}  // namespace vmp
