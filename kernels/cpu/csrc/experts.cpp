// The functions that experts.h declares, compiled for each kind of weights.

#include "experts.h"

namespace vmp {

template <class Weight>
void compute_experts(Member& member, const Experts<Weight>& experts, const typename Weight::Rows& x, const int64_t* ids,
                     const float* router_weights, int64_t chosen, const SharedExpert<Weight>& shared,
                     ExpertBuffers<Weight>& b, const std::function<void(int64_t token, const ExpertSums&)>& take) {
    using T = typename Weight::Value;
    using Input = typename Weight::Rows;
    const Weight &gate_up = experts.gate_up[0], &down = experts.down[0];
    const int64_t hidden = gate_up.inputs, inner = down.inputs, most = tokens_together(chosen);
    const int64_t shared_inner = shared.down ? shared.down->inputs : 0;
    thread_local Choices choices;
    for (int64_t first = 0; first < x.count; first += most) {
        const int64_t num_tokens = std::min(most, x.count - first), count = num_tokens * chosen;
        const Input given = gate_up.part(x, first, num_tokens);
        T* const shared_rows = shared.inner + first * shared_inner;
        choices.sort(ids + first * chosen, num_tokens, chosen, experts.num_experts);

        // Multiplies the rows of each expert with its matrix, and all tokens with that of the shared expert: calls
        // `put(position, panel, first, second)` and `put_shared(token, panel, first, second)`.
        auto multiply = [&](const Weight* weights, const Input& rows, bool are_by_position, const Weight* of_shared,
                            const Input& rows_of_shared, auto&& put, auto&& put_shared) {
            const int64_t panels = weights->panels(), active = choices.experts.size();
            const int64_t shared_panels = of_shared ? of_shared->panels() : 0;
            const int64_t all_panels = shared_panels + active * panels;
            auto panel_at = [&](int64_t i) -> Next<Weight> {
                if (i < shared_panels) return {of_shared, i};
                return {weights + choices.experts[(i - shared_panels) / panels], (i - shared_panels) % panels};
            };
            member.each_in_stretches(all_panels, [&](int64_t i) {
                const auto [w, panel] = panel_at(i);
                const Next<Weight> next = panel_at(std::min(i + 1, all_panels - 1));
                if (i < shared_panels)
                    return products(*w, panel, next, rows_of_shared,
                                    [&](int64_t row, vf v0, vf v1) { put_shared(row, i, v0, v1); });
                const int64_t which = (i - shared_panels) / panels;
                const int64_t position = choices.firsts[which], end = choices.firsts[which + 1];
                products(*w, panel, next, w->part(rows, are_by_position ? position : 0, end - position),
                         [&](int64_t row, vf v0, vf v1) { put(position + row, panel, v0, v1); });
            });
        };
        auto store_gated = [&](T* row, int64_t size, int64_t panel, vf gate, vf up) {
            const int64_t column = panel * W;
            store_some(row + column, gated<T>(gate, up, experts.is_gelu), int(std::min<int64_t>(W, size - column)));
        };
        auto store_panel = [&](auto* row, int64_t panel, vf first_half, vf second_half) {
            const int64_t column = panel * NR, size = hidden - column;
            store_some(row + column, first_half, int(std::min<int64_t>(W, size)));
            if (size > W) store_some(row + column + W, second_half, int(std::min<int64_t>(W, size - W)));
        };

        // All experts of a single token multiply the same row.
        const bool gathers = num_tokens > 1;
        if (gathers)
            member.each(count, [&](int64_t position) {
                const int64_t token = choices.tokens[position];
                if (gate_up.quantizes())
                    b.gathered_quantized.copy_row(given, token, hidden, position);
                else
                    std::memcpy(b.gathered.data() + position * hidden, given.values + token * hidden, sizeof(T) * hidden);
            });
        const Input gathered = gathers ? b.gathered_quantized.rows(b.gathered.data(), count) : given;
        multiply(
            experts.gate_up, gathered, gathers, shared.gate_up, given,
            [&](int64_t position, int64_t panel, vf gate, vf up) {
                store_gated(b.inner.data() + position * inner, inner, panel, gate, up);
            },
            [&](int64_t token, int64_t panel, vf gate, vf up) {
                store_gated(shared_rows + token * shared_inner, shared_inner, panel, gate, up);
            });
        const int64_t quantized = down.quantizes() ? count : 0;
        const int64_t shared_quantized = shared.down && shared.down->quantizes() ? num_tokens : 0;
        if (quantized + shared_quantized)
            member.each(quantized + shared_quantized, [&](int64_t i) {
                const int64_t token = i - quantized;
                if (i < quantized)
                    b.inner_quantized.quantize_row(b.inner.data() + i * inner, inner, i);
                else
                    b.shared_quantized.quantize_row(shared_rows + token * shared_inner, shared_inner, token);
            });
        multiply(
            experts.down, b.inner_quantized.rows(b.inner.data(), count), true, shared.down,
            b.shared_quantized.rows(shared_rows, num_tokens),
            [&](int64_t position, int64_t panel, vf v0, vf v1) {
                store_panel(b.outputs.data() + position * hidden, panel, v0, v1);
            },
            [&](int64_t token, int64_t panel, vf v0, vf v1) {
                store_panel(shared.out + (first + token) * hidden, panel, v0, v1);
            });
        member.each(num_tokens, [&](int64_t token) {
            const int64_t choice = token * chosen;
            take(first + token, {b.outputs.data(), hidden, choices.positions.data() + choice,
                                 router_weights + first * chosen + choice, chosen});
        });
    }
}

template <class Weight, class T>
void run_experts(const Experts<Weight>& experts, const T* x, int64_t num_tokens, const int64_t* ids,
                 const float* router_weights, int64_t chosen, T* out, int threads) {
    static ExpertBuffers<Weight> b;
    static typename Weight::Buffer quantized;
    const Weight& gate_up = experts.gate_up[0];
    const int64_t hidden = gate_up.inputs, most = tokens_together(chosen);
    b.fit(experts, nullptr, num_tokens, chosen);
    if (gate_up.quantizes()) quantized.fit(std::min(num_tokens, most), hidden, true);
    for (int64_t first = 0; first < num_tokens; first += most) {
        const int64_t tokens = std::min(most, num_tokens - first);
        const T* rows = x + first * hidden;
        T* sums = out + first * hidden;
        team().run(threads, [&](Member& member) {
            if (gate_up.quantizes())
                member.each(tokens, [&](int64_t i) { quantized.quantize_row(rows + i * hidden, hidden, i); });
            compute_experts(member, experts, quantized.rows(rows, tokens), ids + first * chosen,
                            router_weights + first * chosen, chosen, SharedExpert<Weight>{}, b,
                            [&](int64_t token, const ExpertSums& sums_of_token) {
                                for (int64_t column = 0; column < hidden; column += W) {
                                    const int size = int(std::min<int64_t>(W, hidden - column));
                                    store_some(sums + token * hidden + column, sums_of_token.at(column, size), size);
                                }
                            });
        });
    }
}

#define INSTANTIATE(WEIGHT)                                                                                           \
    template void compute_experts(Member&, const Experts<WEIGHT>&, const WEIGHT::Rows&, const int64_t*, const float*, \
                                  int64_t, const SharedExpert<WEIGHT>&, ExpertBuffers<WEIGHT>&,                       \
                                  const std::function<void(int64_t, const ExpertSums&)>&);                            \
    template void run_experts(const Experts<WEIGHT>&, const WEIGHT::Value*, int64_t, const int64_t*, const float*,    \
                              int64_t, WEIGHT::Value*, int);

INSTANTIATE(Linear<float>)
INSTANTIATE(Linear<bf16>)
INSTANTIATE(BlockLinear<float>)
INSTANTIATE(BlockLinear<bf16>)

}  // namespace vmp
