"""Values of every sampling parameter for tests and fuzzers, and how the default model's outputs show each of them.

A field of `SamplingParams` must be in `CASES`, `SHOWN_ELSEWHERE` or `refused_fields()`. A test of a real engine checks
that every case in `CASES` changes an output.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_mp.arguments.parameters import Integer, Number, Strings, Switch, TokenBiases, TokenIds
from vllm_mp.requests.sampling_params import PARAMETERS, OutputKind, RequestOutputKind, SamplingParams

_GREEDY = {"temperature": 0.0}
_RANDOM = {"temperature": 1.5, "seed": 5}
_ENDS_AT_ONCE = {**_GREEDY, "logit_bias": {2: 100.0}}
"""The default model's end-of-sequence token becomes the most likely one everywhere."""
_SPECIAL_TOKENS = {**_GREEDY, "logit_bias": {1: 100.0}, "ignore_eos": True}


class SamplingCase(NamedTuple):
    """Valid values of one field, and what shows that an engine serves it."""

    values: tuple[Any, ...]
    """The first differs from the default and goes together with the first values of all other fields."""
    base: dict[str, Any]
    """Parameters whose output differs from the output with `shown` in addition."""
    shown: Any
    range: tuple[float, float, str] | None = None
    """Both ends of the range, and how a refusal writes the range."""
    warper: str | None = None
    """For a field that changes the distribution: its class in transformers.generation.logits_process."""


CASES = {
    "n": SamplingCase((2, 4, 1), _RANDOM, 3, (1, 1024, "[1, 1024]")),
    "presence_penalty": SamplingCase((0.6, -2.0, 2.0, 1), _GREEDY, 2.0, (-2, 2, "[-2, 2]")),
    "frequency_penalty": SamplingCase((0.4, -2.0, 2.0, 0.1), _GREEDY, 2.0, (-2, 2, "[-2, 2]")),
    "repetition_penalty": SamplingCase((1.1, 0.7, 1.8), _GREEDY, 1.4, (1e-6, 1e6, "[1e-06, 1e+06]")),
    "temperature": SamplingCase(
        (1.7, 0.3, 2.5, 1e-3), {**_RANDOM, "temperature": 0.1}, 2.0, (0, 1e6, "[0, 1e+06]"), "TemperatureLogitsWarper"
    ),
    "top_p": SamplingCase((0.8, 0.7, 0.3, 0.01, 1e-6, 0.99), _RANDOM, 1e-6, (1e-9, 1, "(0, 1]"), "TopPLogitsWarper"),
    "top_k": SamplingCase(
        (20, 5, 1, 2, 10_000, -1), _RANDOM, 1, (-1, 2**31 - 1, "[-1, 2147483647]"), "TopKLogitsWarper"
    ),
    "min_p": SamplingCase((0.02, 0.1, 0.5, 1.0), _RANDOM, 1.0, (0, 1, "[0, 1]"), "MinPLogitsWarper"),
    "typical_p": SamplingCase((0.9, 0.2, 0.5, 1e-6, 0.99), _RANDOM, 0.1, (1e-9, 1, "(0, 1]"), "TypicalLogitsWarper"),
    "seed": SamplingCase((7, -(2**63), 2**63 - 1), _RANDOM, 6, (-(2**63), 2**63 - 1, f"[{-(2**63)}, {2**63 - 1}]")),
    "stop": SamplingCase((["\n\n", "é"], ". The", ["ing to", " "]), _GREEDY, [" "]),
    "stop_token_ids": SamplingCase(([0, 5], [2], list(range(60))), _GREEDY, list(range(28, 1000))),
    "bad_words": SamplingCase((["no"], ["the", " a"]), _GREEDY, ["there", " village", "a", "years old"]),
    "ignore_eos": SamplingCase((True, False), _ENDS_AT_ONCE, True),
    "max_tokens": SamplingCase((12, 1, 2, 5), _GREEDY, 3, (1, 2**31 - 1, "[1, 2147483647]")),
    "min_tokens": SamplingCase((3, 1, 0), _ENDS_AT_ONCE, 4, (0, 16, "[0, 2147483647]")),
    "logprobs": SamplingCase((5, 0, 1), _GREEDY, 2, (-1, 2**31 - 1, "[-1, 2147483647]")),
    "prompt_logprobs": SamplingCase((2, 0, 1), _GREEDY, 2, (-1, 2**31 - 1, "[-1, 2147483647]")),
    "detokenize": SamplingCase((False, True), _GREEDY, False),
    "skip_special_tokens": SamplingCase((False, True), _SPECIAL_TOKENS, False),
    "include_stop_str_in_output": SamplingCase((True, False), {**_GREEDY, "stop": [" "]}, True),
    "truncate_prompt_tokens": SamplingCase((5, -1, 50, 1), _GREEDY, 3, (-1, 2**31 - 1, "[-1, 2147483647]")),
    "output_kind": SamplingCase(tuple(RequestOutputKind)[::-1], _GREEDY, RequestOutputKind.FINAL_ONLY),
    "logit_bias": SamplingCase(({7: -1.5}, {0: 2.0, 60: -20.0}), _GREEDY, {260: -8.0, 253: -3.5, 29: 4.0}),
    "allowed_token_ids": SamplingCase(([1, 2, 3, 7], list(range(60))), _GREEDY, [*range(28, 60), *range(250, 400)]),
}
"""The fields that change an output. All token ids in `values` are below 64."""

