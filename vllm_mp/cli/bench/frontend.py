"""The benchmark of the client's output path: from a core's messages to text at the consumers, without a model."""

import argparse
import asyncio
import os
import platform
import statistics
from typing import TYPE_CHECKING, Any

from vllm_mp.cli.bench.flags import add_json_flag, positive_integer, write_json
from vllm_mp.cli.bench.load_generator import percentiles
from vllm_mp.cli.bench.progress import progress
from vllm_mp.cli.bench.stream_lag import StreamLoad, measure_stream_lag, print_lag_header
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.requests.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from vllm_mp.cli.bench.frontend_load import Load, Round

USAGE = "[OPTIONS]"

_CONSUMERS = {"group": "one consumer of a stream group", "each": "a consumer for each stream"}
_KINDS = {"delta": RequestOutputKind.DELTA, "cumulative": RequestOutputKind.CUMULATIVE}
_NUM_WARM_UP = 20
"""Requests before the latency is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--streams",
        type=positive_integer,
        nargs="+",
        default=[256, 1024],
        metavar="N",
        help="Measure with N streams, for each N. Default: 256 1024.",
    )
    parser.add_argument(
        "--tokens",
        type=positive_integer,
        default=256,
        metavar="N",
        help="Give each stream N tokens. Default: %(default)s.",
    )
    parser.add_argument(
        "--rounds",
        type=positive_integer,
        default=5,
        metavar="N",
        help="Measure N rounds of each case, after a round of warm-up. Default: %(default)s.",
    )
    parser.add_argument(
        "--consumers",
        nargs="+",
        choices=list(_CONSUMERS),
        default=list(_CONSUMERS),
        help="; ".join(("Measure these consumers", *(f"{name}: {text}" for name, text in _CONSUMERS.items())))
        + ". Default: both.",
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(_KINDS),
        default=list(_KINDS),
        help="Measure these kinds of output. Default: both.",
    )
    parser.add_argument(
        "--requests",
        type=positive_integer,
        default=500,
        metavar="N",
        help="Measure the time to the first output with N requests, one after the other. Default: %(default)s.",
    )
    parser.add_argument(
        "--breakdown", action="store_true", help="Print also what each part of the path costs per token. Default: off."
    )
    parser.add_argument(
        "--python",
        action="store_true",
        help="Use the path in Python, even if the compiled path was built. Default: off.",
    )
    parser.add_argument(
        "--rate",
        type=positive_integer,
        metavar="N",
        help="Measure only the lag of the event loop and the memory, while all streams together get N tokens per "
        "second, each stream in a task of its own. Default: off.",
    )
    parser.add_argument(
        "--logprobs",
        type=positive_integer,
        metavar="N",
        help="Ask for N log-probabilities at each token, with --rate. Default: none.",
    )
    parser.add_argument(
        "--seconds",
        type=positive_integer,
        default=10,
        metavar="N",
        help="Run the streams for N seconds, with --rate. Default: %(default)s.",
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.cli.bench.frontend_load import replay
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.outputs import output_path

    if args.python:
        output_path.current = output_path.PYTHON
    if args.rate is not None:
        print_lag_header()
        loads = [StreamLoad(streams, args.rate, args.seconds, args.logprobs) for streams in args.streams]
        rows = [{**load._asdict(), **measure_stream_lag(EngineArgs.model, load)} for load in loads]
        write_json(args.json, {"lag with streams, ms": rows})
        return 0
    is_compiled = output_path.current is output_path.COMPILED
    own, other = _processors()
    if own is not None:
        os.sched_setaffinity(0, {own})
    with replay(other) as core:
        llm = AsyncLLM.connect(core.address)
        try:
            print(
                f"output path {'compiled' if is_compiled else 'in Python'}, Python {platform.python_version()}; "
                f"client on processor {own}, core on {other}"
            )
            report = uvloop.run(_measure(args, llm, core))
        finally:
            llm.shutdown()
    write_json(args.json, {"compiled": is_compiled, **report})
    return 0


async def _measure(args: argparse.Namespace, llm: Any, core: Any) -> dict[str, Any]:
    """Run all cases, print them, and return the figures."""
    from vllm_mp.cli.bench.frontend_load import Load

    cases = []
    columns = f"{'tokens/s':>12}{'tokens/CPU s':>14}{'lowest':>12}{'highest':>12}"
    print(f"{'streams':>7}  {'consumers':<10}{'kind':<12}{columns}")
    for num_streams in args.streams:
        load = Load(llm, core, num_streams, args.tokens)
        for consumers in args.consumers:
            for kind in args.kinds:
                case = await _case(load, consumers == "group", _KINDS[kind], args.rounds)
                cases.append({"streams": num_streams, "consumers": consumers, "kind": kind, **case})
                print(
                    f"{num_streams:>7}  {consumers:<10}{kind:<12}{case['tokens_per_s']:>12,.0f}"
                    f"{case['tokens_per_cpu_s']:>14,.0f}{case['lowest']:>12,.0f}{case['highest']:>12,.0f}"
                )
    load = Load(llm, core, 1, args.tokens)
    times = [1e6 * await load.first_output_s() for _ in range(args.requests + _NUM_WARM_UP)][_NUM_WARM_UP:]
    latency = dict(zip(("p50", "p99"), percentiles(times, (0.5, 0.99)), strict=True))
    print(f"from a request to its first output: p50 {latency['p50']:,.0f} us, p99 {latency['p99']:,.0f} us")
    report: dict[str, Any] = {"cases": cases, "first_output_us": latency}
    if args.breakdown:
        report["breakdown"] = [_print_breakdown(llm, num_streams, args.tokens, cases) for num_streams in args.streams]
    return report


async def _case(load: "Load", by_group: bool, kind: RequestOutputKind, num_rounds: int) -> dict[str, float]:
    """Return the medians over rounds, after one that warms up; rates are in tokens per second."""
    rounds: list[Round] = []
    with progress("rounds", num_rounds + 1) as count_round:
        for _ in range(num_rounds + 1):
            rounds.append(await load.run(by_group, kind))
            await asyncio.sleep(0)
            count_round()
    del rounds[0]
    rates = [measured.num_tokens / measured.cpu_s for measured in rounds]
    return {
        "tokens_per_s": statistics.median(measured.num_tokens / measured.wall_s for measured in rounds),
        "tokens_per_cpu_s": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "tokens_per_output": statistics.median(measured.num_tokens / measured.num_outputs for measured in rounds),
    }


def _print_breakdown(llm: Any, num_streams: int, num_tokens: int, cases: list[dict[str, Any]]) -> dict[str, float]:
    """Print and return the microseconds per token of each part of the path; the rest of the rounds is the last part."""
    from vllm_mp.cli.bench.frontend_breakdown import breakdown

    parts = breakdown(llm.get_tokenizer(), num_streams, num_tokens)
    print(f"\nmicroseconds of processor time per token, {num_streams} streams, DELTA")
    for name, cost in parts.items():
        print(f"  {name:<58}{cost:>8.3f}")
    rest = {}
    for case in cases:
        if case["streams"] == num_streams and case["kind"] == "delta":
            name = f"socket, event loop, waking, consumers ({case['consumers']})"
            rest[name] = 1e6 / case["tokens_per_cpu_s"] - sum(parts.values())
            print(f"  {name:<58}{rest[name]:>8.3f}")
    return parts | rest


def _processors() -> tuple[int | None, int | None]:
    """Return a processor for the client and another for the core; None if this process may use only one."""
    usable = sorted(os.sched_getaffinity(0))
    return (usable[0], usable[1]) if len(usable) > 1 else (None, None)
