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

// The choices of some tokens, sorted by expert; a place is an index in that order.
struct Choices {
    std::vector<int64_t> experts;  // the experts that have tokens
    std::vector<int64_t> firsts;   // the first place of each of these, and the number of all places
    std::vector<int64_t> tokens;   // by place
    std::vector<int64_t> places;   // by token and choice

    // `ids` [num_tokens, chosen] are below `num_experts`.
    Choices(const int64_t* ids, int64_t num_tokens, int64_t chosen, int64_t num_experts) {
        const int64_t count = num_tokens * chosen;
        std::vector<int64_t> next(num_experts + 1);
        for (int64_t i = 0; i < count; ++i) ++next[ids[i] + 1];
        for (int64_t expert = 0; expert < num_experts; ++expert) {
            if (next[expert + 1]) {
                experts.push_back(expert);
                firsts.push_back(next[expert]);
            }
            next[expert + 1] += next[expert];
        }
        firsts.push_back(count);
        tokens.resize(count);
        places.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            places[i] = next[ids[i]]++;
            tokens[places[i]] = i / chosen;
        }
    }
};

// Memory that the layers share; it grows to the size of the largest call.
template <class Weight>
struct ExpertBuffers {
    using T = typename Weight::Value;

    std::vector<T> gathered, inner;  // rows by place
    typename Weight::Buffer gathered_quantized, inner_quantized;
    std::vector<float> outputs;  // by place
};

// Computes tokens that have at most MOST_CHOICES choices; see `run_experts`.
template <class Weight, class T = typename Weight::Value>
void compute_experts(const Experts<Weight>& experts, const T* x, int64_t num_tokens, const int64_t* ids,
                     const float* router_weights, int64_t chosen, T* out, int threads) {
    static ExpertBuffers<Weight> b;
    const Weight &gate_up = experts.gate_up[0], &down = experts.down[0];
    const int64_t hidden = gate_up.inputs, inner = down.inputs, count = num_tokens * chosen;
    const Choices choices(ids, num_tokens, chosen, experts.num_experts);
    auto fit = [](auto& some, int64_t size) { some.resize(std::max<int64_t>(some.size(), size)); };
    if (gate_up.quantizes())
        b.gathered_quantized.fit(count, hidden);
    else
        fit(b.gathered, count * hidden);
    if (down.quantizes()) b.inner_quantized.fit(count, inner);
    fit(b.inner, count * inner);
    fit(b.outputs, count * hidden);
    team().run(threads, [&](Member& member) {
        // Multiplies the rows of each expert with its matrix: calls `take(place, panel, first, second)`.
        auto multiply = [&](const Weight* weights, const auto& rows, auto&& take) {
            const int64_t panels = weights->panels(), active = choices.experts.size();
            member.each_guided(active * panels, [&](int64_t i) {
                const int64_t which = i / panels, panel = i % panels, first = choices.firsts[which];
                const Weight& w = weights[choices.experts[which]];
                products(w, panel, w.part(rows, first, choices.firsts[which + 1] - first),
                         [&](int64_t row, vf v0, vf v1) { take(first + row, panel, v0, v1); });
            });
        };

        member.each(count, [&](int64_t place) {
            const T* row = x + choices.tokens[place] * hidden;
            if (gate_up.quantizes())
                b.gathered_quantized.quantize_row(row, hidden, place);
            else
                std::memcpy(b.gathered.data() + place * hidden, row, sizeof(T) * hidden);
        });
        multiply(experts.gate_up, b.gathered_quantized.rows(b.gathered.data(), count),
                 [&](int64_t place, int64_t panel, vf gate, vf up) {
                     const int64_t column = panel * W;
                     const int size = int(std::min<int64_t>(W, inner - column));
                     store_some(b.inner.data() + place * inner + column, gated<T>(gate, up, experts.is_gelu), size);
                 });
        if (down.quantizes())
            member.each(count, [&](int64_t place) {
                b.inner_quantized.quantize_row(b.inner.data() + place * inner, inner, place);
            });
        multiply(experts.down, b.inner_quantized.rows(b.inner.data(), count),
                 [&](int64_t place, int64_t panel, vf first, vf second) {
                     const int64_t column = panel * NR, size = hidden - column;
                     float* at = b.outputs.data() + place * hidden + column;
                     store_some(at, first, int(std::min<int64_t>(W, size)));
                     if (size > W) store_some(at + W, second, int(std::min<int64_t>(W, size - W)));
                 });
        member.each(num_tokens, [&](int64_t token) {
            for (int64_t column = 0; column < hidden; column += W) {
                const int size = int(std::min<int64_t>(W, hidden - column));
                vf total = {};
                for (int64_t i = token * chosen; i < (token + 1) * chosen; ++i)
                    total += load_some(b.outputs.data() + choices.places[i] * hidden + column, size) * router_weights[i];
                store_some(out + token * hidden + column, total, size);
            }
        });
    });
}

// Writes the weighted sums of the outputs of each token's experts to `out`, which has the shape of `x` [num_tokens,
// hidden]. `ids`, in range, and `router_weights` [num_tokens, chosen].
template <class Weight, class T = typename Weight::Value>
void run_experts(const Experts<Weight>& experts, const T* x, int64_t num_tokens, const int64_t* ids,
                 const float* router_weights, int64_t chosen, T* out, int threads) {
    const int64_t hidden = experts.gate_up[0].inputs, most = std::max<int64_t>(1, MOST_CHOICES / chosen);
    for (int64_t first = 0; first < num_tokens; first += most)
        compute_experts(experts, x + first * hidden, std::min(most, num_tokens - first), ids + first * chosen,
                        router_weights + first * chosen, chosen, out + first * hidden, threads);
}

}  // namespace vmp
