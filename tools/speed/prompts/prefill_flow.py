"""Measure what a long prompt costs a request that shares it and streams that run beside it, with the default model.

Sharing: the time to the first token of a second request that begins with the same 1,500 tokens, divided by the time of
the first request. Flow: the longest time between two tokens of running streams while a prompt of four full steps is
computed, divided by the time of a full step. A full step is a fourth of the time that such a prompt takes alone; its
steps differ, since later steps attend to more context. Pace: the median time between two tokens of the same streams
meanwhile, divided by the median before. Figures are medians over rounds, each with its own prompts.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams

SHARING_GOAL = 0.15
FLOW_GOAL = 2.0
PACE_GOAL = 3.0


class Workload(NamedTuple):
    """What is measured. Lengths are in tokens."""

    rounds: int
    shared_len: int
    own_len: int
    """Tokens after the shared beginning."""
    budget: int
    """Tokens that a step computes at most."""
    long_steps: int
    """Full steps of the long prompt."""
    streams: int
    alone: int
    """Outputs of each stream before the long prompt."""


FULL = Workload(rounds=5, shared_len=1500, own_len=20, budget=512, long_steps=4, streams=8, alone=60)
QUICK = Workload(rounds=2, shared_len=300, own_len=10, budget=64, long_steps=4, streams=2, alone=10)


class Bench:
    """An engine, and random prompts that it has never computed."""

    def __init__(self, engine: AsyncLLM, workload: Workload) -> None:
        self.engine = engine
        self.workload = workload
        self.random = random.Random(0)
        self.vocab_size = engine.model_config.get_vocab_size()

    def tokens(self, count: int) -> list[int]:
        return self.random.choices(range(100, self.vocab_size), k=count)

    def stream(self, prompt: list[int], max_tokens: int) -> AsyncGenerator[RequestOutput, None]:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        return self.engine.generate(prompt, params)

    async def seconds_to_first_token(self, prompt: list[int]) -> float:
        begun = time.perf_counter()
        async for _ in self.stream(prompt, 1):
            pass
        return time.perf_counter() - begun

    async def sharing_round(self) -> tuple[float, float]:
        """Return the seconds to the first token of a prompt, and of a second prompt with the same beginning."""
        shared = self.tokens(self.workload.shared_len)
        first = await self.seconds_to_first_token(shared + self.tokens(self.workload.own_len))
        return first, await self.seconds_to_first_token(shared + self.tokens(self.workload.own_len))

    async def flow_round(self) -> tuple[float, float]:
        """Return the seconds of a full step, and the longest wait of a stream beside a long prompt."""
        full_step, _, gaps = await self._beside_a_long_prompt()
        return full_step, max(gaps)

    async def pace_round(self) -> tuple[float, float]:
        """Return the usual seconds between two tokens of a stream, and those beside a long prompt."""
        _, before, gaps = await self._beside_a_long_prompt()
        return statistics.median(before), statistics.median(gaps)

    async def _beside_a_long_prompt(self) -> tuple[float, list[float], list[float]]:
        """Return the seconds of a full step, and the gaps of streams before a long prompt is computed and meanwhile."""
        workload, long_is_computed = self.workload, asyncio.Event()
        long_len = workload.long_steps * workload.budget
        full_step = await self.seconds_to_first_token(self.tokens(long_len)) / workload.long_steps
        streams = [self.stream(self.tokens(workload.own_len), 1000) for _ in range(workload.streams)]
        times: list[list[float]] = [[] for _ in streams]
        await asyncio.gather(*(_take(stream, own, workload.alone) for stream, own in zip(streams, times, strict=True)))
        watches = [
            asyncio.create_task(_arrivals(stream, own, long_is_computed))
            for stream, own in zip(streams, times, strict=True)
        ]
        begun = time.perf_counter()
        await self.seconds_to_first_token(self.tokens(long_len))
        ended = time.perf_counter()
        long_is_computed.set()
        await asyncio.gather(*watches)
        pairs = [pair for own in times for pair in itertools.pairwise(own)]
        before = [after - earlier for earlier, after in pairs if after <= begun]
        return full_step, before, [after - earlier for earlier, after in pairs if after > begun and earlier < ended]


async def _take(stream: AsyncGenerator[RequestOutput, None], times: list[float], count: int) -> None:
    """Add to `times` when the next `count` outputs arrive."""
    for _ in range(count):
        await anext(stream)
        times.append(time.perf_counter())


async def _arrivals(stream: AsyncGenerator[RequestOutput, None], times: list[float], stop: asyncio.Event) -> None:
    """Add to `times` when the outputs arrive, up to the first output after `stop`."""
    async with contextlib.aclosing(stream):
        async for _ in stream:
            times.append(time.perf_counter())
            if stop.is_set():
                break


async def measure(engine: AsyncLLM, workload: Workload) -> list[dict[str, Any]]:
    """Return a record of each figure. Seconds and ratios are medians over the rounds, after one to warm up."""
    bench = Bench(engine, workload)
    records = []
    for name, run, goal in (
        ("sharing", bench.sharing_round, SHARING_GOAL),
        ("flow", bench.flow_round, FLOW_GOAL),
        ("pace", bench.pace_round, PACE_GOAL),
    ):
        await run()
        rounds = [await run() for _ in range(workload.rounds)]
        records.append(
            {
                "name": name,
                "base_s": statistics.median(base for base, _ in rounds),
                "measured_s": statistics.median(measured for _, measured in rounds),
                "ratio": statistics.median(measured / base for base, measured in rounds),
                "ratios": [measured / base for base, measured in rounds],
                "goal": goal,
            }
        )
    return records


def table(records: list[dict[str, Any]], workload: Workload) -> str:
    """Return the figures as a readable table."""
    explained = {
        "sharing": f"first token, {workload.shared_len:,} tokens shared",
        "flow": f"longest gap of {workload.streams} streams, full step {workload.budget}",
        "pace": f"median gap of {workload.streams} streams beside it",
    }
    lines = [f"{'':<44}{'base s':>9}{'measured s':>12}{'ratio':>8}{'goal':>8}"]
    for record in records:
        missed = "  missed" if record["ratio"] >= record["goal"] else ""
        lines.append(
            f"{explained[record['name']]:<44}{record['base_s']:>9.3f}{record['measured_s']:>12.3f}"
            f"{record['ratio']:>8.2f}{'<' + str(record['goal']):>8}{missed}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="use short prompts and few rounds, to test the tool")
    parser.add_argument("--slowdown", type=float, default=2.0, help="max_prefill_slowdown; 0: no limit (default: 2)")
    args = parser.parse_args()
    workload = QUICK if args.quick else FULL
    engine_args = AsyncEngineArgs(
        max_model_len=4096,
        max_num_batched_tokens=workload.budget,
        max_prefill_slowdown=args.slowdown,
        disable_log_requests=True,
    )
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        records = asyncio.run(measure(engine, workload))
    finally:
        engine.shutdown()
    print(json.dumps(records, indent=1) if args.json else table(records, workload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
