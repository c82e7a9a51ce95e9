"""A team of threads computes the same with any number of threads, waits only where it must, and has a good size.

The rule for the size is given the durations of regions by a clock of the tests.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from support.tile_emulation import compiled, compiled_program

NUM_LOOPS = 300


class Speed(NamedTuple):
    """What regions of a certain work take."""

    seconds: dict[int, float]
    """Duration by number of threads."""
    lost: dict[int, float]
    """Share of the time that the slowest thread does not compute, by number of threads."""


ALONE = Speed({1: 0.02, 2: 0.01}, {1: 0.01, 2: 0.05})
BESIDE_A_SERVER = Speed({1: 0.024, 2: 0.017}, {1: 0.1, 2: 0.6})
BESIDE_AN_OWNER = Speed({1: 0.021, 2: 0.03}, {1: 0.05, 2: 0.5})
"""Beside a program that keeps one of two processors."""


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compiled("tests/kernels/team_loops.cpp", tmp_path_factory.mktemp("team"), "-O1", "-fopenmp")
    library.sum_of_loops.restype = ctypes.c_uint64
    library.new_size.restype = ctypes.c_void_p
    library.delete_size.argtypes = [ctypes.c_void_p]
    library.size_of.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.note.argtypes = [ctypes.c_void_p, ctypes.c_uint64, *3 * [ctypes.c_double], ctypes.c_int]
    return library


@dataclass
class Regions:
    """Regions that follow each other, and the size that a team has in them."""

    library: ctypes.CDLL
    size: int
    most: int = 2
    now: float = 0.0
    time_of: dict[int, float] = field(default_factory=dict)
    """Seconds by number of threads, in the last call of `run`."""

    def run(self, seconds: float, speed: Speed | Callable[[int], tuple[int, Speed]]) -> int:
        """Run regions for `seconds`; with a function, those that it returns for their numbers, with their work.

        Return the size after them.
        """
        self.time_of = dict.fromkeys(range(self.most + 1), 0.0)
        end, number = self.now + seconds, 0
        while self.now < end:
            work, current = (7, speed) if isinstance(speed, Speed) else speed(number)
            threads = self.library.size_of(self.size, self.most)
            duration = current.seconds[threads]
            self.now += duration
            self.time_of[threads] += duration
            self.library.note(self.size, work, self.now, duration, current.lost[threads] * duration, threads)
            number += 1
        return self.library.size_of(self.size, self.most)


@pytest.fixture
def regions(team: ctypes.CDLL) -> Iterator[Regions]:
    size = team.new_size()
    yield Regions(team, size)
    team.delete_size(size)


@pytest.mark.parametrize("waits_for_threads", [False, True])
def test_sums_are_equal_with_any_number_of_threads_that_lose_their_processors(
    team: ctypes.CDLL, waits_for_threads: bool
) -> None:
    expected = team.sum_of_loops(1, waits_for_threads, NUM_LOOPS, NUM_LOOPS)
    for threads in (1, 2, 3, 5):
        assert team.sum_of_loops(threads, waits_for_threads, NUM_LOOPS, 7) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 100, 2**20 - 1, 2**20 + 1])
def test_every_index_comes_once(team: ctypes.CDLL, count: int) -> None:
    assert team.every_index_comes_once(ctypes.c_int64(count))


def test_loops_are_finished_without_a_thread_that_has_no_processor(team: ctypes.CDLL) -> None:
    assert team.one_thread_is_enough(NUM_LOOPS)


def test_threads_that_read_between_loops_are_waited_for(team: ctypes.CDLL) -> None:
    assert team.all_threads_are_awaited(20)


@pytest.mark.extended
def test_random_loops_with_threads_that_lose_their_processors_have_no_race(tmp_path: Path) -> None:
    program = compiled_program("tests/kernels/team_races.cpp", tmp_path, "-O1", "-g", "-fopenmp", "-fsanitize=thread")
    done = subprocess.run([program, "100"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:8000]


def test_no_size_is_tried_while_no_time_is_lost(regions: Regions) -> None:
    assert regions.run(20, ALONE) == 2
    assert regions.time_of[1] == 0


def test_team_stays_whole_where_half_of_it_is_slower_though_it_loses_less(regions: Regions) -> None:
    regions.run(5, BESIDE_A_SERVER)
    assert regions.run(60, BESIDE_A_SERVER) == 2
    assert 0 < regions.time_of[1] < 0.04 * 60


def test_team_is_halved_within_a_quarter_of_a_second_beside_a_program_that_owns_a_processor(regions: Regions) -> None:
    regions.run(5, ALONE)
    assert regions.run(0.25, BESIDE_AN_OWNER) == 1
    regions.run(5, BESIDE_AN_OWNER)
    regions.run(60, BESIDE_AN_OWNER)
    assert regions.time_of[2] < 0.04 * 60


def test_team_is_whole_again_within_seconds_after_the_other_program_ended(regions: Regions) -> None:
    regions.run(60, BESIDE_AN_OWNER)
    regions.run(5, ALONE)
    assert regions.run(5, ALONE) == 2
    assert regions.time_of[1] == 0


def test_only_regions_with_the_same_work_are_compared(regions: Regions) -> None:
    """Long regions happen to run with half of the team."""
    long = Speed({1: 0.2, 2: 0.14}, {1: 0.1, 2: 0.6})

    def mixed(number: int) -> tuple[int, Speed]:
        is_half = regions.library.size_of(regions.size, 2) == 1
        return (number, long) if is_half and number % 2 else (7, BESIDE_AN_OWNER)

    assert regions.run(2, mixed) == 1


def test_half_of_the_team_is_halved_again_where_that_is_faster(regions: Regions) -> None:
    regions.most = 4
    speed = Speed({1: 0.02, 2: 0.04, 4: 0.06}, {1: 0.1, 2: 0.5, 4: 0.7})
    assert regions.run(3, speed) == 1
