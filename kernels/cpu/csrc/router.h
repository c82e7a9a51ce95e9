// The router of a layer with experts: which experts compute a token, and what their outputs weigh.
#pragma once

#include <limits>
#include <vector>

#include "linear.h"

namespace vmp {

template <class T>
struct Router {
    Linear<T> scores;  // the outputs: a score for each expert, and then the gate of the shared expert if there is one
    int64_t num_chosen;
    int64_t normalizes_weights;  // whether the weights of a token's experts are divided by their sum
    int64_t rounds_weights;      // whether the weights are rounded to T
};

// The experts of some tokens and their weights, both [num_tokens, num_chosen].
struct Routes {
    std::vector<int64_t> ids;
    std::vector<float> weights;

    void fit(int64_t num_tokens, int64_t chosen) {
        ids.resize(num_tokens * chosen);
        weights.resize(num_tokens * chosen);
    }
};

// Writes the experts of a token with the highest softmax of its `scores` [num_experts], and their weights, highest first;
// of equal experts, the first. If a score is not finite, so are the weights, but the experts exist.
template <class T>
inline void route(const Router<T>& router, const T* scores, int64_t num_experts, int64_t* ids, float* weights) {
    constexpr float NO_SCORE = -std::numeric_limits<float>::infinity();
    thread_local std::vector<float> probabilities;
    fit(probabilities, num_experts + W);
    float* const values = probabilities.data();
    vf most = splat(NO_SCORE), sums = {};
    for (int64_t i = 0; i < num_experts; i += W) {
        const vf some = load_some(scores + i, int(std::min<int64_t>(W, num_experts - i)), NO_SCORE);
        most = select((some > most) | (some != some), some, most);
        store(values + i, some);
    }
    const float top = highest(most);
    for (int64_t i = 0; i < num_experts; i += W) {
        const vf powers = exp(load(values + i) - top);
        sums += powers;
        store(values + i, powers);
    }
    const float total = sum(sums);
    const int64_t chosen = router.num_chosen;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
        const float value = values[expert] / total;
        if (expert >= chosen && !(value > weights[chosen - 1])) continue;
        int64_t position = std::min(expert, chosen - 1);
        for (; position > 0 && value > weights[position - 1]; --position) {
            ids[position] = ids[position - 1];
            weights[position] = weights[position - 1];
        }
        ids[position] = expert;
        weights[position] = value;
    }
    float sum_of_chosen = 0;
    for (int64_t i = 0; i < chosen; ++i) sum_of_chosen += weights[i];
    for (int64_t i = 0; i < chosen; ++i) {
        if (router.normalizes_weights) weights[i] /= sum_of_chosen;
        if (router.rounds_weights) weights[i] = to_float(from_float<T>(weights[i]));
    }
}

}  // namespace vmp
