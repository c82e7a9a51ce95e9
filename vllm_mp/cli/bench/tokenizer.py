"""The benchmark of tokenizing: batches against single calls, and the lag of the event loop meanwhile."""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_mp.cli.bench.flags import add_json_flag, positive_integer, write_json
from vllm_mp.cli.bench.heartbeat import heartbeat
from vllm_mp.cli.bench.progress import progress
from vllm_mp.cli.bench.stream_lag import StreamLoad, measure_stream_lag, print_lag_header, report_lag
from vllm_mp.config.engine_args import EngineArgs

if TYPE_CHECKING:
    from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer

USAGE = "[OPTIONS]"

_TEXT: Final = (
    "The quick brown fox jumps over a lazy dog while 42 engineers measure tokens, streams and batches; every Größe has "
    "a unit. Results follow from commands that anybody can repeat: "
)
_CHARS_PER_TOKEN = 5
"""Length of the texts per token, a little more than that of a usual token."""
_LONG_TEXT_CHARS = 27_000_000


class Cost(NamedTuple):
    """What a piece of work costs."""

    wall_s: float
    cpu_s: float
    """Processor time of all threads of this process."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default=EngineArgs.model, help="Measure the tokenizer of this model. Default: %(default)s."
    )
    size = positive_integer
    parser.add_argument(
        "--prompts",
        type=size,
        default=1000,
        metavar="N",
        help="Tokenize N short prompts at once. Default: %(default)s.",
    )
    parser.add_argument(
        "--long-prompts",
        type=size,
        default=200,
        metavar="N",
        help="Tokenize N long prompts at once. Default: %(default)s.",
    )
    parser.add_argument(
        "--long-prompt-len",
        type=size,
        default=30_000,
        metavar="N",
        help="Make long prompts of N tokens. Default: %(default)s.",
    )
    parser.add_argument(
        "--longest-text",
        type=size,
        default=_LONG_TEXT_CHARS,
        metavar="N",
        help="Tokenize a single text of N characters. Default: %(default)s.",
    )
    parser.add_argument(
        "--streams", type=size, default=1024, metavar="N", help="Run N streams of a replay core. Default: %(default)s."
    )
    parser.add_argument(
        "--rate",
        type=size,
        default=50_000,
        metavar="N",
        help="Give all streams together N tokens per second. Default: %(default)s.",
    )
    parser.add_argument(
        "--seconds",
        type=size,
        default=10,
        metavar="N",
        help="Measure streams, and an idle event loop, for N seconds each. Default: %(default)s.",
    )
    parser.add_argument(
        "--logprobs",
        type=size,
        metavar="N",
        help="Let the streams ask for N log-probabilities at each token. Default: none.",
    )
    parser.add_argument(
        "--rounds", type=size, default=7, metavar="N", help="Measure short prompts N times. Default: %(default)s."
    )
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
    from vllm_mp.client.prompts.tokenizer import load_awaitable_tokenizer

    config = EngineArgs(model=args.model).create_engine_config().model_config
    tokenizer = PromptTokenizer(load_awaitable_tokenizer(config))
    report: dict[str, Any] = {"model": args.model, "cores": os.cpu_count()}
    try:
        report |= uvloop.run(_measure_short(tokenizer, args.prompts, args.rounds))
        report |= uvloop.run(_measure_lag(tokenizer, args))
    finally:
        tokenizer.close()
    load = StreamLoad(args.streams, args.rate, args.seconds, args.logprobs)
    report["lag with streams, ms"] = measure_stream_lag(args.model, load)
    write_json(args.json, report)
    return 0


async def _measure_short(tokenizer: "PromptTokenizer", num_prompts: int, rounds: int) -> dict[str, Any]:
    """Measure concurrent short prompts, and single ones, with the tokenizer and its batches."""
    from vllm_mp.client.prompts.microbatch_tokenizer import AsyncMicrobatchTokenizer

    call, batches = tokenizer.tokenizer, AsyncMicrobatchTokenizer(tokenizer.tokenizer)
    chance, loop = random.Random(0), asyncio.get_running_loop()
    prompts = [_text(chance, chance.randrange(20, 80)) + f" {number}" for number in range(num_prompts)]
    num_tokens = sum(len(call(prompt).input_ids) for prompt in prompts)
    thread = ThreadPoolExecutor(1)

    async def one_by_one() -> None:
        for prompt in prompts:
            await loop.run_in_executor(thread, call, prompt)

    async def batched() -> None:
        await asyncio.gather(*[batches(prompt) for prompt in prompts])

    async def for_the_engine() -> None:
        await asyncio.gather(*[tokenizer.ids(prompt, {}) for prompt in prompts])

    ways = {
        "one by one, in a thread": one_by_one,
        "AsyncMicrobatchTokenizer": batched,
        "engine's token ids": for_the_engine,
    }
    costs = await _in_turns(ways, rounds)
    print(f"{num_prompts} concurrent prompts of {num_tokens / num_prompts:.1f} tokens")
    print(f"{'median, in ms':<28}{'time':>10}{'':>8}{'processor time':>18}{'':>8}")
    base = costs["one by one, in a thread"]
    for name, cost in costs.items():
        print(f"  {name:<26}{1000 * cost.wall_s:>10.1f}{base.wall_s / cost.wall_s:>6.1f} x", end="")
        print(f"{1000 * cost.cpu_s:>18.1f}{base.cpu_s / cost.cpu_s:>6.1f} x")

    async def alone() -> None:
        call(prompts[0])

    async def alone_batched() -> None:
        await batches(prompts[0])

    async def alone_for_the_engine() -> None:
        await tokenizer.ids(prompts[0], {})

    lone_ways = {
        "call on the event loop": alone,
        "AsyncMicrobatchTokenizer": alone_batched,
        "engine's token ids": alone_for_the_engine,
    }
    lone = await _in_turns(lone_ways, 50 * rounds)
    print("a lone prompt, median in µs")
    for name, cost in lone.items():
        print(f"  {name:<26}{1e6 * cost.wall_s:>10.0f}")
    thread.shutdown()
    batches.close()
    return {
        "short prompts, s": {name: cost._asdict() for name, cost in costs.items()},
        "lone prompt, s": {name: cost._asdict() for name, cost in lone.items()},
    }


async def _measure_lag(tokenizer: "PromptTokenizer", args: argparse.Namespace) -> dict[str, Any]:
    """Measure the lag of the loop, and the wait of short prompts, while long texts are tokenized."""
    chance = random.Random(1)
    rows = {}
    long_prompts = [_text(chance, _CHARS_PER_TOKEN * args.long_prompt_len) for _ in range(args.long_prompts)]
    longest = _text(chance, args.longest_text)
    cases = {
        "nothing else": [],
        f"{args.long_prompts} prompts of {args.long_prompt_len} tokens": long_prompts,
        f"a text of {args.longest_text} characters": [longest],
    }
    print_lag_header(f"{'short prompt, ms':>20}")
    for name, texts in cases.items():
        waits: list[float] = []
        start = time.perf_counter()
        async with heartbeat() as beat:
            work = [asyncio.ensure_future(tokenizer.ids(text, {})) for text in texts]
            while not waits or not all(task.done() for task in work):
                begin = time.perf_counter()
                await tokenizer.ids(_text(chance, 2000), {})
                waits.append(1000 * (time.perf_counter() - begin))
                await asyncio.sleep(0.1 if work else args.seconds)
        seconds = time.perf_counter() - start
        rows[name] = report_lag(name, beat, f"{seconds:>10.1f}{statistics.median(waits):>20.1f}")
        for task in work:
            task.result()
    return {"lag while tokenizing, ms": rows}


async def _in_turns(ways: Mapping[str, Callable[[], Awaitable[None]]], rounds: int) -> dict[str, Cost]:
    """Return the median cost of each way, after a round of warm-up."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    with progress("rounds", 1 + rounds) as count_round:
        for turn in range(1 + rounds):
            for name, way in ways.items():
                start, cpu = time.perf_counter(), time.process_time()
                await way()
                if turn:
                    costs[name].append(Cost(time.perf_counter() - start, time.process_time() - cpu))
            count_round()
    return {name: Cost(*map(statistics.median, zip(*rows, strict=True))) for name, rows in costs.items()}


def _text(chance: random.Random, num_chars: int) -> str:
    """Return a text of random words with `num_chars` characters."""
    words = chance.choices(_TEXT.split(), k=num_chars // 4 + 1)
    return " ".join(words)[:num_chars]
