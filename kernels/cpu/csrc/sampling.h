// The choice of a token from a row of logits: the highest, or a draw from the filtered distribution.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
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

// Writes the result of `argmax_of_row` for `count` rows, `stride` scores apart.
template <class T>
void argmax_rows(const T* scores, int64_t stride, int64_t size, int64_t count, int64_t* indices, int threads) {
    team().run(threads, [&](Member& member) {
        member.each_in_stretches(count, [&](int64_t row) { indices[row] = argmax_of_row(scores + row * stride, size); });
    });
}

// How a token is chosen for each of `count` rows; mirrors `kernels.sampling.DrawParams`. A filter that is off in every
// row is null.
struct Draws {
    const float* temperature;
    const float* min_p;
    const int64_t* top_k;
    const float* top_p;
    const double* uniform;  // in [0, 1)
};

// Finds the tokens of a row whose depths are lowest. A depth is how far a token lies below the most likely token, so its
// bits order like the number. A first pass adds what the tokens count into bins of the depths' high bits; only the
// tokens of the bin in which the sum reaches the bound are sorted.
class DepthCut {
   public:
    struct Limit {
        uint32_t depth;  // the bits of the greatest depth that is kept
        int32_t index;   // of the last token that is kept of those with this depth
    };

    // Returns the limit at which `bound(sum)` first holds, where `sum` includes the token: `weight(index)` is what a token
    // counts. The last token is the limit if it never holds.
    template <class Weight, class Bound>
    Limit find(const std::vector<float>& depths, int64_t size, Weight&& weight, Bound&& bound) {
        for (auto& bins : bins_) bins.fill(0.0);
        for (int64_t i = 0; i < size; ++i)
            if (const uint32_t depth = bits(depths[i]); depth != BARRED) bins_[i % LANES][depth >> LOW_BITS] += weight(i);
        for (int lane = 1; lane < LANES; ++lane)
            for (uint32_t bin = 0; bin < BINS; ++bin) bins_[0][bin] += bins_[lane][bin];
        double sum = 0;
        uint32_t last = 0;
        for (uint32_t bin = 0; bin < BINS; ++bin) {
            if (bins_[0][bin] == 0) continue;
            last = bin;
            if (bound(sum + bins_[0][bin])) break;
            sum += bins_[0][bin];
        }
        found_.clear();
        for (int64_t i = 0; i < size; ++i)
            if (const uint32_t depth = bits(depths[i]); depth >> LOW_BITS == last) found_.push_back({depth, int32_t(i)});
        std::sort(found_.begin(), found_.end(), [](const Limit& a, const Limit& b) {
            return a.depth != b.depth ? a.depth < b.depth : a.index < b.index;
        });
        for (const Limit& token : found_)
            if (bound(sum += weight(token.index))) return token;
        return found_.back();
    }

    static uint32_t bits(float depth) { return read<uint32_t>(&depth); }

   private:
    static constexpr int LOW_BITS = 19;  // four bits of the mantissa stay in the number of a bin
    static constexpr uint32_t BINS = 1u << (31 - LOW_BITS);  // no depth is negative
    static constexpr uint32_t BARRED = 0x7f800000;  // the bits of infinity
    static constexpr int LANES = 4;                 // sums of a bin that do not wait for one another
    std::array<double, BINS> bins_[LANES];
    std::vector<Limit> found_;
};

