// How many threads of a team compute: all of them, or fewer while that is faster.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace vmp {

// Halves a team while other programs use the processors, if that makes it faster. How much a smaller team would lose,
// and how well the work scales, cannot be told from the time that a team loses. So both sizes take turns for a moment,
// and the faster one is kept until the next trial.
class TeamSize {
   public:
    // Returns the number of threads for the next region, at most `most`.
    int of(int most) const { return std::max(1, most >> (is_trying_ && phase_ % 2 == 0 ? other_ : halvings_)); }

    // Records a region that `threads` threads computed. `work` is equal for regions with the same loops. Times are in
    // seconds: the end of the region, its duration, and the part in which the thread that computed least did nothing.
    void note(uint64_t work, double now, double duration, double lost, int threads) {
        const double kept = std::exp(-duration / MEMORY_S);
        spent_ = spent_ * kept + duration;
        lost_ = lost_ * kept + lost;
        if (is_trying_) return note_trial(work, now, duration);
        const bool is_losing = spent_ >= ENOUGH_S && lost_ > MUCH_LOST * spent_;
        if (now < hold_until_) return;
        if (halvings_ > 0 && !(was_larger_ && is_losing && threads > 1))
            begin_trial(now, halvings_ - 1);
        else if (is_losing && threads > 1)
            begin_trial(now, halvings_ + 1);
        else if (now > hold_until_ + hold_)
            hold_ = FIRST_HOLD_S;
    }

   private:
    static constexpr double MEMORY_S = 0.03;   // time constant of the averages
    static constexpr double ENOUGH_S = 0.01;   // least duration for a decision
    static constexpr double MUCH_LOST = 0.3;   // share of the time that the slowest thread lost, for a trial
    static constexpr double PHASE_S = 0.03;    // several times as long as a thread waits for its processor
    static constexpr int PHASE_REGIONS = 2;    // least number in a phase
    static constexpr int PHASES = 4, MOST_PHASES = 16;
    static constexpr double LEAST_GAIN = 0.1;  // share of the time that a smaller team must save
    static constexpr double FIRST_HOLD_S = 0.25, LONGEST_HOLD_S = 4.0;

    // Durations of regions with the same work, with the other size and with the kept one.
    struct Kind {
        uint64_t work;
        double seconds[2];
        int count[2];
    };

    int halvings_ = 0;
    double spent_ = 0, lost_ = 0;  // fading with MEMORY_S
    double hold_ = FIRST_HOLD_S, hold_until_ = 0;

    bool is_trying_ = false, was_larger_ = false;
    int other_ = 0, phase_ = 0, phase_regions_ = 0;
    double phase_end_ = 0;
    std::array<Kind, 16> kinds_;
    size_t num_kinds_ = 0;

    void begin_trial(double now, int other) {
        is_trying_ = true;
        was_larger_ = other < halvings_;
        other_ = other;
        phase_ = 0;
        phase_regions_ = 0;
        phase_end_ = now + PHASE_S;
        num_kinds_ = 0;
    }

    void note_trial(uint64_t work, double now, double duration) {
        Kind* kind = std::find_if(kinds_.begin(), kinds_.begin() + num_kinds_, [&](auto& k) { return k.work == work; });
        if (kind == kinds_.begin() + num_kinds_ && num_kinds_ < kinds_.size()) kinds_[num_kinds_++] = {work, {}, {}};
        if (kind < kinds_.begin() + num_kinds_) {
            kind->seconds[phase_ % 2] += duration;
            ++kind->count[phase_ % 2];
        }
        if (++phase_regions_ < PHASE_REGIONS || now < phase_end_) return;
        phase_regions_ = 0;
        phase_end_ = now + PHASE_S;
        if (++phase_ < PHASES || phase_ % 2) return;
        // Only regions with the same work are compared.
        double other = 0, known = 0;
        for (size_t i = 0; i < num_kinds_; ++i) {
            const auto& [_, seconds, count] = kinds_[i];
            if (!count[0] || !count[1]) continue;
            const int times = std::min(count[0], count[1]);
            other += times * seconds[0] / count[0];
            known += times * seconds[1] / count[1];
        }
        if (known < ENOUGH_S && phase_ < MOST_PHASES) return;
        is_trying_ = false;
        const bool is_faster = known >= ENOUGH_S && other < (was_larger_ ? known : (1 - LEAST_GAIN) * known);
        hold_ = is_faster ? FIRST_HOLD_S : std::min(2 * hold_, LONGEST_HOLD_S);
        if (is_faster) halvings_ = other_;
        hold_until_ = now + hold_;
        spent_ = lost_ = 0;
    }
};

}  // namespace vmp
