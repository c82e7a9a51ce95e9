// Vectors as wide as the processor's registers, and conversions between them and the element types of tensors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Whether bytes are multiplied by AVX2's instruction, which takes one factor without a sign and has 16 bits for the sum
// of two products.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(VMP_TILE_MODEL)  // the model has wider vectors
#define VMP_SUMS_IN_16_BITS 1
#else
#define VMP_SUMS_IN_16_BITS 0
#endif

// For functions that innermost loops call, because a call that is not inlined makes GCC keep their sums in memory; and
// for functions that only prefetch, because GCC drops calls without another effect.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace vmp {

// Asks for the cache line of `p`, for the L2 cache, where this is called: GCC gathers the calls of __builtin_prefetch in
// a loop without branches, and so many at once keep each other and the loads waiting.
ALWAYS_INLINE void prefetch_here(const void* p) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*(const char*)p));
#else
    __builtin_prefetch(p, 0, 2);
#endif
}

// Asks for all cache lines of so many bytes.
inline void prefetch_all(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) prefetch_here((const char*)from + at);
}

// The number of 32-bit elements of a vector.
#if defined(__AVX512F__) || defined(VMP_TILE_MODEL)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int LOG_W = W == 16 ? 4 : W == 8 ? 3 : 2;

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef int16_t vs __attribute__((vector_size(4 * W)));

struct bf16 {
    uint16_t bits;
};

template <class V>
using ElementOf = std::decay_t<decltype(V{}[0])>;

template <class V, class F, int... I>
constexpr V vector_of(F f, std::integer_sequence<int, I...>) {
    return V{ElementOf<V>(f(I))...};
}

// Returns the vector whose element i is `f(i)`. A constant takes far less time to compile than a loop that sets the
// elements, wherever a function with such a loop is inlined.
template <class V, class F>
constexpr V vector_of(F f) {
    return vector_of<V>(f, std::make_integer_sequence<int, sizeof(V) / sizeof(ElementOf<V>)>{});
}

// The numbers of the elements.
constexpr vi LANES = vector_of<vi>([](int i) { return i; });

inline vf splat(float x) { return x - vf{}; }

inline vf to_floats(vi integers) { return __builtin_convertvector(integers, vf); }

template <class V, class P>
inline V read(const P* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class P>
inline void write(P* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

// Returns for each pair of 16-bit integers the sum of their products.
inline vi multiply_pairs(vs a, vs b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)  // the model has wider vectors
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

inline vf select(vi condition, vf yes, vf no) { return condition ? yes : no; }

#if VMP_SUMS_IN_16_BITS
// Makes the compiler compute `sum` here. It would regroup a sum of integers, compute all products first, and have too few
// registers for them.
template <class V>
ALWAYS_INLINE void compute_now(V& sum) {
    asm("" : "+x"(sum));
}
#endif

// Returns a bit for each element of a condition that holds.
inline uint32_t lanes_of(vi condition) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)condition, (__m512i)condition);
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)  // the model has wider vectors
    return uint32_t(_mm256_movemask_ps((__m256)condition));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < W; ++i) lanes |= (uint32_t(condition[i]) & 1) << i;
    return lanes;
#endif
}

// Writes the elements in `lanes` one after another. Up to W elements from `p` on may be overwritten.
template <class P, class V>
inline void pack_lanes(P* p, V x, uint32_t lanes) {
#if defined(__AVX512F__)
    write(p, _mm512_maskz_compress_epi32(__mmask16(lanes), (__m512i)x));
#else
    for (; lanes; lanes &= lanes - 1) *p++ = x[__builtin_ctz(lanes)];
#endif
}

inline vf max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

inline vi larger(vi a, vi b) { return a > b ? a : b; }

// Returns the absolute values as integers, which have the same order, with NaN above infinity.
inline vi sizes_of(vf x) { return (vi)x & 0x7fffffff; }

inline vf load(const float* p) { return read<vf>(p); }

inline vf load(const bf16* p) {
#if defined(__AVX512F__)
    return (vf)((vi)_mm512_maskz_cvtepu16_epi32(0xffff, read<__m256i>(p)) << 16);  // GCC converts each half of them
#else
    return (vf)(__builtin_convertvector(read<vh>(p), vu) << 16);
#endif
}

