// A team of threads that compute a step together.
#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <limits>
#include <vector>

#include "team_size.h"
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

// Shares loops out among threads, as many as `TeamSize` chooses. Results do not depend on the number of threads.
class Team {
   public:
    // What a thread waits for at the end of a loop.
    enum class Wait {
        FOR_WORK,  // until all indices are done; only a thread that has a range delays the others
        // Until all threads are there too: required if threads read, between two loops, what the first one writes; the
        // second one must not write it.
        FOR_THREADS,
    };

    // The indices that a thread has left in a loop, as one word.
    struct Stretch {
        static constexpr int BITS = 20;
        static constexpr int64_t MOST = (1 << BITS) - 1;  // indices of a loop

        uint64_t loop = 0;  // its number, plus 1
        int64_t begin = 0, end = 0;

        static Stretch of(uint64_t word) {
            return {word >> (2 * BITS), int64_t(word >> BITS) & MOST, int64_t(word) & MOST};
        }
        uint64_t word() const { return loop << (2 * BITS) | uint64_t(begin) << BITS | uint64_t(end); }
        bool is_empty() const { return begin == end; }
    };

    struct alignas(64) AtomicStretch {
        std::atomic<uint64_t> word{0};
    };

    // One thread's view of a region. All threads of the team execute the same loops. A free thread takes the next range
    // of indices, so if a thread loses its processor, the others take over the rest. When it is back, it passes the
    // loops that were finished meanwhile. A layer has six loops, so sharing them out and waiting take only a few atomic
    // operations.
    class Member {
       public:
        Member(Team& team, int number, int size, Wait wait)
            : team_(team), number_(number), size_(size), wait_(wait) {}

        // Calls `f(i)` for the indices below `count`, which is below 2^32, in a few ranges of the same size.
        template <class F>
        void each(int64_t count, F&& f) {
            each_in_turn(count, std::max<int64_t>(1, count / (2 * size_)), f);
        }

        // Does the same for memory that is read best in order: each thread has a stretch of the indices, which it takes one
        // after another from the start, and then half of what another thread has left. So it knows what it reads next.
        template <class F>
        void each_in_stretches(int64_t count, F&& f) {
            if (count <= 0) return;
            if (count > Stretch::MOST) return each(count, f);
            indices_ += count;
            int64_t done = 0;
            do {
                for (int64_t i; (i = take_one(count)) >= 0; ++done) f(i);
            } while (take_half(count));
            end_loop(done, count);
        }

        // Does the same in ranges of `chunk` indices, which free threads take in order.
        template <class F>
        void each_in_turn(int64_t count, int64_t chunk, F&& f) {
            share_out(count, [&](int64_t left) { return std::min(chunk, left); }, f);
        }

        // The number of threads.
        int size() const { return size_; }

        // Where this thread's stretch of a loop begins and ends.
        int64_t begin_of_stretch(int64_t count) const { return begin_of_stretch(count, number_); }
        int64_t end_of_stretch(int64_t count) const { return begin_of_stretch(count, number_ + 1); }

       private:
        friend Team;

        Team& team_;
        const int number_, size_;
        const Wait wait_;
        uint32_t loop_ = 0;     // number of the next loop in the region
        uint64_t indices_ = 0;  // of all loops so far

        template <class Length, class F>
        void share_out(int64_t count, Length&& length, F&& f) {
            if (count <= 0) return;
            indices_ += count;
            int64_t done = 0;
            for (uint64_t next = team_.next_.load(std::memory_order_acquire); next >> 32 == loop_;) {
                const int64_t begin = uint32_t(next);
                if (begin == count) break;
                const int64_t end = begin + length(count - begin);
                if (!team_.next_.compare_exchange_weak(next, next + (end - begin), std::memory_order_acquire)) continue;
                for (int64_t i = begin; i < end; ++i) f(i);
                done += end - begin;
                next = team_.next_.load(std::memory_order_acquire);
            }
            end_loop(done, count);
        }

        int64_t begin_of_stretch(int64_t count, int thread) const { return count * thread / size_; }

        // Returns what `thread`, which has this word, has left in this loop. The word is of an earlier loop until a thread
        // takes an index of the stretch; if it is of a later one, this loop is finished.
        Stretch left(uint64_t word, int thread, int64_t count) const {
            Stretch known = Stretch::of(word);
            const uint64_t loop = uint64_t(loop_) + 1;
            if (known.loop > loop) known.end = known.begin;
            if (known.loop < loop) {
                known.begin = begin_of_stretch(count, thread);
                known.end = begin_of_stretch(count, thread + 1);
            }
            known.loop = loop;
            return known;
        }

