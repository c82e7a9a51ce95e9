"""Every scenario of tools/faults, on a small model; and short soaks."""

import copy
import os
import shutil
import tempfile

import pytest

from vllm_mp.testing.differential import save_small_model
from vllm_mp.testing.faults.scenarios import SCENARIOS, Arena, play
from vllm_mp.testing.faults.soak import soak

_TRIED_ELSEWHERE = {
    *("kill", "segv", "abort", "term", "stop", "spin", "slow-core", "exit-in-step", "exit-while-loading"),
    *("culprit-raises", "client-blocked-while-core-dies", "core-restarted-by-hand", "too-many-deaths", "no-recovery"),
}
"""In other tests of faults, or by a scenario that differs in little."""
_TRIED_HERE = [one for name, one in SCENARIOS.items() if name not in _TRIED_ELSEWHERE]
_WITH_A_STEP_IN_FLIGHT = [
    SCENARIOS[name]
    for name in ("kill", "exit-before-message", "exit-before-last-message", "culprit-in-mid-answer", "nan")
]
_TOGETHER = [one for one in _TRIED_HERE if not one.options and not one.stands_alone]
_ON_THEIR_OWN = [one for one in _TRIED_HERE if one not in _TOGETHER]
_SLOW = {"hang", "culprit", "exit-before-last-message", "exit-after-last-message", "socket-file-removed"}
"""Scenarios that differ in little are not slow; for `hang` a test of test_recovery.py is not."""
_SLOW_IN_FLIGHT = {"exit-before-message", "exit-before-last-message", "nan"}
"""Without a step in flight these, or scenarios that differ in little, are not slow."""


def _marked(scenarios, slow):
    return [pytest.param(each, marks=[pytest.mark.slow] * (each.name in slow), id=each.name) for each in scenarios]


@pytest.fixture(scope="module")
def arena(default_model):
    """Requests on a small model, whose steps are slowed down so that faults find them under way."""
    # What is left in a folder that nobody else uses has been left by an engine.
    before, tempfile.tempdir = tempfile.tempdir, tempfile.mkdtemp(prefix="faults-", dir="/tmp")
    model = os.path.join(tempfile.tempdir, "model")
    save_small_model(model, default_model)
    yield Arena(model, {"num_threads": 1}, streams=12, max_tokens=64, step=8, block_s=1.5, pace_s=0.005)
    shutil.rmtree(tempfile.tempdir)
    tempfile.tempdir = before


@pytest.fixture(scope="module")
def shared_engine(arena):
    with arena.share_engine() as engine:
        yield engine


@pytest.mark.parametrize("scenario", _marked(_TOGETHER, _SLOW))
def test_the_promise_is_kept(arena, shared_engine, scenario):
    assert play(scenario, arena).broken == []


@pytest.mark.parametrize("scenario", _marked(_ON_THEIR_OWN, _SLOW))
def test_the_promise_is_kept_by_an_engine_of_its_own(arena, scenario):
    assert play(scenario, arena).broken == []


@pytest.mark.slow
def test_nothing_is_lost_or_left_over_many_kills(arena):
    record = soak(arena, kills=6, fault_injection=arena.pace)
    assert record.broken == []
    assert record.kills == record.restarts == 6
    assert len(record.next_token_s) == 6


@pytest.mark.slow
def test_nothing_is_lost_or_left_while_requests_come_and_go_and_cores_die_in_every_way(arena):
    record = soak(arena, seconds=10, seed=1, is_random=True, fault_injection=arena.pace)
    assert record.broken == []
    assert record.kills > 1


@pytest.fixture(scope="module")
def overlapping(arena):
    """The same requests, answered with the next step launched while one is computed; the same answers are due."""
    other = copy.copy(arena)
    other.options = {**arena.options, "async_scheduling": True}
    with other.share_engine() as engine:
        assert engine.vllm_config.scheduler_config.async_scheduling
        yield other


@pytest.mark.parametrize("scenario", _marked(_WITH_A_STEP_IN_FLIGHT, _SLOW_IN_FLIGHT))
def test_the_promise_is_kept_with_a_step_in_flight(overlapping, scenario):
    assert play(scenario, overlapping).broken == []


def test_nothing_is_lost_over_many_kills_with_a_step_in_flight(overlapping):
    other = copy.copy(overlapping)
    other.shared = None
    record = soak(other, kills=4, fault_injection=other.pace)
    assert record.broken == []
    assert record.kills == record.restarts == 4
