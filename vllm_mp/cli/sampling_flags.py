"""The flags that say how an answer is sampled."""

import argparse
from typing import Any

from vllm_mp.sampling_params import RequestOutputKind, SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`. What is not given is as the model's generation_config.json says, else greedy."""
    group = parser.add_argument_group("sampling (defaults: the model's generation config, else the likeliest token)")
    group.add_argument("--temperature", type=float, help="0: always the likeliest token")
    group.add_argument("--top-p", type=float, help="smallest set of tokens of that probability")
    group.add_argument("--top-k", type=int, help="that many likeliest tokens; 0: all")
    group.add_argument("--min-p", type=float, help="tokens of that share of the highest probability")
    group.add_argument("--repetition-penalty", type=float, help="above 1: less of what prompt and answer have")
    group.add_argument("--presence-penalty", type=float, help="above 0: less of what the answer has")
    group.add_argument("--frequency-penalty", type=float, help="above 0: less of what the answer has often")
    group.add_argument("--sampling-seed", type=int, help="seed of the draws")
    group.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    group.add_argument("--min-tokens", type=int, help="tokens below which the answer does not end")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the end of the answer")


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """What the flags ask for, over the model's `defaults`, streamed as deltas."""
    flags = {name: getattr(args, name) for name in _FLAGS} | {"seed": args.sampling_seed}
    given = {name: value for name, value in flags.items() if value is not None}
    plain = {"temperature": 0.0, "max_tokens": None, "output_kind": RequestOutputKind.DELTA}
    return SamplingParams(**(plain | defaults | given))


_FLAGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "min_tokens",
    "stop",
    "ignore_eos",
)
