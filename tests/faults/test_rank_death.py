"""A rank that dies, hangs or says what no rank says is a death of its core: all ranks are replaced, streams go on."""

import asyncio
import contextlib
import os
import signal

import psutil
import pytest

from vllm_mp import EngineDeadError, EngineError, RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy

RANKS = {"tensor_parallel_size": 2, "num_threads": 1, "max_model_len": 256}
PROMPTS = ("Hello", "The capital of France is", "One two three", "Once upon a time")
NUM_TOKENS = 24


async def rank_pids(engine):
    return (await engine.core_status())["rank_pids"]


async def streamed(engine, prompt, progress):
    """Return the tokens of a stream; set `progress` when it has some."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    tokens = []
    async for output in engine.generate(prompt, params):
        tokens += output.outputs[0].token_ids
        if len(tokens) > 5:
            progress.set()
    return tokens


async def tokens_after(engine, strike):
    """Return the tokens of all prompts, where `strike(pids of the ranks)` is called in the middle of the streams."""
    begun = [asyncio.Event() for _ in PROMPTS]
    streams = [
        asyncio.ensure_future(streamed(engine, prompt, event)) for prompt, event in zip(PROMPTS, begun, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    strike(await rank_pids(engine))
    return await asyncio.wait_for(asyncio.gather(*streams), 60)


def ended(pids):
    """Return whether none of the processes runs any more."""
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


async def assert_idle(pids):
    """Raise AssertionError unless the processes use hardly any processor time."""
    before = [psutil.Process(pid).cpu_times() for pid in pids]
    await asyncio.sleep(1.0)
    after = [psutil.Process(pid).cpu_times() for pid in pids]
    assert max(sum(new[:2]) - sum(old[:2]) for new, old in zip(after, before, strict=True)) < 0.3


async def expected_tokens(engine):
    outputs = await asyncio.gather(*(answer(engine, prompt, greedy(NUM_TOKENS, ignore_eos=True)) for prompt in PROMPTS))
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_streams_continue_after_a_rank_is_killed_and_no_rank_outlives_its_core(make_small_engine):
    engine = make_small_engine(**RANKS)

    async def run():
        expected = await expected_tokens(engine)
        first = await rank_pids(engine)
        assert len(first) == 2
        await assert_idle(first)
        assert await tokens_after(engine, lambda pids: os.kill(pids[1], signal.SIGKILL)) == expected
        second = await rank_pids(engine)
        assert not set(first) & set(second)
        os.kill(second[1], signal.SIGSTOP)  # a stopped process cannot end by itself
        os.kill(second[0], signal.SIGKILL)

        async def none_is_left():
            return ended([*first, *second])

        await eventually(none_is_left)

    asyncio.run(run())


@pytest.mark.slow
def test_rank_that_is_stopped_or_dies_in_an_idle_core_is_replaced(make_small_engine):
    engine = make_small_engine(**RANKS, engine_iteration_timeout_s=3.0, start_timeout_s=30.0)

    async def run():
        expected = await expected_tokens(engine)
        first = await rank_pids(engine)
        log = engine._supervisor.core.process.log_path
        assert await tokens_after(engine, lambda pids: os.kill(pids[1], signal.SIGSTOP)) == expected
        assert f"rank 1 (process {first[1]}) has made no progress" in log.read_text()
        second = await rank_pids(engine)
        os.kill(second[1], signal.SIGKILL)

        async def replaced():
            with contextlib.suppress(EngineError):  # no answer in time: the next core is starting
                return await rank_pids(engine) != second

        await eventually(replaced)
        assert await tokens_after(engine, lambda pids: None) == expected
        return [*first, *second, *await rank_pids(engine)]

    pids = asyncio.run(run())
    engine.shutdown()
    assert ended(pids)


@pytest.mark.slow
def test_error_names_the_rank_that_died(make_small_engine):
    engine = make_small_engine(**RANKS, recovery=False)

    async def run():
        pids = await rank_pids(engine)
        stream = asyncio.ensure_future(streamed(engine, "Hello", begun := asyncio.Event()))
        await begun.wait()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pids[1]}\) ended with signal SIGKILL"):
            await asyncio.wait_for(stream, 20)
        return pids

    assert ended(asyncio.run(run()))
