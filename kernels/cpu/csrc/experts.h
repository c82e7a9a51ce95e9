// Mixtures of experts: the MLPs that a router chose for each token, and the weighted sums of their outputs.
//
// The choices are sorted by expert, so that each panel of weights is read once for all its rows. A sum does not depend
// on the other rows of an expert, and a token adds its choices in their order, so results are batch-invariant.
#pragma once

#include <functional>
#include <vector>

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

// The choices of some tokens, sorted by expert; a position is an index in that order.
struct Choices {
    std::vector<int64_t> experts;    // the experts that have tokens
    std::vector<int64_t> firsts;     // the first position of each of these, and the number of all positions
    std::vector<int64_t> tokens;     // by position
    std::vector<int64_t> positions;  // by token and choice

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
        positions.resize(count);
        for (int64_t i = 0; i < count; ++i) {
            positions[i] = next_[ids[i]]++;
            tokens[positions[i]] = i / chosen;
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

    HugeVector<T> gathered, inner;  // rows by position
    typename Weight::Buffer gathered_quantized, inner_quantized;
    typename Weight::Buffer shared_quantized;  // rows by token
    HugeVector<float> outputs;                 // by position

    void fit(const Experts<Weight>& experts, const Weight* shared_down, int64_t num_tokens, int64_t chosen) {
        const Weight &gate_up = experts.gate_up[0], &down = experts.down[0];
        const int64_t hidden = gate_up.inputs, tokens = std::min(num_tokens, tokens_together(chosen));
        const int64_t count = tokens * chosen;
        if (gate_up.quantizes())
            gathered_quantized.fit(count, hidden, true);
        else
            vmp::fit(gathered, count * hidden);
        if (down.quantizes()) inner_quantized.fit(count, down.inputs, true);
        if (shared_down && shared_down->quantizes()) shared_quantized.fit(tokens, shared_down->inputs, true);
        vmp::fit(inner, count * down.inputs);
        vmp::fit(outputs, count * hidden);
    }
};

// The weighted sums of the outputs of one token's experts.
struct ExpertSums {
    const float* outputs;      // of all choices, by position
    int64_t size;              // of an output
    const int64_t* positions;  // of the token's choices
    const float* weights;      // of the same
    int64_t chosen;

    // Returns `count` sums from `column` on.
    vf at(int64_t column, int count) const {
        vf total = {};
        for (int64_t i = 0; i < chosen; ++i)
            total += load_some(outputs + positions[i] * size + column, count) * weights[i];
        return total;
    }
};

// Computes the experts of all tokens with all members of a team, and calls `take` for each token; then the outputs of
// the shared expert are complete too. `x` has the rows in the form in which they are multiplied, and `b` fits them.
// `ids`, in range, and `router_weights` [num_tokens, chosen].
template <class Weight>
void compute_experts(Member& member, const Experts<Weight>& experts, const typename Weight::Rows& x, const int64_t* ids,
                     const float* router_weights, int64_t chosen, const SharedExpert<Weight>& shared,
                     ExpertBuffers<Weight>& b, const std::function<void(int64_t token, const ExpertSums&)>& take);

// Writes the weighted sums of the outputs of each token's experts to `out`, which has the shape of `x` [num_tokens,
// hidden]. `ids`, in range, and `router_weights` [num_tokens, chosen].
template <class Weight, class T = typename Weight::Value>
void run_experts(const Experts<Weight>& experts, const T* x, int64_t num_tokens, const int64_t* ids,
                 const float* router_weights, int64_t chosen, T* out, int threads);

}  // namespace vmp
