"""A core that stands still in a step is replaced soon, one that computes only after `engine_iteration_timeout_s`."""

import asyncio
import os
import signal

import pytest

from vllm_mp.core_link.core_status import CoreState
from vllm_mp.testing.engines import answer, eventually, greedy

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The history of the city begins"
MANY_STEPS = greedy(80, ignore_eos=True)
"""An answer after which the limit of a step of one token is known."""


async def limit_is_known(page):
    """Wait until the core is in a step whose limit is known."""
    await eventually(lambda: _is_known(page))


async def _is_known(page):
    return page.state == CoreState.STEPPING and page.step_limit_s > 0


def supervisor_of(engine):
    return engine.cores.first.supervisor


async def last_death(engine):
    return (await engine.core_status())["last_death"]


def test_core_that_is_stopped_in_mid_answer_is_replaced_after_the_limit_of_its_step(make_small_engine):
    engine = make_small_engine(engine_iteration_timeout_s=60.0)

    async def run():
        expected = (await answer(engine, PROMPT, MANY_STEPS)).outputs[0].token_ids
        task = asyncio.create_task(answer(engine, PROMPT, MANY_STEPS))
        await limit_is_known(supervisor_of(engine).core.page)
        os.kill(supervisor_of(engine).core.process.pid, signal.SIGSTOP)
        assert (await task).outputs[0].token_ids == expected
        cause = await last_death(engine)
        assert "the limit of its step, stopped by a signal (state T" in cause
        assert supervisor_of(engine).num_restarts == 1

    asyncio.run(run())


@pytest.mark.parametrize(("fault", "function"), [("hang", "_hang"), ("spin", "_spin")])
def test_stacks_of_a_core_that_hangs_in_python_are_in_its_log(make_small_engine, fault, function):
    """A step that sleeps ends after the limit of its step, an endless loop after the iteration timeout."""
    timeout = 60.0 if fault == "hang" else 1.5
    engine = make_small_engine(
        engine_iteration_timeout_s=timeout, fault_injection=f"{fault}@request=trigger,position=50,once"
    )

    async def run():
        expected = (await answer(engine, PROMPT, MANY_STEPS)).outputs[0].token_ids
        log = supervisor_of(engine).core.process.log_path
        assert (await answer(engine, PROMPT, MANY_STEPS, "trigger")).outputs[0].token_ids == expected
        cause = await last_death(engine)
        assert ("the limit of its step" in cause) == (fault == "hang")
        assert ("made no progress for 1.5 s (state R" in cause) == (fault == "spin")
        assert f"wrote its stacks to its log ({log})" in cause
        text = log.read_text()
        assert f"in {function}\n" in text
        assert "in _run_step\n" in text
        assert 'parent_watch.py", line' in text, "all threads are there"

    asyncio.run(run())


def test_call_to_a_core_that_hangs_is_answered_by_its_successor(make_small_engine):
    engine = make_small_engine(engine_iteration_timeout_s=1.0)

    async def run():
        await answer(engine, PROMPT, greedy(1))
        os.kill(supervisor_of(engine).core.process.pid, signal.SIGSTOP)
        assert await engine.reset_prefix_cache()
        assert supervisor_of(engine).num_restarts == 1

    asyncio.run(run())


def test_step_that_computes_far_longer_than_any_before_is_no_hang(make_small_engine):
    engine = make_small_engine(fault_injection="busy@request=trigger,position=50,once,seconds=3")

    async def run():
        await answer(engine, PROMPT, MANY_STEPS)
        page = supervisor_of(engine).core.page
        task = asyncio.create_task(answer(engine, PROMPT, MANY_STEPS, "trigger"))

        async def is_past_its_limit():
            return 0 < page.step_limit_s < page.read().heartbeat_age - 0.5

        await eventually(is_past_its_limit)
        assert len((await task).outputs[0].token_ids) == 80
        assert supervisor_of(engine).num_restarts == 0

    asyncio.run(run())


def test_prefill_that_is_longer_than_any_before_has_no_limit(make_small_engine):
    engine = make_small_engine(max_num_batched_tokens=1024, max_prefill_slowdown=0)
    prompt = [100 + i % 900 for i in range(900)]

    async def run():
        await answer(engine, PROMPT, MANY_STEPS)
        page, task = supervisor_of(engine).core.page, asyncio.create_task(answer(engine, prompt, greedy(3)))

        async def reads_the_prompt():
            return page.read().num_step_tokens == len(prompt)

        await eventually(reads_the_prompt)
        assert page.step_limit_s == 0, "no step of this size has been measured"
        await task
        assert supervisor_of(engine).num_restarts == 0

    asyncio.run(run())
