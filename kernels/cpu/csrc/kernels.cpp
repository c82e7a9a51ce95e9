// The plain C interface, which kernels/cpu/library.py declares. Sizes are in elements; memory is contiguous.

#include <mutex>

#include "decoder.h"
#include "experts.h"
#include "sampling.h"
#include "token_masks.h"

namespace vmp {
namespace {

// Packs a matrix; `scales` and `sums` [columns of the panels] are null unless the packed weights are int8.
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

// Returns memory for converted rows that the next call finds again.
template <class Weight>
typename Weight::Buffer& buffer_of_thread() {
    thread_local typename Weight::Buffer buffer;
    return buffer;
}

// Returns the rows in the form in which they are multiplied with `w`, converted into `buffer` if `w` requires it.
template <class T, class Weight>
auto input(Member& member, const Weight& w, const T* x, int64_t rows, typename Weight::Buffer& buffer) {
    if (w.converts(rows)) member.each(rows, [&](int64_t i) { w.convert_row(buffer, x + i * w.inputs, i); });
    return w.rows(buffer, x, rows);
}

template <class T, class Weight, class Out>
void linear(const Weight& w, const T* x, int64_t rows, Out* out, int threads,
            const AdapterStack<T>* adapters = nullptr, const int32_t* slots = nullptr) {
    auto& buffer = buffer_of_thread<Weight>();
    if (w.converts(rows)) buffer.fit(rows, w.inputs, w.quantizes());
    AdapterRows adapter_rows;
    std::vector<T> ranked;
    if (adapters) {
        adapter_rows.group(slots, rows);
        ranked.resize(adapter_rows.rows.size() * adapters->panels() * W);
    }
    team().run(threads, [&](Member& member) {
        const auto given = input(member, w, x, rows, buffer);
        const Additions<T> added = additions(member, adapters, adapter_rows, x, ranked.data());
        multiply_all(member, w, (const Weight*)nullptr, given, added,
                     [&](int64_t row, int64_t column, vf first, vf second, int count) {
                         store_some(out + row * w.outputs + column, first, second, count);
                     });
    });
}

// Writes the index of the highest output of each row, the first of equal outputs; -1 if it is not finite or any is NaN.
// With `masks`, rows that have a mask have only the outputs that it allows.
template <class T, class Weight>
void argmax(const Weight& w, const T* x, int64_t rows, int64_t* indices, const TokenMasks* masks, int threads) {
    auto& buffer = buffer_of_thread<Weight>();
    if (w.converts(rows)) buffer.fit(rows, w.inputs, w.quantizes());
    std::vector<float> values(rows, -std::numeric_limits<float>::infinity());
    std::fill_n(indices, rows, 0);
    const std::vector<const uint32_t*> mask_of_row = masks ? masks->of_rows(rows) : std::vector<const uint32_t*>(rows);
    std::mutex mutex;
    team().run(threads, [&](Member& member) {
        // For each column of a panel, the highest output that this thread has seen, and its column.
        struct Best {
            vf value[2];
            vi column[2];
        };
        thread_local std::vector<Best> best;
        const vf none = splat(-std::numeric_limits<float>::infinity());
        best.assign(rows, {{none, none}, {}});
        const auto given = input(member, w, x, rows, buffer);
        each_panel(member, w, (const Weight*)nullptr, rows, [&](const Panel& panel, const Next<Weight>& next) {
            products(w, panel, next, given, Additions<T>{}, [&](int64_t row, vf first, vf second) {
                const uint32_t* const mask = mask_of_row[row];
                auto take = [&](int half, vf value) {
                    const vi column = LANES + int32_t(panel.number * NR + half * W);
                    Best& so_far = best[row];
                    vi is_new = ((value > so_far.value[half]) | (value != value)) & (column < int32_t(w.outputs));
                    if (mask) is_new &= allowed(mask, panel.number * NR + half * W);
                    so_far.value[half] = select(is_new, value, so_far.value[half]);
                    so_far.column[half] = (column & is_new) | (so_far.column[half] & ~is_new);
                };
                take(0, first);
                take(1, second);
            });
        });
        std::lock_guard<std::mutex> lock(mutex);
        for (int64_t row = 0; row < rows; ++row)
            for (int i = 0; i < NR; ++i) {
                const float value = best[row].value[i / W][i % W], known = values[row];
                const int64_t column = best[row].column[i / W][i % W];
                if (value > known || value != value || (value == known && column < indices[row])) {
                    values[row] = value;
                    indices[row] = column;
                }
            }
    });
    for (int64_t row = 0; row < rows; ++row)
        if (!std::isfinite(values[row])) indices[row] = -1;
}

// Writes rows `ids` of a matrix to `out` [count, inputs].
template <class T>
void embed(const BlockPart& weight, int64_t inputs, const int64_t* ids, int64_t count, T* out, int threads) {
    team().run(count > FEW ? threads : 1, [&](Member& member) {
        member.each(count, [&](int64_t i) {
            thread_local std::vector<float> row;
            row.resize(inputs);
            dequantize(weight, ids[i], inputs, row.data());
            for (int64_t k = 0; k < inputs; ++k) out[i * inputs + k] = from_float<T>(row[k]);
        });
    });
}

template <class T>
void attention(const AttentionMetadata& step, const Heads& heads, const T* q, int64_t q_stride,
               const Caches<T>& caches, T* out, int threads) {
    const Attention todo = plan(step, heads);
    std::vector<float> partials(todo.partials * heads.queries * heads.partial_size());
    team().run(threads, [&](Member& member) {
        attend_all(member, step, heads, todo, q, q_stride, caches, out, heads.queries * heads.value_dim,
                   partials.data());
    });
}

}  // namespace
}  // namespace vmp

