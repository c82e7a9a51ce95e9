// Mixtures of experts: the MLPs that a router chose for each token, and the weighted sums of their outputs.
//
// The choices are sorted by expert, so that each panel of weights is read once for all its rows. A sum does not depend
// on the other rows of an expert, and a token adds its choices in their order, so results are batch-invariant.
#pragma once

#include "blocks.h"
#include "elementwise.h"
#include "linear.h"
#include "team.h"

namespace vmp {

// The experts of a layer, all of the same shapes; `Weight` is Linear or BlockLinear.
template <class Weight>
struct Experts {
    const Weight* gate_up;  // of each expert; panels of W columns of gate beside the same columns of up
    const Weight* down;     // of each expert
    int64_t num_experts;
    int64_t is_gelu;  // as in Decoder
};

// The most choices that are computed together, so that the memory for them stays small beside that of the weights.
constexpr int64_t MOST_CHOICES = 8192;

// The number of tokens that are computed together.
inline int64_t tokens_together(int64_t chosen) { return std::max<int64_t>(1, MOST_CHOICES / chosen); }

// The choices of some tokens, sorted by expert; a place is an index in that order.
struct Choices {
    std::vector<int64_t> experts;  // the experts that have tokens
    std::vector<int64_t> firsts;   // the first place of each of these, and the number of all places
    std::vector<int64_t> tokens;   // by place
    std::vector<int64_t> places;   // by token and choice

    // Sorts `ids` [num_tokens, chosen], which are below `num_experts`.
    void sort(const int64_t* ids, int64_t num_tokens, int64_t chosen, int64_t num_experts) {
        const int64_t count = num_tokens * chosen;
        next_.assign(num_experts + 1, 0);
        experts.clear();
        firsts.clear();
        for (int64_t i = 0; i < count; ++i) ++next_[ids[i] + 1];
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            if (next_[expert + 1]) {
                experts.push_back(expert);
                firsts.push_back(next_[expert]);
            }
            next_[expert + 1] += next_[expert];
        }
        firsts.push_back(count);
        tokens.resize(count);
        places.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            places[i] = next_[ids[i]]++;
            tokens[places[i]] = i / chosen;
        }
    }

   private:
    std::vector<int64_t> next_;  // by expert
};

// An MLP that computes all tokens beside the experts.
template <class Weight>
struct SharedExpert {
    using T = typename Weight::Value;

    const Weight* gate_up = nullptr;  // null: there is none
    const Weight* down = nullptr;
    T* inner = nullptr;  // memory for [num_tokens, down->inputs]
    T* out = nullptr;    // its outputs [num_tokens, hidden]
};

// Memory that the layers share; it grows to the size of the largest call.
template <class Weight>
struct ExpertBuffers {
    using T = typename Weight::Value;

    std::vector<T> gathered, inner;  // rows by place
    typename Weight::Buffer gathered_quantized, inner_quantized;
    typename Weight::Buffer shared_quantized;  // rows by token
    std::vector<float> outputs;                // by place

    void fit(const Experts<Weight>& experts, const Weight* shared_down, int64_t num_tokens, int64_t chosen) {
        const Weight &gate_up = experts.gate_up[0], &down = experts.down[0];
        const int64_t hidden = gate_up.inputs, tokens = std::min(num_tokens, tokens_together(chosen));
        const int64_t count = tokens * chosen;
        auto fit = [](auto& some, int64_t size) { some.resize(std::max<int64_t>(some.size(), size)); };
        if (gate_up.quantizes())
            gathered_quantized.fit(count, hidden);
        else
            fit(gathered, count * hidden);
        if (down.quantizes()) inner_quantized.fit(count, down.inputs);
        if (shared_down && shared_down->quantizes()) shared_quantized.fit(tokens, shared_down->inputs);
        fit(inner, count * down.inputs);
        fit(outputs, count * hidden);
    }
};

