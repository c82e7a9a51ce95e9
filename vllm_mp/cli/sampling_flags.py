"""The flags that say how an answer is sampled."""

import argparse

from vllm_mp.sampling_params import RequestOutputKind, SamplingParams


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`; the defaults give the most likely answer, up to the end of the context."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token (%(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="smallest set of tokens of that probability")
    group.add_argument("--top-k", type=int, default=0, help="that many likeliest tokens; 0: all")
    group.add_argument("--min-p", type=float, default=0.0, help="tokens of that share of the highest probability")
    group.add_argument("--sampling-seed", type=int, help="seed of the draws")
    group.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of the answer")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the flags ask for, streamed as deltas."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.sampling_seed,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )
