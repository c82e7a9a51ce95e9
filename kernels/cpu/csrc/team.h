// A team of threads that compute a step together.
#pragma once

#include <omp.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>

#include "tiles.h"

namespace vmp {

inline double seconds(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Chooses how many threads take part. At each barrier all threads wait for the slowest. If other programs take
// processor time, fewer threads are several times faster than one thread for each processor. Results do not depend on
// the number of threads.
class Team {
   public:
    // One thread's view of a region. All threads of the team execute the same loops, and wait for one another at the
    // end of each. A layer has six loops, so sharing out the work and waiting take only one atomic operation each.
    class Member {
       public:
        explicit Member(Team& team) : team_(team), number_(omp_get_thread_num()) {}

        // Calls `f(i)` for the indices below `count`, one contiguous range per thread.
        template <class F>
        void each(int64_t count, F&& f) {
            const int64_t end = count * (number_ + 1) / team_.size_;
            for (int64_t i = count * number_ / team_.size_; i < end; ++i) f(i);
            wait();
        }

        // Does the same in ranges that become shorter towards the end; a free thread takes the next range. If a thread
        // loses its processor, the other threads take over the rest.
        template <class F>
        void each_guided(int64_t count, F&& f) {
            std::atomic<int64_t>& next = team_.next_;
            for (int64_t begin = next.load(std::memory_order_relaxed); begin < count;) {
                const int64_t end = begin + std::max<int64_t>(1, (count - begin) / (2 * team_.size_));
                if (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
                for (int64_t i = begin; i < end; ++i) f(i);
                begin = next.load(std::memory_order_relaxed);
            }
            wait();
        }

        // Does the same in ranges of `chunk` indices, which free threads take in order.
        template <class F>
        void each_in_turn(int64_t count, int64_t chunk, F&& f) {
            for (int64_t begin; (begin = team_.next_.fetch_add(chunk, std::memory_order_relaxed)) < count;)
                for (int64_t i = begin, end = std::min(count, begin + chunk); i < end; ++i) f(i);
            wait();
        }

       private:
        Team& team_;
        const int64_t number_;

        void wait() {
            const uint32_t round = team_.round_.load(std::memory_order_relaxed);
            if (team_.arrived_.fetch_add(1, std::memory_order_acq_rel) == team_.size_ - 1) {
                team_.arrived_.store(0, std::memory_order_relaxed);
                team_.next_.store(0, std::memory_order_relaxed);
                team_.round_.store(round + 1, std::memory_order_release);
                return;
            }
            for (int turns = 0; team_.round_.load(std::memory_order_acquire) == round; ++turns)
                turns < PATIENCE ? relax() : (void)sched_yield();
        }
    };

    // Runs `body(member)` on up to `most` threads.
    template <class Body>
    void run(int most, Body&& body) {
        const int threads = std::max(1, most >> halvings_);
        const double begin = seconds(CLOCK_MONOTONIC);
        double least = std::numeric_limits<double>::infinity();
#pragma omp parallel num_threads(threads) reduction(min : least)
        {
#pragma omp single
            size_ = omp_get_num_threads();
            const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
            Member member(*this);
            body(member);
            release_tiles();
            least = seconds(CLOCK_THREAD_CPUTIME_ID) - start;
        }
        const double now = seconds(CLOCK_MONOTONIC);
        note(now, now - begin, least, threads);
    }

   private:
    static constexpr int PATIENCE = 2000;  // turns of waiting, about 50 us, before a thread yields its processor
    static constexpr double MEMORY_S = 0.03;  // time constant of the averages
    static constexpr double ENOUGH_S = 0.01;   // least computing time for a decision
    static constexpr double MOST_LOST = 0.3;   // tolerated share of the time that the slowest thread lost
    static constexpr double FIRST_HOLD_S = 0.1, LONGEST_HOLD_S = 3.0;

    int size_ = 1;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};

    int halvings_ = 0;
    double spent_ = 0, lost_ = 0;  // seconds, fading with MEMORY_S
    double hold_ = FIRST_HOLD_S, hold_until_ = 0;

    // Records the wall time of a region and the computing time of its slowest thread, and adjusts `halvings_`.
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

using Member = Team::Member;

// Only one thread at a time may call into the kernels. Each has a team of its own, so that what a thread of low priority
// has lost does not count for the others.
inline Team& team() {
    static thread_local Team instance;
    return instance;
}

}  // namespace vmp
