// The choice of a token from a row of logits, the highest or a draw; log-probabilities.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "candidates.h"
#include "distribution.h"
#include "team.h"

namespace vmp {

// Returns the index of the highest of `size` scores, the first of equal scores; -1 if it is not finite or any is NaN.
template <class T>
inline int64_t argmax_of_row(const T* scores, int64_t size) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    vf best = splat(LOWEST);
    vi index = {};
    auto take = [&](vf value, int64_t at) {
        const vi is_new = (value > best) | (value != value);
        best = select(is_new, value, best);
        index = ((LANES + int32_t(at)) & is_new) | (index & ~is_new);
    };
    int64_t at = 0;
    for (; at + W <= size; at += W) take(load(scores + at), at);
    if (at < size) take(load_some(scores + at, int(size - at), LOWEST), at);
    const float bound = highest(best);
    if (!std::isfinite(bound)) return -1;
    int32_t first = std::numeric_limits<int32_t>::max();
    for (int i = 0; i < W; ++i)
        if (best[i] == bound) first = std::min(first, index[i]);
    return first;
}

// How a token is chosen for each of `count` rows; mirrors `kernels.sampling.DrawParams`. A filter that is off in every
// row is null.
struct Draws {
    const float* temperature;
    const float* typical_p;
    const float* min_p;
    const int64_t* top_k;
    const float* top_p;
    const double* uniform;  // in [0, 1)
};

// Draws a token of a row. Few tokens can pass a filter, so the filters choose among the candidates that a bound on the
// depth leaves. One instance serves one thread.
template <class T>
class Sampler {
   public:
    // Returns the token for row `row` of `draws`, or -1 as `argmax_of_row` does. Of equal logits at the limit of top_k
    // all are kept, at that of top_p the first.
    int64_t sample(const T* logits, int64_t size, const Draws& draws, int64_t row) {
        const float temperature = draws.temperature[row];
        if (temperature == 0) return argmax_of_row(logits, size);
        tokens_.take(logits, size, temperature);
        if (!tokens_.is_finite()) return -1;
        const bool has_typical_p = draws.typical_p && draws.typical_p[row] < 1;
        const bool has_min_p = draws.min_p && draws.min_p[row] > 0;
        const bool has_top_k = draws.top_k && draws.top_k[row] > 0 && draws.top_k[row] < size;
        const bool has_top_p = draws.top_p && draws.top_p[row] < 1;
        const float depth = has_min_p ? -std::log(draws.min_p[row]) : 0;
        double total = 0;  // of all tokens; 0 if another filter comes before top_p
        float bound = std::numeric_limits<float>::max();
        if (has_typical_p) {
            // keeps tokens at any depth
        } else if (has_min_p || has_top_k) {
            if (has_min_p) bound = depth;
            if (has_top_k) bound = std::min(bound, tokens_.top_k_bound(draws.top_k[row]));
        } else {
            total = tokens_.add_up();
            if (!has_top_p) return tokens_.draw(draws.uniform[row] * total);
            bound = tokens_.top_p_bound(total, draws.top_p[row]);
        }
        tokens_.gather(bound, candidates_);
        if (has_typical_p) {
            candidates_.keep_typical(draws.typical_p[row]);
            if (has_min_p) candidates_.keep_within(depth);
        }
        if (has_top_k) candidates_.keep_lowest(double(draws.top_k[row]));
        if (has_top_p) candidates_.keep_heaviest(draws.top_p[row] * (total > 0 ? total : candidates_.total_weight()));
        return candidates_.draw(draws.uniform[row]);
    }

   private:
    Distribution<T> tokens_;
    Candidates candidates_;
};

// Calls `f(row)` for each of `count` rows, on up to `most` threads; a single row wakes no other thread.
template <class F>
void for_rows(int64_t count, int most, F&& f) {
    if (count == 1) return f(0);
    team().run(most, [&](Member& member) { member.each_in_stretches(count, f); });
}

// Writes the result of `argmax_of_row` for `count` rows, `stride` scores apart.
template <class T>
void argmax_rows(const T* scores, int64_t stride, int64_t size, int64_t count, int64_t* indices, int threads) {
    for_rows(count, threads, [&](int64_t row) { indices[row] = argmax_of_row(scores + row * stride, size); });
}

// Writes a token for each of `count` rows, `stride` logits apart; the results do not depend on the number of threads.
template <class T>
void sample_rows(const T* logits, int64_t stride, int64_t size, int64_t count, const Draws& draws, int64_t* tokens,
                 int threads) {
    for_rows(count, threads, [&](int64_t row) {
        static thread_local Sampler<T> sampler;
        tokens[row] = sampler.sample(logits + row * stride, size, draws, row);
    });
}

// Where the log-probabilities of `count` rows go; `most` of the most likely tokens of each row.
struct Logprobs {
    int64_t most;
    int32_t* ids;   // [count, 1 + most]: the chosen token, then the most likely ones, of equally likely ones the first
    float* values;  // [count, 1 + most]: their log-probabilities
    int64_t* ranks; // [count]: 1 + the number of tokens that are more likely than the chosen one
};

// Writes them for `count` rows, `stride` logits apart. A row whose highest logit is not finite, or that holds NaN, gets
// NaN.
template <class T>
void logprobs_of_rows(const T* logits, int64_t stride, int64_t size, int64_t count, const int64_t* chosen,
                      const Logprobs& out, int threads) {
    for_rows(count, threads, [&](int64_t row) {
        static thread_local Distribution<T> tokens;
        static thread_local Candidates candidates;
        const int64_t width = 1 + out.most;
        int32_t* ids = out.ids + row * width;
        float* values = out.values + row * width;
        tokens.take(logits + row * stride, size, 1);
        ids[0] = int32_t(chosen[row]);
        for (int64_t i = 1; i < width; ++i) ids[i] = int32_t(i - 1);
        out.ranks[row] = 1;
        if (!tokens.is_finite()) {
            std::fill(values, values + width, std::numeric_limits<float>::quiet_NaN());
            return;
        }
        const double shift = std::log(tokens.add_up());
        values[0] = float(-tokens.depth(ids[0]) - shift);
        out.ranks[row] += tokens.num_above(ids[0]);
        if (!out.most) return;
        tokens.gather(tokens.top_k_bound(out.most), candidates);
        candidates.keep_lowest(double(out.most));
        int64_t i = 1;
        for (const Candidates::Token& token : candidates.sorted()) {
            if (i == width) return;
            ids[i] = token.index;
            values[i++] = float(-read<float>(&token.key) - shift);
        }
        for (int64_t index = 0; i < width; ++index) {  // tokens without any chance follow
            if (std::isfinite(tokens.depth(index))) continue;
            ids[i] = int32_t(index);
            values[i++] = -std::numeric_limits<float>::infinity();
        }
    });
}

}  // namespace vmp