        // Takes the first index of this thread's stretch; returns -1 if there is none.
        int64_t take_one(int64_t count) {
            std::atomic<uint64_t>& own = team_.stretches_[number_].word;
            for (uint64_t word = own.load(std::memory_order_relaxed);;) {
                const Stretch some = left(word, number_, count);
                if (some.is_empty()) return -1;
                if (own.compare_exchange_weak(word, Stretch{some.loop, some.begin + 1, some.end}.word())) return some.begin;
            }
        }

        // Moves the second half of what another thread has left to this one; returns false if there is nothing.
        bool take_half(int64_t count) {
            for (int i = 1; i < size_; ++i) {
                const int other = (number_ + i) % size_;
                std::atomic<uint64_t>& of_other = team_.stretches_[other].word;
                for (uint64_t word = of_other.load();;) {
                    const Stretch some = left(word, other, count);
                    if (some.is_empty()) break;
                    const int64_t middle = (some.begin + some.end) / 2;
                    if (!of_other.compare_exchange_weak(word, Stretch{some.loop, some.begin, middle}.word())) continue;
                    team_.stretches_[number_].word.store(Stretch{some.loop, middle, some.end}.word());
                    return true;
                }
            }
            return false;
        }

        void end_loop(int64_t done, int64_t count) {
            if (wait_ == Wait::FOR_WORK)
                finish(done, count);
            else
                finish(1, size_);
        }

        // Adds `part` to what is finished of the loop, and waits until that is `all`.
        void finish(int64_t part, int64_t all) {
            const uint32_t loop = loop_++;
            if (part > 0 && team_.finished_.fetch_add(part, std::memory_order_acq_rel) + part == all) {
                team_.finished_.store(0, std::memory_order_relaxed);
                team_.next_.store(uint64_t(loop_) << 32, std::memory_order_release);
                team_.loop_.store(loop_);
                if (team_.sleepers_.load() > 0)
                    syscall(SYS_futex, &team_.loop_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
                return;
            }
            for (int turns = 0; team_.loop_.load(std::memory_order_acquire) == loop; ++turns) {
                if (turns < SPINS) {
                    relax();
                } else if (turns < SPINS + YIELDS || wait_ == Wait::FOR_THREADS) {
                    sched_yield();
                } else {
                    ++team_.sleepers_;
                    syscall(SYS_futex, &team_.loop_, FUTEX_WAIT_PRIVATE, loop, nullptr, nullptr, 0);
                    --team_.sleepers_;
                }
            }
        }
    };

    // Runs `body(member)` on up to `most` threads.
    template <class Body>
    void run(int most, Wait wait, Body&& body) {
        static const char kind = 0;  // its address differs from one type of body to another
        const int threads = size_.of(most);
        const double begin = seconds(CLOCK_MONOTONIC);
        double least = std::numeric_limits<double>::infinity();
        uint64_t indices = 0;
        next_.store(0, std::memory_order_relaxed);
        loop_.store(0, std::memory_order_relaxed);
        if (size_t(threads) > stretches_.size()) stretches_ = std::vector<AtomicStretch>(threads);
        for (AtomicStretch& some : stretches_) some.word.store(0, std::memory_order_relaxed);
#pragma omp parallel num_threads(threads) reduction(min : least)
        {
            const double start = seconds(CLOCK_THREAD_CPUTIME_ID);
            const int size = omp_get_num_threads();
            Member member(*this, omp_get_thread_num(), size, wait);
            body(member);
            release_tiles();
            if (omp_get_thread_num() == 0) indices = member.indices_;
            least = seconds(CLOCK_THREAD_CPUTIME_ID) - start;
            member.finish(1, size);  // OpenMP itself would spin for longer
        }
        const double now = seconds(CLOCK_MONOTONIC), duration = now - begin;
        const uint64_t work = uint64_t(uintptr_t(&kind)) ^ indices << 24;
        size_.note(work, now, duration, std::max(0.0, duration - least), threads);
    }

    template <class Body>
    void run(int most, Body&& body) {
        run(most, Wait::FOR_WORK, body);
    }

   private:
    // Turns of waiting: about 50 us, and then some hundred more. A thread that sleeps then frees its processor for the
    // thread that it waits for: the system moves no thread to a processor whose thread only yields. But to be woken
    // takes long, above all in a virtual machine, so where all threads must come to every barrier none sleeps.
    static constexpr int SPINS = 2000, YIELDS = 500;

    alignas(64) std::atomic<uint64_t> next_{0};     // the loop's number, and in the lower half the next free index
    alignas(64) std::atomic<int64_t> finished_{0};  // indices, or threads, of the loop
    alignas(64) std::atomic<uint32_t> loop_{0};     // number of the loop; threads sleep on it
    std::atomic<int> sleepers_{0};
    std::vector<AtomicStretch> stretches_;  // of each thread
    TeamSize size_;
};

using Member = Team::Member;

// Only one thread at a time may call into the kernels. Each has a team of its own, so that what a thread of low priority
// has lost does not count for the others.
inline Team& team() {
    static thread_local Team instance;
    return instance;
}

}  // namespace vmp
