"""The benchmark of recovery: how long streams pause when the core is killed."""

import argparse
import asyncio
import dataclasses
import itertools
import os
import random
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
    parser.add_argument(
        "--prompt-tokens",
        type=positive_integer,
        metavar="N",
        help="Give each stream a prompt of its own of N tokens. Default: a few words.",
    )
    parser.add_argument(
        "--output-tokens",
        type=positive_integer,
        metavar="N",
        help="End each stream after N tokens, and start it again with another prompt. Default: 200; with --replace, "
        "as many as the context allows.",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="Replace the core by a new process, as restart_core does, instead of killing it. Default: off.",
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
        pauses, recomputed = asyncio.run(_measure(llm, args))
    finally:
        llm.shutdown()
    quantiles = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    figures = {
        name: dict(zip(quantiles, percentiles(values, tuple(quantiles.values())), strict=True))
        for name, values in pauses.items()
    }
    what = "longest wait for a token, s" if args.replace else "kill to next token, s"
    how_often = f"{args.kills} {'replacements' if args.replace else 'kills'}"
    print(f"{what} ({how_often}, {args.streams} streams)")
    print(f"{'':<21}" + "".join(f" {name:>8}" for name in quantiles))
    for name, row in figures.items():
        label = f"  {name}" if name in (*_PARTS, *_PARTS_OF_SWITCH) else name
        print(f"{label:<21}" + "".join(f" {value:8.3f}" for value in row.values()))
    print(
        f"tokens that the next core computed again, median and max: {sorted(recomputed)[len(recomputed) // 2]:,}, "
        f"{max(recomputed):,}"
    )
    options = {name: getattr(args, name) for name in _REPORTED}
    options |= {name: getattr(engine_args, name) for name in ("core_template", "recover_kv_cache")}
    report = {**options, "recomputed_tokens": recomputed, **figures}
    write_json(args.json, report)
    return 0


_REPORTED = ("model", "kills", "streams", "prompt_tokens", "output_tokens", "replace")
_USUAL = "usual wait"
"""The time between two tokens of a stream before the kill or the replacement, which no pause can be shorter than."""
_PARTS = ("death is seen", "process is started", "model is loaded", "first token")
"""What happens between a kill and the first token of any stream."""
_PARTS_OF_SWITCH = ("old core ends", "new core is told", "new core serves", "first new token")
"""What happens between the last token of the old core and the first of the new one."""


class _Load:
    """Streams that run all the time: each is started again when it ends."""

    def __init__(self, llm: "AsyncLLM", count: int, prompt_tokens: int | None, max_tokens: int | None) -> None:
        """`max_tokens` is the length of a stream; None: as long as the context allows."""
        self._llm = llm
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self.times: list[list[float]] = [[] for _ in range(count)]
        """The times of each stream's tokens, in seconds of `time.monotonic()`."""

    async def run(self, index: int) -> None:
        """Run the stream `index` until the task is cancelled."""
        params = SamplingParams(seed=index, max_tokens=self._max_tokens, ignore_eos=True)
        while True:
            async for _ in self._llm.generate(self._prompt(index), params):
                self.times[index].append(time.monotonic())

    def _prompt(self, index: int) -> str | list[int]:
        if self._prompt_tokens is None:
            return f"Story {index}: once upon a time"
        draw = random.Random(f"{index} {len(self.times[index])}")
        vocab_size = self._llm.model_config.architecture.vocab_size
        return [draw.randrange(vocab_size // 2, vocab_size) for _ in range(self._prompt_tokens)]

    def waits(self) -> list[float]:
        """Return the times between two tokens of a stream, of all streams, in seconds."""
        return [after - before for times in self.times for before, after in itertools.pairwise(times)]

    def forget_times(self) -> None:
        """Discard the times so far except the last of each stream."""
        for times in self.times:
            del times[:-1]

    async def wait(self, count: int, tasks: "list[asyncio.Task[None]]") -> None:
        """Discard the times so far except the last, and wait for `count` tokens of each stream."""
        self.forget_times()
        while min(len(times) for times in self.times) <= count:
            _raise_if_failed(tasks)
            await asyncio.sleep(0.01)

    async def go_on(self, tasks: "list[asyncio.Task[None]]") -> None:
        """Wait for two more tokens of each stream."""
        counts = [len(times) for times in self.times]
        while any(len(times) < count + 2 for times, count in zip(self.times, counts, strict=True)):
            _raise_if_failed(tasks)
            await asyncio.sleep(0.002)


def _raise_if_failed(tasks: "list[asyncio.Task[None]]") -> None:
    """Raise the error of a stream that has ended."""
    for task in tasks:
        if task.done():
            task.result()


async def _measure(llm: "AsyncLLM", args: argparse.Namespace) -> tuple[dict[str, list[float]], list[int]]:
    """Return the pauses, in seconds, by what they are, and the number of tokens that each next core computed again."""
    # A replacement lasts for seconds, in which the end of a stream and its next prompt would count as a wait.
    max_tokens = args.output_tokens or (None if args.replace else 200)
    load = _Load(llm, args.streams, args.prompt_tokens, max_tokens)
    tasks = [asyncio.create_task(load.run(i)) for i in range(args.streams)]
    pauses: dict[str, list[float]] = {}
    recomputed = []
    try:
        with progress("replacements" if args.replace else "kills", args.kills) as count_kill:
            for _ in range(args.kills):
                await load.wait(_TOKENS_BEFORE, tasks)
                for name, seconds in (await (_replace if args.replace else _kill)(llm, load, tasks)).items():
                    pauses.setdefault(name, []).extend(seconds)
                recomputed.append((await llm.core_status())["num_recomputed_tokens"])
                count_kill()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return pauses, recomputed


async def _kill(llm: "AsyncLLM", load: _Load, tasks: "list[asyncio.Task[None]]") -> dict[str, list[float]]:
    """Kill the core; return the seconds to the first token of any stream, also by parts, and to the next of all."""
    usual = load.waits()
    status = await llm.core_status()
    killed = time.monotonic()
    os.kill(status["pid"], signal.SIGKILL)
    await llm.core_status()  # answered by the next core
    await load.go_on(tasks)
    restart = llm.cores.first.supervisor.last_restart
    assert restart is not None
    # Tokens in transit at the kill arrive at once.
    gaps = [next(at for at in times if at > restart.serves) - killed for times in load.times]
    ends = itertools.pairwise((killed, *restart, killed + min(gaps)))
    parts = {name: [end - begin] for name, (begin, end) in zip(_PARTS, ends, strict=True)}
    return {_USUAL: usual, "first stream": [min(gaps)], **parts, "every stream": gaps}


async def _replace(llm: "AsyncLLM", load: _Load, tasks: "list[asyncio.Task[None]]") -> dict[str, list[float]]:
    """Replace the core; return the times between two tokens of each stream around the switch, with the parts of the
    switch, and the longest times since the call.
    """
    usual = load.waits()
    load.forget_times()  # of the first prompts, for which the first streams had to wait
    await llm.restart_core()
    await load.go_on(tasks)
    restart = llm.cores.first.supervisor.last_restart
    assert restart is not None
    waits = [list(itertools.pairwise(times)) for times in load.times]
    pairs = [next(pair for pair in of_stream if pair[1] > restart.serves) for of_stream in waits]
    ends = itertools.pairwise((max(a for a, _ in pairs), *restart, min(b for _, b in pairs)))
    parts = {name: [end - begin] for name, (begin, end) in zip(_PARTS_OF_SWITCH, ends, strict=True)}
    longest = [max(b - a for a, b in of_stream) for of_stream in waits]
    return {_USUAL: usual, "old core to new core": [b - a for a, b in pairs], **parts, "every stream": longest}
