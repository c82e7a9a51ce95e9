"""Requests of every kind that faults disturb: what they are, their outcomes, and when their outputs came."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_mp import AsyncLLM, LoRARequest, PoolingParams, RequestOutputKind, StructuredOutputsParams
from vllm_mp.errors import EngineError
from vllm_mp.testing.differential import Case, Outcome, consume
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.sampling_cases import FILTERS


class PoolingCase(NamedTuple):
    """One request for a vector."""

    prompt: str
    params: dict[str, Any]


Vector = np.ndarray
AnyCase = Case | PoolingCase
AnyOutcome = Outcome | Vector

_GREEDY = {"temperature": 0.0}
_SAMPLED = {"temperature": 0.8, "top_p": 0.95}
_FILTERS = {name: values[0] for name, values in FILTERS.items()}
_BEGINNING = "The river runs through the old town, past the mill and the two bridges, and down to the sea. " * 6
"""Some blocks of the KV cache."""
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40},
        "years": {"type": "array", "items": {"type": "integer"}, "minItems": 4},
        "is_alive": {"type": "boolean"},
    },
    "required": ["name", "years", "is_alive"],
}
_KINDS: tuple[tuple[RequestOutputKind, dict[str, Any]], ...] = (
    (RequestOutputKind.CUMULATIVE, _GREEDY),
    (RequestOutputKind.DELTA, _SAMPLED),
    (RequestOutputKind.DELTA, {**_GREEDY, "logprobs": 3}),
    (RequestOutputKind.CUMULATIVE, {**_SAMPLED, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": 1}),
    (RequestOutputKind.DELTA, {**_SAMPLED, "n": 3}),
    (RequestOutputKind.DELTA, {**_GREEDY, "stop": [". The", "\n\n", "ing to"], "include_stop_str_in_output": True}),
    (RequestOutputKind.FINAL_ONLY, {**_SAMPLED, **_FILTERS, "presence_penalty": 0.6}),
    (RequestOutputKind.DELTA, {"temperature": 1.4, "logit_bias": {260: -5.0}, "bad_words": ["the"]}),
    (RequestOutputKind.CUMULATIVE, {**_GREEDY, "prompt_logprobs": 2, "stop": ["!", "?\n"]}),
)


def mixed_cases(count: int, max_tokens: int, seed: int = 0) -> list[AnyCase]:
    """Return `count` requests of all kinds in turn, each of `max_tokens` tokens; every tenth is for a vector."""
    cases: list[AnyCase] = []
    prompts = itertools.cycle(PROMPTS)
    for i, prompt in zip(range(count), prompts, strict=False):
        if i % 10 == 9:
            cases.append(PoolingCase(prompt + " x" * 60, {"pooling_type": ("mean", "last", "cls")[i // 10 % 3]}))
            continue
        kind, params = _KINDS[i % 10]
        own = {**params, "seed": 1000 * seed + i, "max_tokens": max_tokens, "ignore_eos": True}
        cases.append(Case(prompt, own, kind, priority=0, abort_after=None, after=0))
    return cases


def plain_cases(count: int, max_tokens: int, seed: int = 0) -> list[AnyCase]:
    """Return `count` requests whose steps take little beside the model: greedy, and sampled with a seed, in turn."""
    cases: list[AnyCase] = []
    for i, prompt in zip(range(count), itertools.cycle(PROMPTS), strict=False):
        params = {**(_GREEDY, {"temperature": 0.8})[i % 2], "seed": 1000 * seed + i}
        own = {**params, "max_tokens": max_tokens, "ignore_eos": True}
        cases.append(Case(prompt, own, RequestOutputKind.DELTA, priority=0, abort_after=None, after=0))
    return cases


def every_case(
    count: int,
    max_tokens: int,
    seed: int = 0,
    adapters: Sequence[LoRARequest] = (),
    placeholder: str | None = None,
) -> list[AnyCase]:
    """Return `mixed_cases`, of which some have a long beginning in common, have an adapter, or are JSON objects.

    With the `placeholder` of an image in a prompt, some have images.
    """
    cases = mixed_cases(count, max_tokens, seed)
    for i, case in enumerate(cases):
        if not isinstance(case, Case):
            continue
        if i % 4 == 0 and placeholder is not None:
            cases[i] = dataclasses.replace(case, prompt=_with_images(case.prompt, placeholder, i // 4))
        elif i % 4 == 1:
            cases[i] = dataclasses.replace(case, prompt=f"{_BEGINNING}{case.prompt}")
        elif i % 4 == 2 and adapters:
            cases[i] = dataclasses.replace(case, adapter=adapters[i // 4 % len(adapters)])
        elif i % 8 == 3:
            constraint = StructuredOutputsParams(json=_SCHEMA)
            own = {"temperature": 0.9, "seed": case.params["seed"], "max_tokens": max_tokens}
            cases[i] = dataclasses.replace(case, params={**own, "structured_outputs": constraint})
    return cases


def _with_images(text: str, placeholder: str, number: int) -> dict[str, Any]:
    """Return a prompt with one image or two; the first of two is that of the prompt `number - 1`."""
    from PIL import Image

    def image(seed: int) -> Image.Image:
        generator = np.random.default_rng(seed)
        height, width = generator.integers(20, 120, 2)
        return Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))

    images = [image(seed) for seed in range(number - number % 2, number + 1)]
    return {"prompt": f"{placeholder} " * len(images) + text, "multi_modal_data": {"image": images}}


class PauseWatch:
    """Measures how long consumers receive no output after a fault. Times are in seconds."""

    def __init__(self) -> None:
        self.strike()

    def strike(self) -> None:
        """Start measuring at a fault."""
        self.struck_at = self._last = time.perf_counter()
        self.longest = 0.0
        self.resumed_at: float | None = None
        """When the longest pause ended. Outputs that were under way at the fault came before that pause."""
        self.num_outputs = 0

    def note(self) -> None:
        """Record that an output has arrived."""
        now = time.perf_counter()
        self.num_outputs += 1
        if now - self._last > self.longest:
            self.longest, self.resumed_at = now - self._last, now
        self._last = now

    @property
    def next_token_s(self) -> float | None:
        """Time from the fault to the first token after the pause."""
        return None if self.resumed_at is None else self.resumed_at - self.struck_at


class WatchedEngine:
    """An engine whose outputs a `PauseWatch` records as they arrive."""

    def __init__(self, engine: AsyncLLM, watch: PauseWatch) -> None:
        self._engine = engine
        self._watch = watch

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        async for output in self._engine.generate(*args, **options):
            self._watch.note()
            yield output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


async def outcome_of(engine: AsyncLLM | WatchedEngine, case: AnyCase) -> AnyOutcome:
    """Return the outcome of a case; raise AssertionError if outputs of its stream contradict each other."""
    if isinstance(case, Case):
        return await consume(engine, case)
    try:
        async for output in engine.encode(case.prompt, PoolingParams(**case.params)):
            vector: Vector = output.outputs.data
        return vector
    except (ValueError, EngineError) as error:
        return f"{type(error).__name__}: {error}"


async def outcomes_of(engine: AsyncLLM | WatchedEngine, cases: list[AnyCase]) -> list[AnyOutcome]:
    """Return the outcomes of all cases, sent at once."""
    return await asyncio.gather(*(outcome_of(engine, case) for case in cases))
