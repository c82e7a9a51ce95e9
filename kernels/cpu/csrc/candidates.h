// The tokens among which a filter of a row of logits chooses.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace vmp {

// Sums `of(at)` for the vectors at 0, W, 2 W, ... below `size`: 256 elements as floats, and these sums as doubles.
constexpr int64_t STRETCH = 256;
template <class F>
inline double sum_in_stretches(int64_t size, F&& of) {
    double total = 0;
    for (int64_t begin = 0; begin < size; begin += STRETCH) {
        vf some = {};
        for (int64_t at = begin, end = std::min(begin + STRETCH, size); at < end; at += W) some += of(at);
        total += sum(some);
    }
    return total;
}

// Tokens of a row in the order of their indices, which a filter may keep. A depth is how far a token lies below the
// most likely token, in units of the temperature.
class Candidates {
   public:
    // Removes all, and makes room for `most`.
    void clear(size_t most) {
        count_ = 0;
        if (indices_.size() >= most + W) return;
        for (auto* values : {&depths_, &weights_, &distances_}) values->resize(most + W);
        indices_.resize(most + W);
    }

    // Adds the tokens from `index` on whose depths are at most `bound`. The last call must be followed by `end`.
    void add(vf depths, int64_t index, float bound) {
        if (const uint32_t lanes = lanes_of(depths <= bound))
            append(depths, exp_up_to_0(-depths), LANES + int32_t(index), lanes);
    }

    void end() {
        store(&depths_[count_], splat(std::numeric_limits<float>::infinity()));
        store(&weights_[count_], vf{});
    }

    double total_weight() const {
        return sum_in_stretches(count_, [&](int64_t at) { return load(&weights_[at]); });
    }

    // Keeps the `count` candidates of the lowest depths, and all of the same depth as the last of them.
    void keep_lowest(double count) {
        const Limit limit = find_limit(depths_, count, [](int64_t) { return splat(1); });
        keep(depths_, {limit.key, MOST});
    }

    // Keeps those that are at most `depth` deeper than the first by depth.
    void keep_within(float depth) {
        vf lowest = splat(std::numeric_limits<float>::infinity());
        for (int64_t at = 0; at < count_; at += W) lowest = -max(-lowest, -load(&depths_[at]));
        const float bound = -highest(-lowest) + depth;
        keep(depths_, {read<int32_t>(&bound), MOST});
    }

    // Keeps as few candidates as weigh `least` together: the ones of the lowest depths, and of equal depths the first.
    void keep_heaviest(double least) {
        keep(depths_, find_limit(depths_, least, [&](int64_t at) { return load(&weights_[at]); }));
    }

    // Keeps as few candidates as have the probability `share` together, those whose log-probability is closest to its
    // mean, and those that are as close as the last of them.
    void keep_typical(double share) {
        const double total = total_weight();
        // The mean depth; the log-probability of a token is minus its depth, less the same constant for all tokens.
        const float mean = float(sum_in_stretches(count_, [&](int64_t at) {
            const vf weights = load(&weights_[at]);
            return select(weights > 0, weights * load(&depths_[at]), vf{});
        }) / total);
        for (int64_t at = 0; at < count_; at += W) {
            const vf distance = load(&depths_[at]) - mean;
            store(&distances_[at], max(distance, -distance));
        }
        const Limit limit = find_limit(distances_, share * total, [&](int64_t at) { return load(&weights_[at]); });
        keep(distances_, {limit.key, MOST});
    }

    // Returns the index at which the sum of the weights passes `uniform` of the whole. No index has the weight zero.
    int64_t draw(double uniform) const {
        const double target = uniform * total_weight();
        double before = 0;
        int64_t last = 0;
        // The two sums may differ in the last bits, so the target may lie past the end.
        for (int64_t at = 0; at < count_; ++at) {
            if (weights_[at] == 0) continue;
            last = indices_[at];
            if ((before += weights_[at]) > target) break;
        }
        return last;
    }

