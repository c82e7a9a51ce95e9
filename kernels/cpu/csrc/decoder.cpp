// The function that decoder.h declares, compiled for each kind of weights.

#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "elementwise.h"

namespace vmp {
namespace {

// Rows as the next product takes them: of type T, and also converted if it requires that.
template <class Weight>
struct RowBuffer : Weight::Buffer {
    HugeVector<typename Weight::Value> values;

    void fit(int64_t rows, int64_t most_inputs) {
        vmp::fit(values, rows * most_inputs);
        Weight::Buffer::fit(rows, most_inputs, true);
    }
};

// Memory that the layers of a step share; it grows to the size of the largest step.
template <class Weight>
struct Buffers {
    using T = typename Weight::Value;

    RowBuffer<Weight> normed;
    HugeVector<T> qkv, attended, inner;
    HugeVector<T> projected;  // outputs that are normed before they are added, or those of a shared expert
    std::vector<float> partials;
    AdapterRows adapter_rows;
    std::vector<T> ranked;
    std::vector<T> scores;
    Routes routes;
    ExpertBuffers<Weight> experts;
};

// Routes `rows` and computes their experts with all members of a team: calls `take(token, output_at)` for each token, in
// which `output_at(column, count)` returns some of its outputs, rounded.
template <class Weight, class Input, class Take>
void route_and_compute(Member& member, const DecoderLayer<Weight>& layer, const Input& rows, Buffers<Weight>& b,
                       Take&& take) {
    using T = typename Weight::Value;
    const Experts<Weight>& experts = *layer.experts;
    const Router<T>& router = *layer.router;
    const int64_t tokens = rows.count, hidden = layer.qkv.inputs, chosen = router.num_chosen;
    const int64_t num_scores = router.scores.outputs, num_experts = experts.num_experts;
    multiply_all(member, router.scores, (const Linear<T>*)nullptr, Rows<T>{rows.values, nullptr, nullptr, tokens},
                 Additions<T>{}, [&](int64_t row, int64_t column, vf first, vf second, int count) {
                     store_some(b.scores.data() + row * num_scores + column, first, second, count);
                 });
    thread_local Routes own;
    if (tokens <= FEW) own.fit(tokens, chosen);
    Routes& routes = tokens <= FEW ? own : b.routes;
    auto choose = [&](int64_t i) {
        route(router, b.scores.data() + i * num_scores, num_experts, routes.ids.data() + i * chosen,
              routes.weights.data() + i * chosen);
    };
    if (tokens > FEW)
        member.each(tokens, choose);
    else
        for (int64_t i = 0; i < tokens; ++i) choose(i);
    SharedExpert<Weight> shared;
    if (layer.inner) shared = {&layer.gate_up, &layer.down, b.inner.data(), b.projected.data()};
    compute_experts(member, experts, rows, routes.ids.data(), routes.weights.data(), chosen, shared, b.experts,
                    [&](int64_t token, const ExpertSums& sums) {
                        vf gate = {};
                        if (shared.out) gate = splat(to_float(b.scores[token * num_scores + num_experts]));
                        gate = rounded<T>(1.0f / (1.0f + exp(-gate)));
                        take(token, [&](int64_t column, int count) {
                            const vf output = rounded<T>(sums.at(column, count));
                            if (!shared.out) return output;
                            const vf of_shared = load_some(shared.out + token * hidden + column, count);
                            return rounded<T>(output + rounded<T>(gate * of_shared));
                        });
                    });
}

// Computes one layer with all members of a team, and adds its output to `x` [num_tokens, hidden].
template <class Weight, class T = typename Weight::Value>
void add_layer(Member& member, const Decoder<Weight>& decoder, const DecoderLayer<Weight>& layer,
               const LayerAdapters<T>& adapters, const AttentionMetadata& step, const Attention& todo, T* x,
               const int64_t* positions, const RotaryTables<T>& rotary, const Caches<T>& caches, const Weight* following,
               Buffers<Weight>& b) {
    const Heads& heads = layer.heads;
    const int64_t tokens = step.num_tokens, hidden = layer.qkv.inputs, head_dim = heads.key_dim;
    const int64_t qkv_size = layer.qkv.outputs, attended_size = layer.o.inputs, all_heads = heads.queries + 2 * heads.keys;
    thread_local RowBuffer<Weight> own;
    if (tokens <= FEW) own.fit(tokens, std::max({hidden, attended_size, layer.inner}));
    RowBuffer<Weight>& normed = tokens <= FEW ? own : b.normed;
    auto each_row = [&](auto&& f) {
        if (tokens > FEW) return member.each_in_stretches(tokens, f);
        for (int64_t i = 0; i < tokens; ++i) f(i);
    };
    auto rms_norm_into = [&](const T* from, const float* weight, int64_t dim, T* out) {
        rms_norm(from, weight, dim, decoder.eps, decoder.rounds_norms, out);
    };
    auto rows_of = [&](const T* some, const Weight& next) {
        if (next.converts(tokens)) each_row([&](int64_t i) { next.convert_row(normed, some + i * next.inputs, i); });
        return next.rows(normed, some, tokens);
    };
    auto norm = [&](const float* weight, const Weight& next) {
        if (!weight) return rows_of(x, next);
        each_row([&](int64_t i) {
            T* out = normed.values.data() + i * hidden;
            rms_norm_into(x + i * hidden, weight, hidden, out);
            if (next.converts(tokens)) next.convert_row(normed, out, i);
        });
        return next.rows(normed, normed.values.data(), tokens);
    };
    auto added = [&](const AdapterStack<T>* stack, const auto& rows) {
        return additions(member, stack, b.adapter_rows, rows.values, b.ranked.data());
    };
    auto add_normed = [&](int64_t i, const float* weight) {
        T* out = b.projected.data() + i * hidden;
        rms_norm_into(out, weight, hidden, out);
        for (int64_t column = 0; column < hidden; column += W) {
            const int count = int(std::min<int64_t>(W, hidden - column));
            add_some(x + i * hidden + column, load_some(out + column, count), decoder.residual_multiplier, count);
        }
    };
    // Adds a product to `x`, normed if there is a norm.
    auto add_product = [&](const Weight& w, const Weight* next, const auto& rows, const AdapterStack<T>* stack,
                           const float* weight) {
        multiply_all(member, w, next, rows, added(stack, rows),
                     [&](int64_t row, int64_t column, vf first, vf second, int count) {
                         const int64_t at = row * hidden + column;
                         if (weight)
                             store_some(b.projected.data() + at, first, second, count);
                         else
                             add_some(x + at, rounded<T>(first), rounded<T>(second), decoder.residual_multiplier, count);
                     });
        if (weight) member.each(tokens, [&](int64_t i) { add_normed(i, weight); });
    };

    const auto attention_rows = norm(layer.input_norm, layer.qkv);
    multiply_all(member, layer.qkv, &layer.o, attention_rows, added(adapters.qkv, attention_rows),
                 [&](int64_t row, int64_t column, vf first, vf second, int count) {
                     store_some(b.qkv.data() + row * qkv_size + column, first, second, count);
                 });
    if (decoder.norms_all_heads && layer.q_norm)
        member.each(2 * tokens, [&](int64_t i) {
            T* queries = b.qkv.data() + i / 2 * qkv_size;
            const int64_t size = heads.queries * head_dim;
            if (i % 2 == 0)
                rms_norm_into(queries, layer.q_norm, size, queries);
            else
                rms_norm_into(queries + size, layer.k_norm, heads.keys * head_dim, queries + size);
        });
    member.each(tokens * all_heads, [&](int64_t i) {
        const int64_t token = i / all_heads, head = i % all_heads, cell = step.cell_mapping[token];
        T* at = b.qkv.data() + token * qkv_size + head * head_dim;
        if (head < heads.queries + heads.keys) {
            const float* weight = head < heads.queries ? layer.q_norm : layer.k_norm;
            if (weight && !decoder.norms_all_heads) rms_norm_into(at, weight, head_dim, at);
            const T* angles = rotary.first + layer.table * rotary.stride + positions[token] * rotary.dim;
            decoder.rotates_pairs ? rotate_pairs(at, angles, rotary.dim) : rotate(at, angles, rotary.dim);
        }
        if (head >= heads.queries + heads.keys)
            caches.put_value(heads, head - heads.queries - heads.keys, cell, at);
        else if (head >= heads.queries)
            caches.put_key(heads, head - heads.queries, cell, at);
    });
    attend_all(member, step, heads, todo, b.qkv.data(), qkv_size, caches, b.attended.data(), attended_size,
               b.partials.data());
    add_product(layer.o, layer.experts ? nullptr : &layer.gate_up, rows_of(b.attended.data(), layer.o), adapters.o,
                layer.attention_output_norm);

    if (layer.experts) {
        const auto rows = norm(layer.mlp_norm, layer.experts->gate_up[0]);
        return route_and_compute(member, layer, rows, b, [&](int64_t token, auto&& output_at) {
            T *residual = x + token * hidden, *out = b.projected.data() + token * hidden;
            for (int64_t column = 0; column < hidden; column += W) {
                const int count = int(std::min<int64_t>(W, hidden - column));
                const vf output = output_at(column, count);
                if (layer.mlp_output_norm)
                    store_some(out + column, output, count);
                else
                    add_some(residual + column, output, decoder.residual_multiplier, count);
            }
            if (layer.mlp_output_norm) add_normed(token, layer.mlp_output_norm);
        });
    }
    const auto mlp_rows = norm(layer.mlp_norm, layer.gate_up);
    const Additions<T> gate_up_added = added(adapters.gate_up, mlp_rows);
    each_panel(member, layer.gate_up, &layer.down, tokens, [&](const Panel& panel, const Next<Weight>& next) {
        const int64_t column = panel.number * W;
        const int count = int(std::min<int64_t>(W, layer.inner - column));
        products(layer.gate_up, panel, next, mlp_rows, gate_up_added, [&](int64_t row, vf gate, vf up) {
            store_some(b.inner.data() + row * layer.inner + column, gated<T>(gate, up, decoder.is_gelu), count);
        });
    });
    add_product(layer.down, following, rows_of(b.inner.data(), layer.down), adapters.down, layer.mlp_output_norm);
}

}  // namespace

template <class Weight, class T>
void run(const Decoder<Weight>& decoder, int64_t first, int64_t end, const AttentionMetadata& step, T* x,
         const int64_t* positions, const RotaryTables<T>& rotary, void* const* k_caches, void* const* v_caches,
         T* out, int threads, const LayerAdapters<T>* adapters, const int32_t* slots) {
    static Buffers<Weight> b;
    const bool in_groups = step.block_size % W == 0, is_int8 = step.has_int8_caches;
    const int64_t tokens = step.num_tokens, hidden = decoder.layers[0].qkv.inputs;
    std::vector<Attention> plans(end - first);
    std::vector<const Attention*> plan_of(end - first);
    int64_t most_inputs = 0, most_widened = 0;  // of matrices; of those for which rows are converted to floats
    bool has_experts = false;
    b.adapter_rows.group(adapters ? slots : nullptr, tokens);
    for (int64_t i = first; i < end; ++i) {
        const DecoderLayer<Weight>& layer = decoder.layers[i];
        int64_t same = first;  // the first layer with the same window
        while (decoder.layers[same].heads.window != layer.heads.window) ++same;
        if (same == i) plans[i - first] = plan(step, layer.heads);
        plan_of[i - first] = &plans[same - first];
        fit(b.qkv, tokens * layer.qkv.outputs);
        fit(b.attended, tokens * layer.o.inputs);
        fit(b.inner, tokens * layer.inner);
        if (layer.attention_output_norm || layer.mlp_output_norm || layer.experts) fit(b.projected, tokens * hidden);
        fit(b.partials, plans[same - first].partials * layer.heads.queries * layer.heads.partial_size());
        if (adapters)
            for (auto* stack : {adapters[i].qkv, adapters[i].o, adapters[i].gate_up, adapters[i].down})
                if (stack) fit(b.ranked, b.adapter_rows.rows.size() * stack->panels() * W);
        if (layer.experts) {
            has_experts = true;
            fit(b.scores, tokens * layer.router->scores.outputs);
            b.routes.fit(tokens, layer.router->num_chosen);
            b.experts.fit(*layer.experts, layer.inner ? &layer.down : nullptr, tokens, layer.router->num_chosen);
        }
        most_inputs = std::max({most_inputs, hidden, layer.o.inputs, layer.inner});
        const Weight* const of_experts = layer.experts ? layer.experts->gate_up : &layer.gate_up;
        for (const Weight* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down, of_experts})
            if (w->converts(tokens) && !w->quantizes()) most_widened = std::max(most_widened, w->inputs);
    }
    if (tokens > FEW) b.normed.fit(tokens, most_inputs);
    if (most_widened) b.normed.Weight::Buffer::fit(tokens, most_widened, false);
    // Each thread then norms rows, or sorts the choices of experts, for itself.
    const bool reads_between_loops = tokens <= FEW || has_experts;
    const Team::Wait wait = reads_between_loops ? Team::Wait::FOR_THREADS : Team::Wait::FOR_WORK;
    team().run(threads, wait, [&](Member& member) {
        for (int64_t i = first; i < end; ++i)
            add_layer(member, decoder, decoder.layers[i], adapters ? adapters[i] : LayerAdapters<T>{}, step,
                      *plan_of[i - first], x, positions, rotary,
                      Caches<T>{k_caches[i], v_caches[i], in_groups, is_int8},
                      i + 1 < end ? &decoder.layers[i + 1].qkv : nullptr, b);
        if (end == decoder.num_layers)
            member.each(tokens, [&](int64_t i) {
                rms_norm(x + i * hidden, decoder.norm, hidden, decoder.eps, decoder.rounds_norms, out + i * hidden);
            });
    });
}

#define INSTANTIATE(WEIGHT, T)                                                                                     \
    template void run(const Decoder<WEIGHT>&, int64_t, int64_t, const AttentionMetadata&, T*, const int64_t*,      \
                      const RotaryTables<T>&, void* const*, void* const*, T*, int, const LayerAdapters<T>*,           \
                      const int32_t*);

INSTANTIATE(Linear<float>, float)
INSTANTIATE(Linear<bf16>, bf16)
INSTANTIATE(BlockLinear<float>, float)
INSTANTIATE(BlockLinear<bf16>, bf16)

}  // namespace vmp