using namespace vmp;

extern "C" {

// What _interface() of kernels/cpu/library.py returns for the declarations that these functions have.
uint32_t vmp_interface() { return 0xf8d0d87du; }

int64_t vmp_panel_columns() { return NR; }

int64_t vmp_strip_bytes(const BlockMatrix* w) { return strip_bytes(*w); }

void vmp_write_strips(const BlockMatrix* w, uint8_t* out, BlockStrip* strips, int threads) {
    write_strips(*w, out, strips, threads);
}

#define FOR_TYPE(NAME, T)                                                                                             \
    void vmp_pack_##NAME(const T* weight, int64_t outputs, int64_t inputs, int is_pair, void* packed, float* scales,  \
                         int32_t* sums, int threads) {                                                                \
        pack(weight, outputs, inputs, is_pair, packed, scales, sums, threads);                                        \
    }                                                                                                                 \
    void vmp_linear_##NAME(const Linear<T>* w, const T* x, int64_t rows, T* out, int threads,                         \
                           const AdapterStack<T>* adapters, const int32_t* slots) {                                   \
        linear(*w, x, rows, out, threads, adapters, slots);                                                           \
    }                                                                                                                 \
    void vmp_logits_##NAME(const Linear<T>* w, const T* x, int64_t rows, float* out, int threads) {                   \
        linear(*w, x, rows, out, threads);                                                                            \
    }                                                                                                                 \
    void vmp_block_linear_##NAME(const BlockLinear<T>* w, const T* x, int64_t rows, T* out, int threads,              \
                                 const AdapterStack<T>* adapters, const int32_t* slots) {                             \
        linear(*w, x, rows, out, threads, adapters, slots);                                                           \
    }                                                                                                                 \
    void vmp_block_logits_##NAME(const BlockLinear<T>* w, const T* x, int64_t rows, float* out, int threads) {        \
        linear(*w, x, rows, out, threads);                                                                            \
    }                                                                                                                 \
    void vmp_block_argmax_##NAME(const BlockLinear<T>* w, const T* x, int64_t rows, int64_t* indices,                 \
                                 const TokenMasks* masks, int threads) {                                              \
        argmax(*w, x, rows, indices, masks, threads);                                                                 \
    }                                                                                                                 \
    void vmp_block_embedding_##NAME(const BlockPart* weight, int64_t inputs, const int64_t* ids, int64_t count, T* out,\
                                    int threads) {                                                                    \
        embed(*weight, inputs, ids, count, out, threads);                                                             \
    }                                                                                                                 \
    void vmp_attention_##NAME(const AttentionMetadata* step, const Heads* heads, const T* q, int64_t q_stride,        \
                              void* k_cache, void* v_cache, T* out, int threads) {                                    \
        attention(*step, *heads, q, q_stride, Caches<T>{k_cache, v_cache, false, bool(step->has_int8_caches)}, out,   \
                  threads);                                                                                           \
    }                                                                                                                 \
    void vmp_decoder_##NAME(const Decoder<Linear<T>>* decoder, int64_t first, int64_t end,                            \
                            const AttentionMetadata* step, T* x, const int64_t* positions,                            \
                            const RotaryTables<T>* rotary, void* const* k_caches, void* const* v_caches, T* out, int threads,\
                            const LayerAdapters<T>* adapters, const int32_t* slots) {                                 \
        run(*decoder, first, end, *step, x, positions, *rotary, k_caches, v_caches, out, threads, adapters, slots);   \
    }                                                                                                                 \
    void vmp_block_decoder_##NAME(const Decoder<BlockLinear<T>>* decoder, int64_t first, int64_t end,                 \
                                  const AttentionMetadata* step, T* x, const int64_t* positions,                      \
                                  const RotaryTables<T>* rotary, void* const* k_caches, void* const* v_caches,              \
                                  T* out, int threads, const LayerAdapters<T>* adapters, const int32_t* slots) {      \
        run(*decoder, first, end, *step, x, positions, *rotary, k_caches, v_caches, out, threads, adapters, slots);   \
    }                                                                                                                 \
    void vmp_experts_##NAME(const Experts<Linear<T>>* experts, const T* x, int64_t num_tokens, const int64_t* ids,    \
                            const float* router_weights, int64_t chosen, T* out, int threads) {                       \
        run_experts(*experts, x, num_tokens, ids, router_weights, chosen, out, threads);                              \
    }                                                                                                                 \
    void vmp_block_experts_##NAME(const Experts<BlockLinear<T>>* experts, const T* x, int64_t num_tokens,             \
                                  const int64_t* ids, const float* router_weights, int64_t chosen, T* out,            \
                                  int threads) {                                                                      \
        run_experts(*experts, x, num_tokens, ids, router_weights, chosen, out, threads);                              \
    }                                                                                                                 \
    void vmp_argmax_##NAME(const Linear<T>* w, const T* x, int64_t rows, int64_t* indices, const TokenMasks* masks,   \
                           int threads) {                                                                             \
        argmax(*w, x, rows, indices, masks, threads);                                                                 \
    }                                                                                                                 \
    void vmp_argmax_rows_##NAME(const T* scores, int64_t stride, int64_t size, int64_t count, int64_t* indices,       \
                                int threads) {                                                                        \
        argmax_rows(scores, stride, size, count, indices, threads);                                                   \
    }                                                                                                                 \
    void vmp_sample_##NAME(const T* logits, int64_t stride, int64_t size, int64_t count, const Draws* draws,          \
                           int64_t* tokens, int threads) {                                                            \
        sample_rows(logits, stride, size, count, *draws, tokens, threads);                                            \
    }                                                                                                                 \
    void vmp_logprobs_##NAME(const T* logits, int64_t stride, int64_t size, int64_t count, const int64_t* chosen,     \
                             const Logprobs* out, int threads) {                                                      \
        logprobs_of_rows(logits, stride, size, count, chosen, *out, threads);                                         \
    }                                                                                                                 \
    void vmp_apply_token_masks_##NAME(T* logits, int64_t vocab_size, const uint32_t* masks, int64_t num_words,        \
                                      const int64_t* rows, int64_t count, int threads) {                              \
        apply_token_masks(logits, vocab_size, masks, num_words, rows, count, threads);                                \
    }

FOR_TYPE(float32, float)
FOR_TYPE(bfloat16, bf16)

}  // extern "C"
