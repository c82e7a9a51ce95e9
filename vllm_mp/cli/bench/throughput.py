"""The benchmark of throughput: a load of mixed requests."""

import argparse
import dataclasses
import os

from vllm_mp.cli.bench.drafts import print_drafts, read_drafts
from vllm_mp.cli.bench.flags import add_json_flag, check_lengths, positive_integer, write_json
from vllm_mp.cli.bench.load_generator import LoadRequest, percentiles, run_load, uniform_load
from vllm_mp.cli.bench.progress import progress
from vllm_mp.config.engine_args import AsyncEngineArgs

USAGE = "[OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-prompts", type=positive_integer, default=64, metavar="N", help="Send N requests. Default: %(default)s."
    )
    for side, text in (("input", "prompts"), ("output", "completions")):
        parser.add_argument(
            f"--{side}-len",
            type=_length_range,
            default=(32, 512),
            metavar="N[:M]",
            help=f"Make {text} of N tokens; N:M draws a number from N to M for each request. Default: 32:512.",
        )
    parser.add_argument(
        "--request-rate",
        type=float,
        metavar="X",
        help="Send X requests per second, as a Poisson process. Default: all at once.",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="Sample at this temperature. Default: %(default)s."
    )
    parser.add_argument(
        "--load-seed",
        type=int,
        default=0,
        metavar="N",
        help="Draw lengths, prompts and arrivals with this seed. Default: %(default)s.",
    )
    add_json_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    if args.request_rate is not None and not args.request_rate > 0:
        raise ValueError(f"--request-rate must be above 0, got {args.request_rate}")
    engine_args = dataclasses.replace(
        AsyncEngineArgs.from_cli_args(args), disable_log_requests=True, skip_tokenizer_init=True
    )
    config = engine_args.create_engine_config()
    check_lengths(args.input_len[1], args.output_len[1], config.model_config.max_model_len)
    llm = AsyncLLM.from_vllm_config(config)
    try:
        vocab_size = llm.model_config.get_vocab_size()
        requests = uniform_load(
            vocab_size, args.num_prompts, args.input_len, args.output_len, args.request_rate, args.load_seed
        )
        warm_up = [LoadRequest(requests[0].prompt[:16], 4)]
        uvloop.run(run_load(llm, warm_up, args.temperature))
        with progress("requests", len(requests)) as count:
            timelines = uvloop.run(run_load(llm, requests, args.temperature, on_end=count))
        drafts = uvloop.run(read_drafts(llm))
    finally:
        llm.shutdown()
    seconds = max(timeline.tokens[-1] for timeline in timelines)
    num_in, num_out = sum(len(request.prompt) for request in requests), sum(request.output_len for request in requests)
    shares = (0.5, 0.9, 0.99)
    first_tokens = [1000 * timeline.first_token_s for timeline in timelines]
    gaps = [1000 * gap for timeline in timelines for gap in timeline.gaps]
    latencies = {
        "time to first token, ms": percentiles(first_tokens, shares),
        "between tokens, ms": percentiles(gaps or [0.0], shares),
    }
    print(f"{args.num_prompts} requests, {num_in:,} tokens in, {num_out:,} out, in {seconds:.1f} s")
    print(f"output tokens/s {num_out / seconds:,.0f}, total tokens/s {(num_in + num_out) / seconds:,.0f}")
    print(f"{'':<26}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, row in latencies.items():
        print(f"{name:<26}" + "".join(f"{value:>10.1f}" for value in row))
    print_drafts(drafts)
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
        **drafts,
        **{name: dict(zip(("p50", "p90", "p99"), row, strict=True)) for name, row in latencies.items()},
    }
    write_json(args.json, report)
    return 0


def _length_range(text: str) -> tuple[int, int]:
    """Return the shortest and the longest length, in tokens, of a flag's value "N" or "N:M".

    Raises ArgumentTypeError, which argparse prints with the flag's name, for another value.
    """
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it must be a number or two numbers N:M, got {text!r}") from None
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"N must be at least 1 and M at least N, got {text!r}")
    return bounds