// Returns the first values of pairs in bfloat16, or the second ones, as floats.
ALWAYS_INLINE vf half_of(vu pairs, bool is_second) { return (vf)(is_second ? pairs & 0xffff0000u : pairs << 16); }

// GCC converts bytes to integers one by one.
inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
    return to_floats((vi)_mm512_maskz_cvtepi8_epi32(0xffff, read<__m128i>(p)));
#elif defined(__AVX2__) && !defined(VMP_TILE_MODEL)
    return to_floats((vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#elif !defined(VMP_TILE_MODEL)
    typedef int8_t Bytes __attribute__((vector_size(16)));
    typedef int16_t Shorts __attribute__((vector_size(16)));
    // Interleaved with itself twice, each byte is the highest of an integer.
    const Bytes bytes = (Bytes)vi{read<int32_t>(p)};
    const Shorts twice = (Shorts)__builtin_shuffle(bytes, vector_of<Bytes>([](int i) { return i / 2; }));
    return to_floats((vi)__builtin_shuffle(twice, vector_of<Shorts>([](int i) { return i / 2; })) >> 24);
#else
    return to_floats(__builtin_convertvector(read<vc>(p), vi));
#endif
}

inline void store(float* p, vf x) { write(p, x); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline vf rounded_to_bf16(vf x) {
    const vu bits = (vu)x, sum = bits + 0x7fff + ((bits >> 16) & 1);
    return (vf)((x == x ? sum : vu{} + 0x7fc00000u) & 0xffff0000u);
}

// Rounds as `rounded_to_bf16` does.
inline void store(bf16* p, vf x) {
#if defined(__AVX512BF16__)
    write(p, _mm512_cvtneps_pbh((__m512)x));
#else
    write(p, __builtin_convertvector((vu)rounded_to_bf16(x) >> 16, vh));
#endif
}

// Stores two vectors one after another.
template <class T>
inline void store(T* p, vf first, vf second) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>)
        return write(p, _mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#endif
    store(p, first);
    store(p + W, second);
}

inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

template <class T>
inline T from_float(float x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
        uint32_t bits;
        std::memcpy(&bits, &x, 4);
        if (x != x) return {0x7fc0};
        return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
    }
}

// Returns `x` rounded to T.
template <class T>
inline vf rounded(vf x) {
    if constexpr (std::is_same_v<T, float>) {
        return x;
    } else {
#if defined(__AVX512BF16__)
        bf16 kept[W];
        store(kept, x);
        return load(kept);
#else
        return rounded_to_bf16(x);
#endif
    }
}

// Do what `load_some` and `store_some` do, for fewer than W values. They are not inlined, because they are called
// seldom and would be much of the code of their callers.
template <class T>
__attribute__((noinline)) vf load_few(const T* p, int count, float rest) {
    float some[W];
    for (int i = 0; i < W; ++i) some[i] = i < count ? to_float(p[i]) : rest;
    return load(some);
}

template <class T>
__attribute__((noinline)) void store_few(T* p, vf x, int count) {
    T some[W];
    store(some, x);
    std::memcpy(p, some, sizeof(T) * count);
}

// Loads the first `count` of W values, and fills the others with `rest`; memory past `count` is not read.
template <class T>
inline vf load_some(const T* p, int count, float rest = 0) {
    return count >= W ? load(p) : load_few(p, count, rest);
}

template <class T>
inline void store_some(T* p, vf x, int count) {
    count >= W ? store(p, x) : store_few(p, x, count);
}

// Stores the first `count` of the values of two vectors one after another.
template <class T>
inline void store_some(T* p, vf first, vf second, int count) {
    if (count >= 2 * W) return store(p, first, second);
    store_some(p, first, count);
    if (count > W) store_some(p + W, second, count - W);
}

// Writes `count` values of one type as values of another.
template <class From, class To>
inline void convert(const From* from, int64_t count, To* to) {
    if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to, from, sizeof(To) * count);
    } else {
        for (int64_t i = 0; i < count; i += W) {
            const int some = count - i < W ? int(count - i) : W;
            store_some(to + i, load_some(from + i, some), some);
        }
    }
}

// Reduces each group of 2 * HALF elements to one value by halves, and returns it in each of them; `f(x, y)` combines two
// vectors.
template <int HALF, class F>
inline vf reduce_groups(vf x, F&& f) {
    constexpr vi others = vector_of<vi>([](int i) { return i ^ HALF; });
    x = f(x, __builtin_shuffle(x, others));
    if constexpr (HALF > 1) return reduce_groups<HALF / 2>(x, f);
    return x;
}

