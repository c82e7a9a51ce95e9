// Loops of a team and the rule for its size, for tests.

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "team.h"

using namespace vmp;

namespace {

constexpr int64_t COUNT = 100;

// Waits until `condition()` holds; returns false after 10 s.
template <class Condition>
bool holds_soon(Condition&& condition) {
    const double limit = seconds(CLOCK_MONOTONIC) + 10;
    while (!condition()) {
        if (seconds(CLOCK_MONOTONIC) > limit) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
}

}  // namespace

extern "C" {

// Runs `num_loops` loops of all three kinds, each of which adds the sum of the last one. Before every `every`-th loop a
// thread loses its processor for a moment. Returns the sum of the last loop.
uint64_t sum_of_loops(int threads, int waits_for_threads, int num_loops, int every) {
    std::vector<uint64_t> values(COUNT, 1), next(COUNT);
    Team team;
    team.run(threads, waits_for_threads ? Team::Wait::FOR_THREADS : Team::Wait::FOR_WORK, [&](Member& member) {
        const int number = omp_get_thread_num();
        for (int loop = 0; loop < num_loops; ++loop) {
            std::vector<uint64_t>&from = loop % 2 ? next : values, &to = loop % 2 ? values : next;
            if (loop % every == 0 && loop / every % threads == number)
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            auto add = [&](int64_t i) { to[i] = from[i] + from[(i + 1) % COUNT] * 3 + uint64_t(i); };
            if (loop % 3 == 0)
                member.each(COUNT, add);
            else if (loop % 3 == 1)
                member.each_in_stretches(COUNT, add);
            else
                member.each_in_turn(COUNT, 3, add);
        }
    });
    uint64_t sum = 0;
    for (uint64_t value : num_loops % 2 ? next : values) sum = sum * 31 + value;
    return sum;
}

// Returns 1 if a loop with `count` indices calls its function once with each.
int every_index_comes_once(int64_t count) {
    std::vector<std::atomic<uint8_t>> calls(count);
    Team team;
    team.run(3, [&](Member& member) { member.each_in_stretches(count, [&](int64_t i) { ++calls[i]; }); });
    return std::all_of(calls.begin(), calls.end(), [](auto& some) { return some == 1; });
}

// Lets one of two threads begin only when the other has finished `num_loops` loops alone. Returns 1 if that happens.
int one_thread_is_enough(int num_loops) {
    std::atomic<int> finished{0};
    std::atomic<bool> is_enough{false};
    Team team;
    team.run(2, Team::Wait::FOR_WORK, [&](Member& member) {
        const bool is_late = omp_get_thread_num() == 1;
        if (is_late) is_enough = holds_soon([&] { return finished == num_loops; });
        for (int loop = 0; loop < num_loops; ++loop) {
            member.each_in_stretches(COUNT, [](int64_t) {});
            if (!is_late) ++finished;
        }
    });
    return is_enough;
}

// Runs loops with a pause of a thread between them. Returns 1 if no other thread finishes the next loop meanwhile.
int all_threads_are_awaited(int num_loops) {
    std::vector<std::atomic<int>> arrived(num_loops);
    std::atomic<bool> is_early{false};
    Team team;
    team.run(2, Team::Wait::FOR_THREADS, [&](Member& member) {
        for (int loop = 0; loop < num_loops; ++loop) {
            if (loop % 2 == omp_get_thread_num()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            ++arrived[loop];
            member.each(COUNT, [](int64_t) {});
            if (arrived[loop] != omp_get_num_threads()) is_early = true;
        }
    });
    return !is_early;
}

TeamSize* new_size() { return new TeamSize; }
void delete_size(TeamSize* size) { delete size; }
int size_of(const TeamSize* size, int most) { return size->of(most); }
void note(TeamSize* size, uint64_t work, double now, double duration, double lost, int threads) {
    size->note(work, now, duration, lost, threads);
}
}
