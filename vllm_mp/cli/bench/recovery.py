"""The benchmark of recovery: how long streams pause when the core is killed."""

import argparse
import asyncio
import dataclasses
import itertools
import os
import signal
import time
from typing import TYPE_CHECKING

from vllm_mp.cli.bench.flags import add_json_flag, positive_integer, write_json
from vllm_mp.cli.bench.load_generator import percentiles
from vllm_mp.cli.bench.progress import progress
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

USAGE = "[OPTIONS]"

_TOKENS_BEFORE = 8
"""Tokens of each stream before the core is killed."""
_STANDBY_S = 5.0
"""Time for a standby process to start and to import everything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kills", type=positive_integer, default=10, metavar="N", help="Kill the core N times. Default: %(default)s."
    )
    parser.add_argument(
        "--streams",
        type=positive_integer,
        default=8,
        metavar="N",
        help="Run N streams at a time. Default: %(default)s.",
    )
    add_json_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_mp.client.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs.from_cli_args(args)
    if not engine_args.recovery:
        raise ValueError("--no-recovery gives nothing to measure; leave it out")
    engine_args = dataclasses.replace(
        engine_args, max_core_restarts=max(engine_args.max_core_restarts, args.kills), disable_log_requests=True
    )
    llm = AsyncLLM.from_engine_args(engine_args)
    try:
        first, every = asyncio.run(_measure(llm, args.kills, args.streams))
    finally:
        llm.shutdown()
    figures = {}
    for name, gaps in (("first stream", first), ("every stream", every)):
        figures[name] = dict(zip(("median", "p90", "max"), percentiles(gaps, (0.5, 0.9, 1.0)), strict=True))
    print(f"kill to next token, s ({args.kills} kills, {args.streams} streams)")
    print(f"{'':<14} {'median':>8} {'p90':>8} {'max':>8}")
    for name, row in figures.items():
        print(f"{name:<14} " + " ".join(f"{value:8.3f}" for value in row.values()))
    report = {"model": args.model, "warm_standby": engine_args.warm_standby, "kills": args.kills, **figures}
    write_json(args.json, report)
    return 0


class _Load:
    """Streams that run all the time: each is started again when it ends."""

    def __init__(self, llm: "AsyncLLM", count: int) -> None:
        self._llm = llm
        self.times: list[list[float]] = [[] for _ in range(count)]
        """The times of each stream's tokens, in seconds of `time.monotonic()`."""

    async def run(self, index: int) -> None:
        """Run the stream `index` until the task is cancelled."""
        params = SamplingParams(seed=index, max_tokens=200, ignore_eos=True)
        while True:
            async for _ in self._llm.generate(f"Story {index}: once upon a time", params):
                self.times[index].append(time.monotonic())

    async def wait(self, count: int, tasks: "list[asyncio.Task[None]]") -> None:
        """Discard the times so far except the last, and wait for `count` tokens of each stream."""
        for times in self.times:
            del times[:-1]
        while min(len(times) for times in self.times) <= count:
            _raise_if_failed(tasks)
            await asyncio.sleep(0.01)


def _raise_if_failed(tasks: "list[asyncio.Task[None]]") -> None:
    """Raise the error of a stream that has ended."""
    for task in tasks:
        if task.done():
            task.result()


async def _measure(llm: "AsyncLLM", kills: int, streams: int) -> tuple[list[float], list[float]]:
    """Return the seconds from each kill to the first token of any stream, and to the next token of every stream."""
    load = _Load(llm, streams)
    tasks = [asyncio.create_task(load.run(i)) for i in range(streams)]
    first, every = [], []
    try:
        with progress("kills", kills) as count_kill:
            for _ in range(kills):
                await _wait_for_standby(llm)
                await load.wait(_TOKENS_BEFORE, tasks)
                status = await llm.core_status()
                killed = time.monotonic()
                os.kill(status["pid"], signal.SIGKILL)
                await llm.core_status()  # answered by the next core
                counts = [len(times) for times in load.times]
                while any(len(times) < count + 2 for times, count in zip(load.times, counts, strict=True)):
                    _raise_if_failed(tasks)
                    await asyncio.sleep(0.002)
                # Tokens in transit at the kill arrive at once, so a stream's longest gap is the wait for the next core.
                gaps = [max((b - a, b) for a, b in itertools.pairwise(times))[1] - killed for times in load.times]
                first.append(min(gaps))
                every.extend(gaps)
                count_kill()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return first, every


async def _wait_for_standby(llm: "AsyncLLM") -> None:
    """Wait until the standby process has had time to import everything, if the engine keeps one."""
    if llm.vllm_config.liveness_config.warm_standby:
        await asyncio.sleep(_STANDBY_S)
