// The plain C interface, which kernels/cpu/library.py mirrors. Sizes are in elements, memory is contiguous.

#include "decoder.h"

namespace vmp {
namespace {

// `scales` and `sums` [columns of the panels] for weights of 8 bits, or null.
template <class T>
void pack(const T* weight, int64_t outputs, int64_t inputs, bool is_pair, void* packed, float* scales, int32_t* sums,
          int threads) {
    const int64_t half = outputs / 2, panels = is_pair ? (half + W - 1) / W : (outputs + NR - 1) / NR;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < panels; ++i) {
        const T* columns[NR];
        for (int n = 0; n < NR; ++n) {
            int64_t row = i * NR + n;
            bool is_there = row < outputs;
            if (is_pair) {
                const int64_t column = i * W + n % W;
                row = n < W ? column : half + column;
                is_there = column < half;
            }
            columns[n] = is_there ? weight + row * inputs : nullptr;
        }
        if (scales)
            pack_panel(columns, inputs, (int8_t*)packed + i * NR * inputs, scales + i * NR, sums + i * NR);
        else
            pack_panel(columns, inputs, (T*)packed + i * NR * inputs);
    }
}

template <class T, class Out>
void linear(const Linear<T>& w, const T* x, int64_t rows, Out* out, int threads) {
    std::vector<uint8_t> bytes(w.scales ? 2 * rows * w.inputs : 0);
    std::vector<float> scales(w.scales ? rows : 0);
    team().run(threads, [&](Member& member) {
        if (w.scales)
            member.each(rows, [&](int64_t i) {
                scales[i] = quantize(x + i * w.inputs, w.inputs, bytes.data() + 2 * i * w.inputs);
            });
        multiply_all(member, w, Rows<T>{x, bytes.data(), scales.data(), rows},
                     [&](int64_t row, int64_t column, vf sums, int count) {
                         store_some(out + row * w.outputs + column, sums, count);
                     });
    });
}

template <class T>
void attention(const Step& step, const Heads& heads, const T* q, int64_t q_stride, const T* k_cache, const T* v_cache,
               T* out, int threads) {
    const Attention todo = plan(step, heads);
    std::vector<float> partials(todo.partials * heads.queries * heads.partial_size());
    team().run(threads, [&](Member& member) {
        attend_all(member, step, heads, todo, q, q_stride, k_cache, v_cache, out, heads.queries * heads.value_dim,
                   partials.data());
    });
}

}  // namespace
}  // namespace vmp

using namespace vmp;

extern "C" {

int64_t vmp_panel_columns() { return NR; }

#define FOR_TYPE(NAME, T)                                                                                             \
    void vmp_pack_##NAME(const T* weight, int64_t outputs, int64_t inputs, int is_pair, void* packed, float* scales,   \
                         int32_t* sums, int threads) {                                                                \
        pack(weight, outputs, inputs, is_pair, packed, scales, sums, threads);                                        \
    }                                                                                                                 \
    void vmp_linear_##NAME(const Linear<T>* w, const T* x, int64_t rows, T* out, int threads) {                        \
        linear(*w, x, rows, out, threads);                                                                            \
    }                                                                                                                 \
    void vmp_logits_##NAME(const Linear<T>* w, const T* x, int64_t rows, float* out, int threads) {                    \
        linear(*w, x, rows, out, threads);                                                                            \
    }                                                                                                                 \
    void vmp_attention_##NAME(const Step* step, const Heads* heads, const T* q, int64_t q_stride, const T* k_cache,    \
                              const T* v_cache, T* out, int threads) {                                                \
        attention(*step, *heads, q, q_stride, k_cache, v_cache, out, threads);                                        \
    }                                                                                                                 \
    void vmp_decoder_##NAME(const Decoder<T>* decoder, const Step* step, T* x, const int64_t* positions,               \
                            const T* cos_sin, T* const* k_caches, T* const* v_caches, T* out, int threads) {          \
        run(*decoder, *step, x, positions, cos_sin, k_caches, v_caches, out, threads);                                \
    }

FOR_TYPE(float32, float)
FOR_TYPE(bfloat16, bf16)

}  // extern "C"
