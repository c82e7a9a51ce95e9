"""Streams of an engine with several ranks, into which a test strikes."""

import asyncio

import psutil

from vllm_mp import RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import answer, greedy

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
    """Return the tokens of all prompts, where `strike(pids of the ranks)` is called in the middle of the streams.

    Streams that end before all have begun, on a busy machine, are sent again.
    """
    pids = await rank_pids(engine)
    for _ in range(10):
        begun = [asyncio.Event() for _ in PROMPTS]
        streams = [
            asyncio.ensure_future(streamed(engine, prompt, event)) for prompt, event in zip(PROMPTS, begun, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        if not any(stream.done() for stream in streams):
            break
        await asyncio.gather(*streams)
    assert not any(stream.done() for stream in streams), "streams ended too early each time"
    strike(pids)
    return await asyncio.wait_for(asyncio.gather(*streams), 120)


def ended(pids):
    """Return whether none of the processes runs any more."""
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


async def expected_tokens(engine):
    outputs = await asyncio.gather(*(answer(engine, prompt, greedy(NUM_TOKENS, ignore_eos=True)) for prompt in PROMPTS))
    return [list(output.outputs[0].token_ids) for output in outputs]
