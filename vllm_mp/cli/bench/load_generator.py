"""The load generator of benchmarks and tools: requests of random tokens, and the times of their output tokens."""

import asyncio
import itertools
import random
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from vllm_mp.requests import sampling_params


class LoadRequest(NamedTuple):
    """A request of the load."""

    prompt: list[int]
    """Token ids."""
    output_len: int
    """Number of output tokens."""
    arrival: float = 0.0
    """Time at which it is sent, in seconds from the start of the load."""


class Timeline(NamedTuple):
    """The times of a request, in seconds from the start of the load."""

    sent: float
    """The time at which the request was sent."""
    tokens: list[float]
    """The time of each output token; tokens of the same `RequestOutput` have the same time."""

    @property
    def first_token_s(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.tokens[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between each token and the next."""
        return [b - a for a, b in itertools.pairwise(self.tokens)]


def random_prompt(chance: random.Random, vocab_size: int, length: int) -> list[int]:
    """Return `length` token ids, drawn uniformly from the vocabulary."""
    return chance.choices(range(vocab_size), k=length)


async def run_load(
    llm: Any,
    requests: Sequence[LoadRequest],
    temperature: float = 0.0,
    api: ModuleType = sampling_params,
    on_end: Callable[[], None] = lambda: None,
    top_p: float = 1.0,
) -> list[Timeline]:
    """Send each request at its time, wait for all, and return their timelines. Each completion has `output_len` tokens.

    `llm` is an `AsyncLLM`, and `api` is the module of its `SamplingParams`: this engine's, or vLLM's with equal names.
    `on_end` is called at the end of each request.
    """
    start = time.perf_counter()

    async def send(request: LoadRequest) -> Timeline:
        await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
        params = api.SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=request.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=api.RequestOutputKind.DELTA,
        )
        sent, tokens = time.perf_counter() - start, []
        async for output in llm.generate({"prompt_token_ids": request.prompt}, params, uuid.uuid4().hex):
            tokens += [time.perf_counter() - start] * len(output.outputs[0].token_ids)
        on_end()
        return Timeline(sent, tokens)

    return await asyncio.gather(*map(send, requests))


def decode_rate(timelines: Sequence[Timeline]) -> float:
    """Return the tokens per second of all streams together while all of them decode.

    This time begins when every stream has its first token, and ends when some stream has its last. Raises ValueError if
    it is too short.
    """
    begin = max(timeline.tokens[0] for timeline in timelines)
    end = min(timeline.tokens[-1] for timeline in timelines)
    tokens = sum(begin < moment <= end for timeline in timelines for moment in timeline.tokens)
    if tokens < 2 * len(timelines):
        raise ValueError("the streams hardly ever decode at the same time; give a longer --output-len")
    return tokens / (end - begin)


def uniform_load(
    vocab_size: int,
    num_prompts: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    request_rate: float | None,
    seed: int,
) -> list[LoadRequest]:
    """Return requests with lengths uniform between the bounds, in tokens.

    They arrive as a Poisson process of `request_rate` per second, or all at once if it is None.
    """
    chance = random.Random(seed)
    requests, arrival = [], 0.0
    for _ in range(num_prompts):
        prompt = random_prompt(chance, vocab_size, chance.randint(*input_len))
        requests.append(LoadRequest(prompt, chance.randint(*output_len), arrival))
        if request_rate is not None:
            arrival += chance.expovariate(request_rate)
    return requests


def percentiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return, for each of `shares` from 0 to 1, the value below which this share of `values` lies.

    Between two values it is interpolated linearly, so that the share 0.5 is the median, and a larger share never gives
    a smaller value. Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("there are no values, so there are no percentiles")
    ordered, results = sorted(values), []
    for share in shares:
        whole, part = divmod(share * (len(ordered) - 1), 1)
        below, above = ordered[int(whole)], ordered[min(int(whole) + 1, len(ordered) - 1)]
        results.append(min(above, below + part * (above - below)))
    return results


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
