// A whole decoder layer of the Llama family in one parallel region.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "team.h"

namespace vmp {

template <class T>
struct DecoderLayer {
    const T* input_norm;
    const T* post_attention_norm;
    const T* q_norm;  // or null
    const T* k_norm;
    Linear<T> qkv;
    Linear<T> o;
    Linear<T> gate_up;  // panels of W columns of gate beside the same columns of up
    Linear<T> down;
    Heads heads;
    int64_t inner;
    float eps;
};

// Memory that the steps of a layer share; it grows to what the largest step needs.
template <class T>
struct Buffers {
    std::vector<T> normed, qkv, attended, inner;
    std::vector<uint8_t> bytes;
    std::vector<float> scales, partials;
};

// `x` [num_tokens, hidden] is what the layer before has yet to add to `residual`, or null; both are overwritten with
// the same of this layer. `positions` [num_tokens]; `cos_sin` [max_position, head_dim].
template <class T>
void run(const DecoderLayer<T>& layer, const Step& step, bool is_first, T* x, T* residual, const int64_t* positions,
         const T* cos_sin, T* k_cache, T* v_cache, int threads) {
    static Buffers<T> b;
    const Heads& heads = layer.heads;
    const int64_t tokens = step.num_tokens, hidden = layer.qkv.inputs, head_dim = heads.key_dim;
    const int64_t qkv_size = layer.qkv.outputs, attended_size = layer.o.inputs, all_heads = heads.queries + 2 * heads.keys;
    b.normed.resize(tokens * hidden);
    b.qkv.resize(tokens * qkv_size);
    b.attended.resize(tokens * attended_size);
    b.inner.resize(tokens * layer.inner);
    b.bytes.resize(2 * tokens * std::max({hidden, attended_size, layer.inner}));
    b.scales.resize(tokens);
    auto rows = [&](const std::vector<T>& x) { return Rows<T>{x.data(), b.bytes.data(), b.scales.data(), tokens}; };
    // For weights of 8 bits, row `i` of `x` in as many.
    auto quantize_row = [&](const Linear<T>& w, const std::vector<T>& x, int64_t i) {
        if (w.scales)
            b.scales[i] = quantize(x.data() + i * w.inputs, w.inputs, b.bytes.data() + 2 * i * w.inputs);
    };
    const Attention attention = plan(step, heads);
    b.partials.resize(attention.partials * heads.queries * heads.partial_size());
    const int64_t num_tiles = int64_t(attention.tiles.size()) * heads.keys;
    const int64_t num_merges = int64_t(attention.merges.size()) * heads.queries;
    // The heads of a tile lie side by side in the cache: where there is enough to do for all, they stay together.
    const int64_t chunk = int64_t(attention.tiles.size()) >= 4 * threads ? heads.keys : 1;

    share_panels(tokens);
    team().run(threads, [&] {
        thread_local Scratch<T> scratch;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens; ++i) {
            T *row = residual + i * hidden, *delta = x + i * hidden;
            if (is_first)
                std::memcpy(row, delta, sizeof(T) * hidden);
            else
                add(row, delta, hidden);
            rms_norm(row, layer.input_norm, hidden, layer.eps, b.normed.data() + i * hidden);
            quantize_row(layer.qkv, b.normed, i);
        }
#pragma omp for schedule(runtime)
        for (int64_t i = 0; i < layer.qkv.panels(); ++i)
            outputs(layer.qkv, i, rows(b.normed), [&](int64_t row, int64_t column, vf sums, int count) {
                store_some(b.qkv.data() + row * qkv_size + column, sums, count);
            });
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * all_heads; ++i) {
            const int64_t token = i / all_heads, head = i % all_heads, slot = step.slot_mapping[token];
            T* at = b.qkv.data() + token * qkv_size + head * head_dim;
            if (head < heads.queries + heads.keys) {
                const T* norm = head < heads.queries ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(at, norm, head_dim, layer.eps, at);
                rotate(at, cos_sin + positions[token] * head_dim, head_dim);
            }
            if (head >= heads.queries) {
                const bool is_key = head < heads.queries + heads.keys;
                const int64_t kv_head = (head - heads.queries) % heads.keys;
                std::memcpy((is_key ? k_cache : v_cache) + (slot * heads.keys + kv_head) * head_dim, at,
                            sizeof(T) * head_dim);
            }
        }
#pragma omp for schedule(dynamic, chunk)
        for (int64_t i = 0; i < num_tiles; ++i)
            attend(step, heads, i % heads.keys, attention.tiles[i / heads.keys], b.qkv.data(), qkv_size, k_cache,
                   v_cache, b.attended.data(), attended_size, b.partials.data(), scratch);
        if (num_merges)
#pragma omp for schedule(static)
            for (int64_t i = 0; i < num_merges; ++i)
                merge_parts(heads, i % heads.queries, attention.merges[i / heads.queries], b.partials.data(),
                            b.attended.data(), attended_size, scratch);
        if (layer.o.scales)
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens; ++i) quantize_row(layer.o, b.attended, i);
#pragma omp for schedule(runtime)
        for (int64_t i = 0; i < layer.o.panels(); ++i)
            outputs(layer.o, i, rows(b.attended), [&](int64_t row, int64_t column, vf sums, int count) {
                T* out = residual + row * hidden + column;
                store_some(out, load_some(out, count) + rounded<T>(sums), count);
            });
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens; ++i) {
            rms_norm(residual + i * hidden, layer.post_attention_norm, hidden, layer.eps, b.normed.data() + i * hidden);
            quantize_row(layer.gate_up, b.normed, i);
        }
#pragma omp for schedule(runtime)
        for (int64_t i = 0; i < layer.gate_up.panels(); ++i) {
            const int64_t column = i * W;
            const int count = int(std::min<int64_t>(W, layer.inner - column));
            products(layer.gate_up, i, rows(b.normed), [&](int64_t row, vf gate, vf up) {
                vf product = rounded<T>(silu(rounded<T>(gate))) * rounded<T>(up);
                store_some(b.inner.data() + row * layer.inner + column, product, count);
            });
        }
        if (layer.down.scales)
#pragma omp for schedule(static)
            for (int64_t i = 0; i < tokens; ++i) quantize_row(layer.down, b.inner, i);
#pragma omp for schedule(runtime)
        for (int64_t i = 0; i < layer.down.panels(); ++i)
            outputs(layer.down, i, rows(b.inner), [&](int64_t row, int64_t column, vf sums, int count) {
                store_some(x + row * hidden + column, sums, count);
            });
    });
}

}  // namespace vmp
