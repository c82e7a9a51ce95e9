"""How many tokens a second an engine makes of a load of mixed requests."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from vllm_mp.cli.load import LoadRequest, percentiles, run_load, uniform_load
from vllm_mp.engine_args import AsyncEngineArgs

HELP = "tokens per second under a load of requests of mixed lengths that arrive at random or all at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=64, help="requests in all (%(default)s)")
    for side in ("input", "output"):
        parser.add_argument(
            f"--{side}-len",
            type=_length_range,
            default=(32, 512),
            metavar="N[:M]",
            help=f"tokens of {'a prompt' if side == 'input' else 'an answer'}; N:M for any number between (32:512)",
        )
    parser.add_argument(
        "--request-rate",
        type=float,
        default=None,
        help="requests per second, arriving as a Poisson process (all at once)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="of the sampling (%(default)s)")
    parser.add_argument("--load-seed", type=int, default=0, help="decides lengths, prompts and arrivals (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, got {args.num_prompts}")
    if args.request_rate is not None and not args.request_rate > 0:
        raise ValueError(f"--request-rate must be above 0, got {args.request_rate}")
    engine_args = dataclasses.replace(
        AsyncEngineArgs.from_cli_args(args), disable_log_requests=True, skip_tokenizer_init=True
    )
    llm = AsyncLLM.from_engine_args(engine_args)
    try:
        vocab_size = llm.model_config.get_vocab_size()
        requests = uniform_load(
            vocab_size, args.num_prompts, args.input_len, args.output_len, args.request_rate, args.load_seed
        )
        warm_up = [LoadRequest(requests[0].prompt[:16], 4)]
        uvloop.run(run_load(llm, warm_up, args.temperature))
        timelines = uvloop.run(run_load(llm, requests, args.temperature))
    finally:
        llm.shutdown()
    seconds = max(one.tokens[-1] for one in timelines)
    num_in, num_out = sum(len(one.prompt) for one in requests), sum(one.output_len for one in requests)
    shares = (0.5, 0.9, 0.99)
    latencies = {
        "time to first token, ms": percentiles([1000 * one.first_token_s for one in timelines], shares),
        "between tokens, ms": percentiles([1000 * gap for one in timelines for gap in one.gaps] or [0.0], shares),
    }
    print(f"{args.num_prompts} requests, {num_in:,} tokens in, {num_out:,} out, in {seconds:.1f} s")
    print(f"output tokens/s {num_out / seconds:,.0f}, total tokens/s {(num_in + num_out) / seconds:,.0f}")
    print(f"{'':<26}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, row in latencies.items():
        print(f"{name:<26}" + "".join(f"{value:>10.1f}" for value in row))
    if args.json:
        report = {
            "model": args.model,
            "cores": os.cpu_count(),
            "num_prompts": args.num_prompts,
            "request_rate": args.request_rate,
            "tokens_in": num_in,
            "tokens_out": num_out,
            "seconds": seconds,
            "output_tokens_per_s": num_out / seconds,
            "total_tokens_per_s": (num_in + num_out) / seconds,
            **{name: dict(zip(("p50", "p90", "p99"), row, strict=True)) for name, row in latencies.items()},
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _length_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor two with a colon between") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: from at least 1 up to something no smaller")
    return bounds
