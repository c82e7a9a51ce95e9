"""The limit of a step follows from the times of steps of its size."""

import pytest

from vllm_mp.core import step_limits
from vllm_mp.core.step_limits import StepLimits

MARGIN_S = 0.25


@pytest.fixture
def clock(monkeypatch):
    now = [0]
    monkeypatch.setattr(step_limits.time, "monotonic_ns", lambda: now[0])
    return now


def run(limits, clock, count, seconds, num_tokens=4, reads_prompts=False):
    """Measure `count` steps of `seconds`; return the limit in seconds of another one."""
    for _ in range(count):
        limits.begin(num_tokens, reads_prompts)
        clock[0] += round(1e9 * seconds)
        limits.end()
    return limits.begin(num_tokens, reads_prompts) / 1e9


def test_limit_is_unknown_until_enough_steps_of_the_size_were_measured(clock):
    limits = StepLimits()
    assert run(limits, clock, 15, 0.1) == 0
    assert run(limits, clock, 1, 0.1) == pytest.approx(0.2 + MARGIN_S)


def test_other_sizes_and_prompts_have_limits_of_their_own(clock):
    limits = StepLimits()
    assert run(limits, clock, 40, 0.1) > 0
    assert limits.begin(7, False) > 0
    assert limits.begin(8, False) == 0
    assert limits.begin(200, False) == 0
    assert limits.begin(4, True) == 0
    assert run(limits, clock, 40, 3.0, 2048, True) == pytest.approx(6 + MARGIN_S)
    assert run(limits, clock, 40, 0.1) == pytest.approx(0.2 + MARGIN_S)


def test_single_long_step_counts_at_first_and_not_among_many(clock):
    limits = StepLimits()
    run(limits, clock, 1, 5.0)
    assert run(limits, clock, 31, 0.1) == pytest.approx(10 + MARGIN_S)
    assert run(limits, clock, 160, 0.1) == pytest.approx(0.2 + MARGIN_S)


def test_limit_follows_steps_that_become_longer_and_shorter(clock):
    limits = StepLimits()
    run(limits, clock, 300, 0.1)
    assert run(limits, clock, 64, 0.4) == pytest.approx(0.8 + MARGIN_S)
    assert run(limits, clock, 300, 0.1) == pytest.approx(0.2 + MARGIN_S)


def test_step_that_was_not_begun_is_not_measured(clock):
    limits = StepLimits()
    run(limits, clock, 32, 0.1)
    limits.end()
    clock[0] += 10**12
    limits.end()
    assert run(limits, clock, 32, 0.1) == pytest.approx(0.2 + MARGIN_S)