FILTERS = {name: case.values for name, case in CASES.items() if case.warper is not None and name != "temperature"}
"""The values of the fields that filter the distribution."""

SHOWN_ELSEWHERE = {
    "extra_args": "tests/engine/test_registered_processors.py",
    "logits_processors": "tests/engine/test_registered_processors.py",
    "structured_outputs": "tests/engine/test_structured_outputs.py",
    "guided_decoding": "tests/engine/test_structured_outputs.py",
    "best_of": "tests/unit/requests/test_sampling_params.py",  # only accepted where it changes nothing
    # Byte-level tokenizers ignore it.
    "spaces_between_special_tokens": "tests/unit/client/outputs/test_detokenizer.py",
}
"""Fields that the default model's outputs do not show, with the tests of them."""


def every_field() -> dict[str, Any]:
    """Return valid parameters that set every field of `CASES`, but `detokenize`, to a value that is not its default."""
    return {name: case.values[0] for name, case in CASES.items() if name != "detokenize"}


def random_params(chance: random.Random, share: float, fields: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """Return parameters that set each of `fields` with the probability `share`, and that `SamplingParams` accepts."""
    params = {name: chance.choice(CASES[name].values) for name in fields if chance.random() < share}
    if params.get("n", 1) > 1 and params.get("temperature", 1.0) == 0:
        del params["n"]
    if params.get("stop") and not params.get("detokenize", True):
        del params["detokenize"]
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], params.get("max_tokens", 16))
    return params


def invalid_values(name: str) -> list[Any]:
    """Return values, of types that msgpack carries, that the field `name` refuses."""
    match PARAMETERS[name]:
        case Integer() as integer:
            return [integer.low - 1, 1.5, True] if integer.low > -(2**63) else [1.5, True]
        case Number() as number:
            return [number.low - 0.5, number.high + 0.5, math.nan, math.inf, "1", *([number.low] * number.open_low)]
        case Switch():
            return [1, None]
        case Strings() as strings:
            return [[""], [1], ["x" * 257], ["x"] * (strings.max_count + 1)]
        case TokenIds() as ids:
            return [[-1], ["1"], [2**31], *([[]] * ids.optional)]
        case TokenBiases():
            return [{1: math.nan}, {-1: 1.0}]
        case OutputKind():
            return [9]
        case _:
            return []


def _combinations() -> list[dict[str, Any]]:
    drawn = {"temperature": CASES["temperature"].values, **FILTERS}
    alone = [{name: value} for name, values in drawn.items() for value in values]
    return [{}, *alone, {name: values[0] for name, values in drawn.items()}]


DRAWS: list[dict[str, Any]] = _combinations()
"""Parameters of draws: each filter and temperature alone at each of its values, then all together."""


def warped(scores: Any, params: Mapping[str, Any]) -> Any:
    """Return `scores` [n, vocab] after transformers' warpers for `params`, in the order of the filters."""
    from transformers.generation import logits_process

    from vllm_mp.kernels.sampling import SAMPLING_FILTERS

    default = SamplingParams()
    for name in ("temperature", *(sampling_filter.name for sampling_filter in SAMPLING_FILTERS)):
        value = params.get(name, getattr(default, name))
        if value != getattr(default, name) and value != -1:
            value = min(value, scores.shape[-1]) if isinstance(value, int) else value
            warper = CASES[name].warper
            assert warper is not None, f"{name} names no warper of transformers"
            scores = getattr(logits_process, warper)(value)(None, scores)
    return scores


def draw_params(rows: Sequence[Mapping[str, Any]], uniform: Any) -> Any:
    """Return the `DrawParams` of one row for each of `rows`; `uniform` is float64 [n]."""
    import torch

    from vllm_mp.kernels.sampling import SAMPLING_FILTERS, DrawParams

    default = SamplingParams()
    columns = {
        name: torch.tensor(
            [row.get(name, getattr(default, name)) for row in rows],
            dtype=getattr(torch, PARAMETERS[name].column or ""),
            device=uniform.device,
        )
        for name in ("temperature", *(sampling_filter.name for sampling_filter in SAMPLING_FILTERS))
    }
    filters = tuple(cut for cut in SAMPLING_FILTERS if cut.is_on(columns[cut.name]).any())
    return DrawParams(**columns, uniform=uniform, filters=filters)
