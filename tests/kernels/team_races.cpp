// Teams of threads under ThreadSanitizer, which reports the data races of the team and of what it computes.
//
// The library of OpenMP is not built with the sanitizer, which would take its barriers for none. So threads are started
// and joined here.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "team.h"

using namespace vmp;

namespace {

thread_local int thread_number = 0, num_threads = 1;

}  // namespace

extern "C" {

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
    auto run = [=](unsigned number) {
        thread_number = int(number);
        num_threads = int(threads);
        body(data);
        thread_number = 0;
        num_threads = 1;
    };
    std::vector<std::thread> others;
    for (unsigned number = 1; number < threads; ++number) others.emplace_back(run, number);
    run(0);
    for (std::thread& other : others) other.join();
}

int omp_get_thread_num() { return thread_number; }
int omp_get_num_threads() { return num_threads; }
}

namespace {

constexpr int64_t MOST = 60;  // indices of a loop

using Random = std::minstd_rand;

// Loses the processor now and then: for a turn, or for longer than others wait before they sleep.
void pause(Random& random) {
    const uint64_t chance = random() % 256;
    if (chance < 8) sched_yield();
    if (chance == 255) std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

struct Loop {
    uint64_t kind;
    int64_t count;
};

// Computes `loops` in turn, each with the results of the last one: `share_out(loop, f)` calls `f` for the indices of one.
// With `reads_between_loops`, each thread also reads results between loops. Returns the sum of the results.
template <class ShareOut>
uint64_t compute(const std::vector<Loop>& loops, std::vector<uint64_t> (&values)[2], bool reads_between_loops,
                 ShareOut&& share_out) {
    uint64_t known = 0;
    int last = 0;
    for (const Loop& loop : loops) {
        if (loop.count == 0) continue;
        const std::vector<uint64_t>& from = values[last];
        std::vector<uint64_t>& to = values[1 - last];
        share_out(loop, [&](int64_t i) { to[i] = from[i] * 31 + from[MOST - 1 - i] + known; });
        if (reads_between_loops) known = to[0] + to[MOST - 1];
        last = 1 - last;
    }
    return std::accumulate(values[last].begin(), values[last].end(), known);
}

// Runs random loops on up to `most` threads, and ends the process if the result is not that of one thread.
void check_region(Team& team, Random& random, int most, Team::Wait wait) {
    std::vector<Loop> loops(random() % 40);
    for (Loop& loop : loops) loop = {random() % 3, int64_t(random() % (random() % 4 ? 6 : MOST))};
    const bool reads_between_loops = wait == Team::Wait::FOR_THREADS;
    std::vector<uint64_t> alone[2], shared[2];
    for (std::vector<uint64_t>* some : {alone, alone + 1, shared, shared + 1}) some->assign(MOST, 1);
    const uint64_t expected = compute(loops, alone, reads_between_loops, [](const Loop& loop, auto&& f) {
        for (int64_t i = 0; i < loop.count; ++i) f(i);
    });
    const uint64_t seed = random();
    std::atomic<bool> is_wrong{false};
    team.run(most, wait, [&](Member& member) {
        Random own(seed + uint64_t(omp_get_thread_num()));
        const uint64_t sum = compute(loops, shared, reads_between_loops, [&](const Loop& loop, auto&& f) {
            auto f_with_pauses = [&](int64_t i) {
                pause(own);
                f(i);
            };
            pause(own);
            if (loop.kind == 0)
                member.each(loop.count, f_with_pauses);
            else if (loop.kind == 1)
                member.each_in_stretches(loop.count, f_with_pauses);
            else
                member.each_in_turn(loop.count, 3, f_with_pauses);
        });
        if (sum != expected) is_wrong = true;
    });
    if (!is_wrong) return;
    std::fputs("a team computes other results than one thread\n", stderr);
    std::_Exit(1);
}

// Runs `count` random regions on the team of this thread.
void check_regions(uint64_t seed, int count) {
    Random random(seed);
    for (int i = 0; i < count; ++i) {
        const Team::Wait wait = random() % 2 ? Team::Wait::FOR_WORK : Team::Wait::FOR_THREADS;
        check_region(team(), random, 1 + int(random() % 5), wait);
    }
}

}  // namespace

// The argument is the number of regions that each of two threads runs beside the other. A thread ends after 50.
int main(int, char** arguments) {
    for (int left = std::atoi(arguments[1]); left > 0; left -= 50) {
        std::thread other(check_regions, 2 * left, 50);
        check_regions(2 * left + 1, 50);
        other.join();
    }
}
