"""A core that dies while it verifies drafts loses no token and repeats none."""

import asyncio
import os
import signal

import pytest
from support.engine_fixtures import SLOW_STEPS
from support.recovering_requests import REQUESTS, answers, answers_through, sampled

from vllm_mp.testing.engines import greedy, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

REPEATING = [
    *REQUESTS,
    ("The same again", greedy(40, ignore_eos=True, allowed_token_ids=[100, 101, 102])),
    ("Almost the same again", sampled(allowed_token_ids=[100, 101])),
]
"""Few tokens to choose from repeat themselves; the random ones reject half of the drafts."""
OPTIONS = {"fault_injection": SLOW_STEPS, "max_core_restarts": 100, "max_num_batched_tokens": 64}
DRAFTS = {"spec_method": "ngram", "spec_tokens": 4}


def kill(engine):
    os.kill(engine.cores.first.supervisor.core.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(small_model):
    """The answers without drafts and without a death."""
    with running_engine(small_model, **OPTIONS) as engine:
        return asyncio.run(answers(engine, REPEATING))


def test_killed_core_continues_all_requests_and_finds_what_accepted_drafts_computed(small_model, expected):
    with running_engine(small_model, **OPTIONS, **DRAFTS) as engine:

        async def run():
            assert await answers(engine, REPEATING) == expected
            status = await engine.core_status()
            assert 0 < status["num_accepted_tokens"] < status["num_draft_tokens"]
            for num_deaths, num_steps in enumerate((3, 7), 1):
                found, status = await answers_through(engine, kill, num_steps, REPEATING)
                assert found == expected
                assert status["restarts"] == num_deaths
                assert status["num_found_blocks"] > 20
                assert status["num_recomputed_tokens"] == 0

        asyncio.run(run())


def test_killed_core_continues_all_requests_with_an_empty_cache_of_the_draft_model(small_model, expected):
    with running_engine(small_model, **OPTIONS, spec_model=str(small_model), spec_tokens=4) as engine:

        async def run():
            for num_deaths, num_steps in enumerate((3, 7), 1):
                found, status = await answers_through(engine, kill, num_steps, REQUESTS)
                assert found == expected[: len(REQUESTS)]
                assert status["restarts"] == num_deaths
                assert status["num_recomputed_tokens"] == 0
            before = await engine.core_status()
            assert await answers(engine, REQUESTS) == expected[: len(REQUESTS)]
            status = await engine.core_status()
            accepted, drafted = (status[name] - before[name] for name in ("num_accepted_tokens", "num_draft_tokens"))
            assert drafted > 20
            assert accepted > 0.7 * drafted

        asyncio.run(run())


def test_requests_go_on_after_a_death_in_a_step_that_verifies_drafts(small_model, expected):
    faults = f"kill@position=21,once;{SLOW_STEPS}"
    with running_engine(small_model, **{**OPTIONS, "fault_injection": faults}, **DRAFTS) as engine:

        async def run():
            return await answers(engine, REPEATING), await engine.core_status()

        found, status = asyncio.run(run())
    assert found == expected
    assert status["restarts"] == 1
    assert status["num_draft_tokens"] > 0
