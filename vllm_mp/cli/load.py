"""Load for the benchmarks: requests of random tokens that arrive at given times, and when their tokens came."""

import asyncio
import itertools
import random
import statistics
import time
import uuid
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from vllm_mp import sampling_params


class LoadRequest(NamedTuple):
    """One request: its prompt, the tokens it asks for, and its arrival in seconds from the start."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0


class Timeline(NamedTuple):
    """When things happened to a request, in seconds from the start of the load."""

    sent: float
    tokens: list[float]
    """When each token of the answer came; tokens that came together have the same time."""

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one token and the next."""
        return [b - a for a, b in itertools.pairwise(self.tokens)]


def random_prompt(chance: random.Random, vocab_size: int, length: int) -> list[int]:
    return chance.choices(range(vocab_size), k=length)


async def run_load(
    llm: Any, requests: Sequence[LoadRequest], temperature: float = 0.0, api: ModuleType = sampling_params
) -> list[Timeline]:
    """Send each request at its time and wait for all; their answers end at the length they ask for.

    `llm` is an `AsyncLLM`, and `api` has the `SamplingParams` that it takes: ours, or vLLM's of the same names.
    """
    begun = time.perf_counter()

    async def one(request: LoadRequest) -> Timeline:
        await asyncio.sleep(max(0.0, begun + request.arrival - time.perf_counter()))
        params = api.SamplingParams(
            temperature=temperature,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=api.RequestOutputKind.DELTA,
        )
        sent, tokens = time.perf_counter() - begun, []
        async for output in llm.generate({"prompt_token_ids": request.prompt}, params, uuid.uuid4().hex):
            tokens += [time.perf_counter() - begun] * len(output.outputs[0].token_ids)
        return Timeline(sent, tokens)

    return await asyncio.gather(*map(one, requests))


def decode_rate(timelines: Sequence[Timeline]) -> float:
    """Tokens per second of all streams together while every one of them decodes.

    From the last first token to the first end. Raises ValueError where there is no such time.
    """
    begin = max(one.tokens[0] for one in timelines)
    end = min(one.tokens[-1] for one in timelines)
    tokens = sum(begin < moment <= end for one in timelines for moment in one.tokens)
    if tokens < 2 * len(timelines):
        raise ValueError("the streams hardly ever decode all at once; give a longer --output-len")
    return tokens / (end - begin)


def uniform_load(
    vocab_size: int,
    num_prompts: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    request_rate: float | None,
    seed: int,
) -> list[LoadRequest]:
    """Requests whose lengths are uniform between the bounds, in a Poisson process or all at once."""
    chance = random.Random(seed)
    requests, arrival = [], 0.0
    for _ in range(num_prompts):
        prompt = random_prompt(chance, vocab_size, chance.randint(*input_len))
        requests.append(LoadRequest(prompt, chance.randint(*output_len), arrival))
        if request_rate is not None:
            arrival += chance.expovariate(request_rate)
    return requests


def percentiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in shares]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
