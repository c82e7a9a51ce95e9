// The products that linear.h declares, compiled for each type of rows.

#include "linear.h"

#include "multiply.h"

namespace vmp {
namespace {

template <class T>
using Multiply = void(const T*, int64_t, const void*, int64_t, Soon, Element<T>*, int64_t, bool);

// Whether weights are prefetched to the L1 cache. With long panels, up to two rows take 15 % less time so with AVX2, and
// four rows in bfloat16 25 % less with AVX-512. Other numbers of rows are faster, or as fast, with prefetches to L2.
template <class T, int ROWS>
constexpr bool IS_CLOSE = W < 16 || (std::is_same_v<T, bf16> && ROWS >= 3 && ROWS <= 6);

struct SoonClose {
    Soon soon;

    ALWAYS_INLINE void ask() { soon.ask_closer(); }
};

template <class T, bool ASKS, int ROWS>
void multiply_exactly(const T* x, int64_t stride, const void* panel, int64_t inputs, Soon soon, Element<T>* out,
                      int64_t out_stride, bool adds) {
    Sum<T> sums[ROWS][2];
    if constexpr (!ASKS)
        multiply<ROWS, 2>(x, stride, Packed{panel}, inputs, SoonNothing{}, sums);
    else if constexpr (IS_CLOSE<T, ROWS>)
        multiply<ROWS, 2>(x, stride, Packed{panel}, inputs, SoonClose{soon}, sums);
    else
        multiply<ROWS, 2>(x, stride, Packed{panel}, inputs, soon, sums);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            Element<T>* const at = out + r * out_stride + v * W;
            if (adds) sums[r][v] = read<Sum<T>>(at) + sums[r][v];
            write(at, sums[r][v]);
        }
}

template <class T, bool ASKS, int... FEWER>
Multiply<T>* multiply_of(int rows, std::integer_sequence<int, FEWER...>) {
    static constexpr Multiply<T>* OF_ROWS[] = {multiply_exactly<T, ASKS, FEWER + 1>...};
    return OF_ROWS[rows - 1];
}

}  // namespace

template <class T>
void multiply_some(int rows, const T* x, int64_t stride, const void* panel, int64_t inputs, Soon soon, Element<T>* out,
                   int64_t out_stride, bool adds) {
    if constexpr (ON_TILES<T>) {
        multiply_block(rows, x, stride, panel, inputs, soon, out, out_stride, adds);
    } else {
        constexpr auto fewer = std::make_integer_sequence<int, MOST_ROWS<T>>{};
        Multiply<T>* multiply_with = multiply_of<T, true>(rows, fewer);
        if constexpr (HAS_MANY_BLOCKS)
            if (!soon.stride) multiply_with = multiply_of<T, false>(rows, fewer);
        multiply_with(x, stride, panel, inputs, soon, out, out_stride, adds);
    }
}

template void multiply_some(int, const float*, int64_t, const void*, int64_t, Soon, float*, int64_t, bool);
template void multiply_some(int, const bf16*, int64_t, const void*, int64_t, Soon, float*, int64_t, bool);
template void multiply_some(int, const uint8_t*, int64_t, const void*, int64_t, Soon, int32_t*, int64_t, bool);

}  // namespace vmp