// Does the same for a whole vector.
template <class F>
inline float reduce(vf x, F&& f) {
    return reduce_groups<W / 2>(x, f)[0];
}

inline float sum(vf x) {
    return reduce(x, [](vf a, vf b) { return a + b; });
}

// Returns the largest of what `sizes_of` returned, as a number.
inline float largest(vi sizes) {
    return reduce((vf)sizes, [](vf a, vf b) { return (vf)larger((vi)a, (vi)b); });
}

// Returns the highest element; NaN if any element is NaN.
inline float highest(vf x) {
    return reduce(x, [](vf a, vf b) { return select((a > b) | (a != a), a, b); });
}

// Combines the halves of two vectors that have groups of 2 * HALF elements: those of x come first.
template <int HALF, class F>
inline vf reduce_pair(vf x, vf y, F&& f) {
    constexpr vi low = vector_of<vi>([](int i) { return i / HALF * 2 * HALF + i % HALF; }), high = low + HALF;
    return f(__builtin_shuffle(x, y, low), __builtin_shuffle(x, y, high));
}

// Does what `reduce` does, in the same order, for W vectors: element i of the result is that of vector i.
template <int HALF = W / 2, class F>
inline vf reduce_each(const vf (&x)[2 * HALF], F&& f) {
    vf halves[HALF];
#pragma GCC unroll 8
    for (int i = 0; i < HALF; ++i) halves[i] = reduce_pair<HALF>(x[2 * i], x[2 * i + 1], f);
    if constexpr (HALF > 1)
        return reduce_each<HALF / 2>(halves, f);
    else
        return halves[0];
}

// Does what `reduce` does for the first `count` of W vectors: element i of the result is that of vector i. The other
// vectors are overwritten, and the other elements of the result are meaningless.
template <class F>
inline vf reduce_some(vf (&x)[W], int count, F&& f) {
    if (count > 2) {
        for (int i = count; i < W; ++i) x[i] = vf{};
        return reduce_each(x, f);
    }
    vf first = splat(reduce(x[0], f));
    if (count == 2) first[1] = reduce(x[1], f);
    return first;
}

// Returns 2^n times a polynomial of the rest (Cephes), for x from -87 to 88; `half` is 0.5 with the sign of x.
inline vf exp_within(vf x, vf half) {
    vi n = __builtin_convertvector(x * 1.44269504f + half, vi);
    vf whole = __builtin_convertvector(n, vf);
    vf r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vf)((n + 127) << 23);
}

// Returns e to the power of x, accurate to 2 units in the last place: 0 below -87, and NaN for NaN.
inline vf exp(vf x) {
    const vf lowest = splat(-87.0f), most = splat(88.0f);
    const vi tiny = x < lowest;
    const vf bounded = select(tiny, lowest, select(x > most, most, x));
    return select(tiny, vf{}, exp_within(bounded, select(bounded < vf{}, splat(-0.5f), splat(0.5f))));
}

// Returns the same for x up to 0, faster.
inline vf exp_up_to_0(vf x) {
    const vf lowest = splat(-87.0f);
    const vi tiny = x < lowest;
    return select(tiny, vf{}, exp_within(select(tiny, lowest, x), splat(-0.5f)));
}

// Returns 2 to the power of x, accurate to 3 units in the last place: 0 below -126, 2^127 or more from 127 on, and NaN for
// NaN.
inline vf exp2(vf x) {
    const vf lowest = splat(-126.0f);
#if defined(__AVX512F__)
    constexpr int TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const vf whole = (vf)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, TO_NEAREST);
#else
    // The sum with `rounding` has the nearest whole number in its last bits.
    const vf rounding = splat(0x1.8p23f), most = splat(127.0f), bounded = select(x > most, most, x);
    const vf shifted = select(x < lowest, lowest, bounded) + rounding;
    const vf whole = shifted - rounding;
#endif
    const vf r = x - whole;
    vf p = splat(1.326472721e-3f);
    p = p * r + 9.671512707e-3f;
    p = p * r + 5.550733744e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)lowest, _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)whole);
#else
    return select(x < lowest, vf{}, p * (vf)(((vi)shifted << 23) + (127 << 23)));
#endif
}

}  // namespace vmp
