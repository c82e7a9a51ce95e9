// The distribution of the next token, as a row of logits gives it.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "candidates.h"

namespace vmp {

// The distribution of one row after another. A weight is the probability of a token, times a constant; weights are
// computed again where they are needed, which takes less time than to write and to read them. Stretches of the
// vocabulary whose most likely token lies beyond a bound are not read again. One instance serves one thread.
template <class T>
class Distribution {
   public:
    // Takes `size` logits, which must stay.
    void take(const T* logits, int64_t size, float temperature) {
        logits_ = logits;
        size_ = size;
        temperature_ = temperature;
        auto higher = [](vf a, vf b) { return select((a > b) | (a != a), a, b); };
        vf all = splat(BARRED);
        peaks_.clear();
        for (int64_t begin = 0; begin < size; begin += STRETCH) {
            vf peak = splat(BARRED);
            for (int64_t at = begin, end = std::min(begin + STRETCH, size); at < end; at += W)
                peak = higher(some(at), peak);
            peaks_.push_back(vmp::highest(peak));
            all = higher(peak, all);
        }
        highest_ = vmp::highest(all);
    }

    // Whether the highest logit is finite and none is NaN; nothing else may be asked of other rows.
    bool is_finite() const { return std::isfinite(highest_); }

    // Returns the depth of a token, as `Candidates` defines it; infinite for a barred token.
    float depth(int64_t index) const { return depth_of(to_float(logits_[index])); }

    // Returns a depth that at least `count` tokens do not exceed: as many stretches have such a token.
    float top_k_bound(int64_t count) {
        const float bound = std::numeric_limits<float>::max();
        if (count > int64_t(peaks_.size())) return bound;
        ranked_ = peaks_;
        std::nth_element(ranked_.begin(), ranked_.begin() + (count - 1), ranked_.end(), std::greater<>());
        return std::min(bound, depth_of(ranked_[count - 1]));
    }

    // Returns a depth beyond which all tokens together weigh less than what top_p leaves out, because each of them
    // weighs less than its share of that. `total` is the weight of all tokens.
    float top_p_bound(double total, double share) const {
        constexpr double MARGIN = 1e-3;  // more than the rounding errors of exponentials and sums
        const double bound = MARGIN - std::log((1 - share) * total / double(size_));
        return std::min(std::numeric_limits<float>::max(), float(bound));
    }

    // Returns the weight of all tokens.
    double add_up() {
        double total = 0;
        sums_.clear();
        for (int64_t begin = 0; begin < size_; begin += STRETCH) {
            const int64_t size = std::min(STRETCH, size_ - begin);
            sums_.push_back(sum_in_stretches(size, [&](int64_t at) { return weights(begin + at); }));
            total += sums_.back();
        }
        return total;
    }

    // Makes the tokens whose depths are at most `bound` the candidates.
    void gather(float bound, Candidates& candidates) const {
        candidates.clear(size_);
        for (size_t stretch = 0; stretch < peaks_.size(); ++stretch) {
            if (!(depth_of(peaks_[stretch]) <= bound)) continue;
            const int64_t begin = stretch * STRETCH;
            for (int64_t at = begin, end = std::min(begin + STRETCH, size_); at < end; at += W)
                candidates.add(depths(at), at, bound);
        }
        candidates.end();
    }

    // Returns the index at which the sum of the weights passes `target`; `add_up` must have been called. No index has
    // the weight zero.
    int64_t draw(double target) const {
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
        const int64_t begin = stretch * STRETCH;
        for (int64_t at = begin, end = std::min(begin + STRETCH, size_); at < end; at += W) {
            const vf of_tokens = weights(at);
            for (int lane = 0; lane < W; ++lane) {
                if (of_tokens[lane] == 0) continue;
                last = at + lane;
                if ((before += of_tokens[lane]) > target) return last;
            }
        }
        return last;
    }

    // Returns the number of tokens that are more likely than token `index`.
    int64_t num_above(int64_t index) const {
        const float logit = to_float(logits_[index]);
        int64_t count = 0;
        for (size_t stretch = 0; stretch < peaks_.size(); ++stretch) {
            if (!(peaks_[stretch] > logit)) continue;
            const int64_t begin = stretch * STRETCH;
            for (int64_t at = begin, end = std::min(begin + STRETCH, size_); at < end; at += W)
                count += __builtin_popcount(lanes_of(some(at) > logit));
        }
        return count;
    }

   private:
    static constexpr float BARRED = -std::numeric_limits<float>::infinity();  // the logit of a barred token

    const T* logits_;
    int64_t size_;
    float temperature_, highest_;
    std::vector<float> peaks_;   // the highest logit of each stretch
    std::vector<float> ranked_;  // the same in another order
    std::vector<double> sums_;   // of the weights in each stretch

    // Returns the W logits from `at` on; past the end, tokens are barred.
    vf some(int64_t at) const { return load_some(logits_ + at, int(std::min<int64_t>(W, size_ - at)), BARRED); }

    vf depths(int64_t at) const { return (highest_ - some(at)) / temperature_; }

    float depth_of(float logit) const { return (highest_ - logit) / temperature_; }

    vf weights(int64_t at) const { return exp_up_to_0(-depths(at)); }
};

}  // namespace vmp
