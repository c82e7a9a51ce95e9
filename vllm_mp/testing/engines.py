"""What tests of a real engine share."""

import asyncio
import contextlib
import time

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**28,
    "disable_log_requests": True,
    "check_invariants": True,
}
"""Float32, so that answers can be compared token by token."""


@contextlib.contextmanager
def running_engine(model, **options):
    """An engine of any model, shut down at the end of the block."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **{**ENGINE, **options}))
    try:
        yield engine
    finally:
        engine.shutdown()


def greedy(max_tokens, **params):
    return SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **params)


async def answer(engine, prompt, params, request_id=None):
    """The last output of a request."""
    async for output in engine.generate(prompt, params, request_id):
        last = output
    return last


async def eventually(condition, timeout=30.0):
    """Wait until `await condition()` holds."""
    deadline = time.monotonic() + timeout
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def is_empty(engine):
    """The core holds no request and no block, by its own count."""
    status = await engine.core_status()
    return status["num_running"] == status["num_waiting"] == 0 and status["free_blocks"] == status["total_blocks"]


async def rest(stream):
    """The last output of a stream."""
    async for output in stream:
        last = output
    return last.outputs[0]


def num_waiting_is(engine, count):
    """A condition for `eventually`."""

    async def condition():
        return (await engine.core_status())["num_waiting"] == count

    return condition