// Draws a token of a row. One instance serves one thread.
class Sampler {
   public:
    // Returns the token for row `row` of `draws`, or -1 as `argmax_of_row` does. Of equal logits at the limit of top_k
    // all are kept, at that of top_p the first.
    template <class T>
    int64_t sample(const T* logits, int64_t size, const Draws& draws, int64_t row) {
        const int64_t first = argmax_of_row(logits, size);
        const float temperature = draws.temperature[row];
        if (first < 0 || temperature == 0) return first;
        fit(size);
        const float highest = to_float(logits[first]);
        const float floor = draws.min_p && draws.min_p[row] > 0 ? -std::log(draws.min_p[row]) : BARRED;
        for (int64_t i = 0; i < size; i += W) {
            const vf logit = load_some(logits + i, int(std::min<int64_t>(W, size - i)), -BARRED);
            const vf depth = (highest - logit) / temperature;
            store(&depths_[i], select(depth > floor, splat(BARRED), depth));
        }
        if (draws.top_k && draws.top_k[row] > 0 && draws.top_k[row] < size) cut_top_k(size, double(draws.top_k[row]));
        weigh();
        if (draws.top_p && draws.top_p[row] < 1) cut_top_p(size, draws.top_p[row]);
        return invert_cumulative(draws.uniform[row]);
    }

   private:
    static constexpr float BARRED = std::numeric_limits<float>::infinity();
    static constexpr int64_t STRETCH = 256;

    std::vector<float> depths_;   // how far each token is below the most likely token; infinite for a barred token
    std::vector<float> weights_;  // the probability of each token, times a constant
    std::vector<double> sums_;    // of the weights in each stretch
    DepthCut cut_;

    void fit(int64_t size) {
        const int64_t stretches = (size + STRETCH - 1) / STRETCH;
        depths_.resize(stretches * STRETCH);
        std::fill(depths_.begin() + size, depths_.end(), BARRED);
        weights_.resize(stretches * STRETCH);
        sums_.resize(stretches);
    }

    void cut_top_k(int64_t size, double count) {
        const auto limit = cut_.find(depths_, size, [](int64_t) { return 1.0; }, [&](double sum) { return sum >= count; });
        for (int64_t i = 0; i < size; ++i)
            if (DepthCut::bits(depths_[i]) > limit.depth) depths_[i] = BARRED;
    }

    void cut_top_p(int64_t size, double share) {
        double total = 0;
        for (double sum : sums_) total += sum;
        const auto limit = cut_.find(
            depths_, size, [&](int64_t i) { return double(weights_[i]); }, [&](double sum) { return sum >= share * total; });
        for (int64_t i = 0; i < size; ++i) {
            const uint32_t depth = DepthCut::bits(depths_[i]);
            if (depth > limit.depth || (depth == limit.depth && i > limit.index)) weights_[i] = 0;
        }
        add_up();
    }

    void weigh() {
        for (size_t i = 0; i < weights_.size(); i += W) store(&weights_[i], exp(-load(&depths_[i])));
        add_up();
    }

    void add_up() {
        for (size_t i = 0; i < sums_.size(); ++i) {
            vf some = {};
            for (int64_t j = 0; j < STRETCH; j += W) some += load(&weights_[i * STRETCH + j]);
            sums_[i] = sum(some);
        }
    }

    // Returns the index at which the sum of the weights passes `uniform` of the whole. No index has the weight zero.
    int64_t invert_cumulative(double uniform) const {
        double total = 0;
        for (double sum : sums_) total += sum;
        const double target = uniform * total;
        size_t stretch = 0;
        double before = 0;
        for (size_t i = 0; i < sums_.size(); ++i) {
            if (sums_[i] == 0) continue;
            stretch = i;
            if (before + sums_[i] > target) break;
            before += sums_[i];
        }
        // The two sums may differ in the last bits, so the target may lie past the end of the stretch.
        int64_t last = 0;
        for (int64_t i = stretch * STRETCH, end = i + STRETCH; i < end; ++i) {
            if (weights_[i] == 0) continue;
            last = i;
            if ((before += weights_[i]) > target) break;
        }
        return last;
    }
};

// Writes a token for each of `count` rows, `stride` logits apart; the results do not depend on the number of threads.
template <class T>
void sample_rows(const T* logits, int64_t stride, int64_t size, int64_t count, const Draws& draws, int64_t* tokens,
                 int threads) {
    team().run(threads, [&](Member& member) {
        thread_local Sampler sampler;
        member.each_in_stretches(count, [&](int64_t row) { tokens[row] = sampler.sample(logits + row * stride, size, draws, row); });
    });
}

}  // namespace vmp
