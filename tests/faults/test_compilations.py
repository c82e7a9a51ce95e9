"""Constraints that are compiled: clients take turns, and streams that a core has admitted go on after its death."""

import asyncio
import json
import os
import re
import signal
import time

import psutil
import pytest

from vllm_mp import AsyncLLM, SamplingParams, StructuredOutputsParams, TooManyConstraintsError
from vllm_mp.testing.engines import answer, eventually, greedy, rest, standalone_core

pytestmark = pytest.mark.usefixtures("forked_programs")

NUM_STREAMS = 320
"""More than one client may have compiled at a time."""


def constrained(max_tokens=8, **form):
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(**form), max_tokens=max_tokens, temperature=1.0, seed=1
    )


def expensive(number):
    """Return a schema of its own that takes seconds to compile."""
    patterns = [f"(a|b)*b(a|b){{{count}}}" for count in range(12)]
    return {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns], "title": str(number)}


@pytest.mark.slow
def test_streams_with_more_constraints_than_may_be_compiled_at_a_time_all_survive_a_kill(make_small_engine):
    engine = make_small_engine(fault_injection="slow@step=*,seconds=0.02", max_num_seqs=512)
    patterns = [rf"x{number:03d}[a-z]{{40}}" for number in range(NUM_STREAMS)]

    async def run():
        streams = [engine.generate("Say it:", constrained(60, regex=pattern)) for pattern in patterns]
        # Not all at once, because those that have to wait beyond the limit are refused.
        for first in range(0, NUM_STREAMS, 64):
            await asyncio.gather(*(anext(stream) for stream in streams[first : first + 64]))
        os.kill((await engine.core_status())["pid"], signal.SIGKILL)
        return await asyncio.gather(*(rest(stream) for stream in streams))

    for pattern, completion in zip(patterns, asyncio.run(run()), strict=True):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(pattern, completion.text)


def test_the_next_core_needs_no_trial_of_what_its_predecessor_has_compiled(make_small_engine):
    engine = make_small_engine(fault_injection="slow@step=*,seconds=0.02")
    params = constrained(40, regex="x[a-z]{30}")

    def trials_of_core():
        children = psutil.Process(engine.cores.first.supervisor.core.process.pid).children()
        return [child for child in children if any("structured_output.trial" in part for part in child.cmdline())]

    async def run():
        expected = await answer(engine, "Say it:", params)
        stream = engine.generate("Say it:", params)
        await anext(stream)
        assert len(trials_of_core()) == 1
        for _ in range(2):  # the second core must tell the third
            os.kill((await engine.core_status())["pid"], signal.SIGKILL)
            await anext(stream)
        assert (await rest(stream)).token_ids == expected.outputs[0].token_ids
        assert trials_of_core() == []

    asyncio.run(run())


@pytest.mark.slow
def test_a_client_with_many_expensive_constraints_holds_up_no_other_and_leaves_nothing_behind(small_model, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--num-threads", "1"):
        greedy_client, other = AsyncLLM.connect(address), AsyncLLM.connect(address)

        async def run():
            await answer(other, "Say it:", constrained(regex="[0-9]{3}"))  # starts what compiles
            tasks = [
                asyncio.create_task(answer(greedy_client, "Say it:", constrained(json=expensive(number))))
                for number in range(300)
            ]

            async def are_refused():
                return sum(task.done() for task in tasks) >= 300 - 256 - 1

            await eventually(are_refused)
            refusals = [task.exception() for task in tasks if task.done()]
            assert any(isinstance(refusal, TooManyConstraintsError) for refusal in refusals)
            began = time.monotonic()
            output = await answer(other, "Say it:", constrained(json={"enum": [12]}))
            assert json.loads(output.outputs[0].text) == 12
            assert time.monotonic() - began < 3, "plain constraints wait for expensive ones"
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            began = time.monotonic()
            output = await answer(other, "Say it:", constrained(grammar='start: "yes" | "no"'))
            assert output.outputs[0].text in ("yes", "no")
            assert time.monotonic() - began < 5, "the compilations of a client that has hung up go on"
            return await answer(other, "Hello", greedy(2))

        asyncio.run(run())
        for client in (greedy_client, other):
            client.shutdown()
