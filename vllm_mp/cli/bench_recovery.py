"""How long streams stand still when the core is killed."""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

HELP = "kill the core over and over, and measure from the kill to the next token"

_TOKENS_BEFORE = 8
"""Of each stream, before the core is killed."""
_STANDBY_S = 5.0
"""For a standby to be started and to import everything."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=10, help="how often the core is killed (%(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="streams that run all the time (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    from vllm_mp.client.async_llm import AsyncLLM

    for name in ("kills", "streams"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if not engine_args.recovery:
        raise ValueError("--no-recovery leaves nothing to measure; leave it out")
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
        gaps.sort()
        figures[name] = {
            "median": statistics.median(gaps),
            "p90": gaps[int(0.9 * (len(gaps) - 1))],
            "max": gaps[-1],
        }
    print(f"kill to next token, s ({args.kills} kills, {args.streams} streams)")
    print(f"{'':<14} {'median':>8} {'p90':>8} {'max':>8}")
    for name, row in figures.items():
        print(f"{name:<14} " + " ".join(f"{value:8.3f}" for value in row.values()))
    if args.json:
        report = {"model": args.model, "warm_standby": engine_args.warm_standby, "kills": args.kills, **figures}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


class _Load:
    """Streams that are begun anew whenever they end."""

    def __init__(self, llm: "AsyncLLM", count: int) -> None:
        self._llm = llm
        self.times: list[list[float]] = [[] for _ in range(count)]
        """When each stream's tokens came, in seconds of `time.monotonic()`."""

    async def run(self, index: int) -> None:
        params = SamplingParams(seed=index, max_tokens=200, ignore_eos=True)
        while True:
            async for _ in self._llm.generate(f"Story {index}: once upon a time", params):
                self.times[index].append(time.monotonic())

    async def wait(self, count: int, tasks: "list[asyncio.Task[None]]") -> None:
        """Forget what has come, and wait for `count` tokens of each stream."""
        for times in self.times:
            del times[:-1]
        while min(len(times) for times in self.times) <= count:
            _raise_if_failed(tasks)
            await asyncio.sleep(0.01)


def _raise_if_failed(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _measure(llm: "AsyncLLM", kills: int, streams: int) -> tuple[list[float], list[float]]:
    """Seconds from each kill to the first token of any stream, and to the next one of every stream."""
    load = _Load(llm, streams)
    tasks = [asyncio.create_task(load.run(i)) for i in range(streams)]
    first, every = [], []
    try:
        for _ in range(kills):
            await _wait_for_standby(llm)
            await load.wait(_TOKENS_BEFORE, tasks)
            status = await llm.core_status()
            killed = time.monotonic()
            os.kill(status["pid"], signal.SIGKILL)
            await llm.core_status()  # which the next core answers
            counts = [len(times) for times in load.times]
            while any(len(times) < count + 2 for times, count in zip(load.times, counts, strict=True)):
                _raise_if_failed(tasks)
                await asyncio.sleep(0.002)
            # What was on its way at the kill came at once, so the longest wait of a stream is that for the next core.
            gaps = [max((b - a, b) for a, b in itertools.pairwise(times))[1] - killed for times in load.times]
            first.append(min(gaps))
            every.extend(gaps)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return first, every


async def _wait_for_standby(llm: "AsyncLLM") -> None:
    """Wait until the next core's process has had time to import, where there is to be one."""
    if llm.vllm_config.liveness_config.warm_standby:
        await asyncio.sleep(_STANDBY_S)
