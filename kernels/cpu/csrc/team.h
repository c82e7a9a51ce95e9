// The threads that compute together.
#pragma once

#include <omp.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace vmp {

inline double seconds(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Chooses how many threads take part. At each barrier all wait for the one that has lost most of its time to other
// programs, so where these want the processors, fewer threads are several times faster than one for each processor. What
// is computed does not depend on their number.
class Team {
   public:
    // Lets up to `most` threads run `body`, whose loops are shared out by `omp for`.
    template <class Body>
    void run(int most, Body&& body) {
        const int threads = std::max(1, most >> halvings_);
        const double begin = seconds(CLOCK_MONOTONIC);
        double least = std::numeric_limits<double>::infinity();
#pragma omp parallel num_threads(threads) reduction(min : least)
        {
            const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
            body();
            least = seconds(CLOCK_THREAD_CPUTIME_ID) - start;
        }
        const double now = seconds(CLOCK_MONOTONIC);
        note(now, now - begin, least, threads);
    }

   private:
    static constexpr double MEMORY_S = 0.03;
    static constexpr double ENOUGH_S = 0.01;   // of computing, to judge by
    static constexpr double MOST_LOST = 0.3;   // of the time, by the thread that lost most
    static constexpr double FIRST_HOLD_S = 0.1, LONGEST_HOLD_S = 3.0;

    int halvings_ = 0;
    double spent_ = 0, lost_ = 0;  // lately
    double hold_ = FIRST_HOLD_S, hold_until_ = 0;

    void note(double now, double wall, double computed, int threads) {
        if (halvings_ > 0 && now > hold_until_) {
            --halvings_;
            spent_ = lost_ = 0;
            return;
        }
        const double kept = std::exp(-wall / MEMORY_S);
        spent_ = spent_ * kept + wall;
        lost_ = lost_ * kept + std::max(0.0, wall - computed);
        if (spent_ < ENOUGH_S) return;
        if (threads > 1 && lost_ > MOST_LOST * spent_) {
            ++halvings_;
            hold_until_ = now + hold_;
            hold_ = std::min(2 * hold_, LONGEST_HOLD_S);
            spent_ = lost_ = 0;
        } else if (now > hold_until_ + 2 * hold_) {
            hold_ = FIRST_HOLD_S;
        }
    }
};

// The calls come from one thread at a time.
inline Team& team() {
    static Team one;
    return one;
}

}  // namespace vmp
