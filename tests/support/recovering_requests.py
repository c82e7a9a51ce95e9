"""Requests of all kinds, whose answers must be the same when the core dies in their course."""

import asyncio

from vllm_mp import SamplingParams
from vllm_mp.sampling_params import StructuredOutputsParams
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty

SHARED = "The river runs through the old town, past the mill and the bridges, and then to the sea. "
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

MAX_TRIES = 10
"""Number of times that requests are sent until a strike meets them."""


def sampled(**params):
    return SamplingParams(max_tokens=40, ignore_eos=True, **{"temperature": 0.8, "seed": 5, **params})


REQUESTS = [
    (SHARED * 4, greedy(40, ignore_eos=True)),
    (SHARED * 4 + "Here", sampled(n=2, presence_penalty=0.5)),
    ("Alone", sampled(logprobs=3, repetition_penalty=1.2)),
    ("Write JSON: ", SamplingParams(max_tokens=40, seed=3, structured_outputs=StructuredOutputsParams(json=SCHEMA))),
]


async def answers(engine, requests=REQUESTS):
    """Return (tokens, finish reason) of each completion of each request."""

    async def run(prompt, params):
        output = await answer(engine, prompt, params)
        return [(list(each.token_ids), each.finish_reason) for each in output.outputs]

    return await asyncio.gather(*(run(*request) for request in requests))


async def answers_through(engine, strike, num_steps=25, requests=REQUESTS):
    """Return the answers of requests during which `strike` ends the core, and the status of the next core.

    Requests that end before the moment for the strike was seen, on a busy machine, are sent again.
    """
    for _ in range(MAX_TRIES):
        before = (await engine.core_status())["step"]
        running = asyncio.create_task(answers(engine, requests))

        def may_strike(before=before):
            page = engine.cores.first.supervisor.status()
            return page.step >= before + num_steps and page.num_running >= len(requests)

        async def has_run_or_ended(running=running, may_strike=may_strike):
            return running.done() or may_strike()

        await eventually(has_run_or_ended)
        if not running.done():
            break
    assert not running.done(), "the requests ended too early each time"
    strike(engine)
    found = await running
    await eventually(lambda: is_empty(engine))
    return found, await engine.core_status()