// Computes the experts of all tokens with all members of a team, and for each token calls `take(token, sum_at)`, in which
// `sum_at(column, count)` returns some of the weighted sums of its experts' outputs; then the outputs of the shared
// expert are complete too. `x` has the rows in the form in which they are multiplied, and `b` fits them. `ids`, in range,
// and `router_weights` [num_tokens, chosen].
template <class Weight, class Input, class Take>
void compute_experts(Member& member, const Experts<Weight>& experts, const Input& x, const int64_t* ids,
                     const float* router_weights, int64_t chosen, const SharedExpert<Weight>& shared,
                     ExpertBuffers<Weight>& b, Take&& take) {
    using T = typename Weight::Value;
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
        // `put(place, panel, first, second)` and `put_shared(token, panel, first, second)`.
        auto multiply = [&](const Weight* weights, const Input& rows, bool are_by_place, const Weight* of_shared,
                            const Input& rows_of_shared, auto&& put, auto&& put_shared) {
            const int64_t panels = weights->panels(), active = choices.experts.size();
            const int64_t shared_panels = of_shared ? of_shared->panels() : 0;
            member.each_guided(shared_panels + active * panels, [&](int64_t i) {
                if (i < shared_panels)
                    return products(*of_shared, i, rows_of_shared,
                                    [&](int64_t row, vf v0, vf v1) { put_shared(row, i, v0, v1); });
                const int64_t which = (i - shared_panels) / panels, panel = (i - shared_panels) % panels;
                const int64_t place = choices.firsts[which], end = choices.firsts[which + 1];
                const Weight& w = weights[choices.experts[which]];
                products(w, panel, w.part(rows, are_by_place ? place : 0, end - place),
                         [&](int64_t row, vf v0, vf v1) { put(place + row, panel, v0, v1); });
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
            member.each(count, [&](int64_t place) {
                const int64_t token = choices.tokens[place];
                if (gate_up.quantizes())
                    b.gathered_quantized.copy_row(given, token, hidden, place);
                else
                    std::memcpy(b.gathered.data() + place * hidden, given.values + token * hidden, sizeof(T) * hidden);
            });
        const Input gathered = gathers ? b.gathered_quantized.rows(b.gathered.data(), count) : given;
        multiply(
            experts.gate_up, gathered, gathers, shared.gate_up, given,
            [&](int64_t place, int64_t panel, vf gate, vf up) {
                store_gated(b.inner.data() + place * inner, inner, panel, gate, up);
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
            [&](int64_t place, int64_t panel, vf v0, vf v1) {
                store_panel(b.outputs.data() + place * hidden, panel, v0, v1);
            },
            [&](int64_t token, int64_t panel, vf v0, vf v1) {
                store_panel(shared.out + (first + token) * hidden, panel, v0, v1);
            });
        member.each(num_tokens, [&](int64_t token) {
            take(first + token, [&](int64_t column, int size) {
                vf total = {};
                for (int64_t i = token * chosen; i < (token + 1) * chosen; ++i)
                    total += load_some(b.outputs.data() + choices.places[i] * hidden + column, size) *
                             router_weights[first * chosen + i];
                return total;
            });
        });
    }
}

// Writes the weighted sums of the outputs of each token's experts to `out`, which has the shape of `x` [num_tokens,
// hidden]. `ids`, in range, and `router_weights` [num_tokens, chosen].
template <class Weight, class T = typename Weight::Value>
void run_experts(const Experts<Weight>& experts, const T* x, int64_t num_tokens, const int64_t* ids,
                 const float* router_weights, int64_t chosen, T* out, int threads) {
    static ExpertBuffers<Weight> b;
    static typename Weight::Buffer quantized;
    const Weight& gate_up = experts.gate_up[0];
    const int64_t hidden = gate_up.inputs, most = tokens_together(chosen);
    b.fit(experts, nullptr, num_tokens, chosen);
    if (gate_up.quantizes()) quantized.fit(std::min(num_tokens, most), hidden);
    for (int64_t first = 0; first < num_tokens; first += most) {
        const int64_t tokens = std::min(most, num_tokens - first);
        const T* rows = x + first * hidden;
        T* sums = out + first * hidden;
        team().run(threads, [&](Member& member) {
            if (gate_up.quantizes())
                member.each(tokens, [&](int64_t i) { quantized.quantize_row(rows + i * hidden, hidden, i); });
            compute_experts(member, experts, quantized.rows(rows, tokens), ids + first * chosen,
                            router_weights + first * chosen, chosen, SharedExpert<Weight>{}, b,
                            [&](int64_t token, auto&& sum_at) {
                                for (int64_t column = 0; column < hidden; column += W) {
                                    const int size = int(std::min<int64_t>(W, hidden - column));
                                    store_some(sums + token * hidden + column, sum_at(column, size), size);
                                }
                            });
        });
    }
}

}  // namespace vmp