    struct Token {
        int32_t key;  // the bits of its depth, or of what else it is ordered by
        int32_t index;
        float count;  // what it counts in a sum
    };

    // Returns all by depth, and by index if their depths are equal. They are valid until the next call of any function.
    const std::vector<Token>& sorted() {
        sort_between(depths_, -1, HIGHEST, [](int64_t) { return vf{}; });
        return sorted_;
    }

   private:
    struct Limit {
        int32_t key;    // the greatest that is kept
        int32_t index;  // of the last token that is kept of those with this key
    };
    static constexpr int32_t HIGHEST = 0x7f800000;  // the bits of infinity
    static constexpr int32_t MOST = std::numeric_limits<int32_t>::max();
    static constexpr int64_t MOST_SORTED = 64;

    // `end` pads these by a vector of candidates that weigh nothing.
    std::vector<float> depths_, weights_;  // a weight is the probability, times a constant
    std::vector<float> distances_;         // of the depths from their mean
    std::vector<int32_t> indices_;
    int64_t count_ = 0;
    std::vector<Token> sorted_;

    void append(vf depths, vf weights, vi indices, uint32_t lanes) {
        pack_lanes(&depths_[count_], depths, lanes);
        pack_lanes(&weights_[count_], weights, lanes);
        pack_lanes(&indices_[count_], indices, lanes);
        count_ += __builtin_popcount(lanes);
    }

    // Returns the limit at which the sum of what the candidates count, in the order of `keys`, reaches `bound`; the
    // last candidate if it never does. `counts(at)` returns what those from `at` on count. No key is negative, so their
    // bits order like the numbers.
    template <class Counts>
    Limit find_limit(const std::vector<float>& keys, double bound, Counts&& counts) {
        // The limit is above `low`, up to which the sum is `below`, and at most `high`.
        int32_t low = -1, high = HIGHEST;
        double below = 0;
        for (int64_t between = count_; between > MOST_SORTED && high - low > 1;) {
            const int32_t middle = low + (high - low) / 2;
            int64_t num_below = 0;
            const double sum = sum_in_stretches(count_, [&](int64_t at) {
                const vi some = read<vi>(&keys[at]);
                num_below += __builtin_popcount(lanes_of((some > low) & (some <= middle)));
                return select(some <= middle, counts(at), vf{});
            });
            if (sum >= bound) {
                high = middle;
                between = num_below;
            } else {
                low = middle;
                below = sum;
                between -= num_below;
            }
        }
        sort_between(keys, low, high, counts);
        for (const Token& token : sorted_)
            if ((below += token.count) >= bound) return {token.key, token.index};
        return {high, MOST};
    }

    // Sorts the candidates whose `keys` are above `low` and at most `high`.
    template <class Counts>
    void sort_between(const std::vector<float>& keys, int32_t low, int32_t high, Counts&& counts) {
        sorted_.clear();
        for (int64_t at = 0; at < count_; at += W) {
            const vi some = read<vi>(&keys[at]);
            const vf counted = counts(at);
            for (uint32_t lanes = lanes_of((some > low) & (some <= high)); lanes; lanes &= lanes - 1) {
                const int lane = __builtin_ctz(lanes);
                if (at + lane < count_) sorted_.push_back({some[lane], indices_[at + lane], counted[lane]});
            }
        }
        std::sort(sorted_.begin(), sorted_.end(), [](const Token& a, const Token& b) {
            return a.key != b.key ? a.key < b.key : a.index < b.index;
        });
    }

    void keep(const std::vector<float>& keys, Limit limit) {
        const int64_t count = count_;
        count_ = 0;
        for (int64_t at = 0; at < count; at += W) {
            const vi some = read<vi>(&keys[at]), indices = read<vi>(&indices_[at]);
            const vi is_kept = (some < limit.key) | ((some == limit.key) & (indices <= limit.index));
            const uint32_t past = at + W > count ? ~0u << (count - at) : 0;
            append(load(&depths_[at]), load(&weights_[at]), indices, lanes_of(is_kept) & ~past);
        }
        end();
    }
};

}  // namespace vmp
