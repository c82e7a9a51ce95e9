"""Measure what a long prompt costs a request that shares it and streams that run beside it, with the default model.

Sharing: the time to the first token of a second request that begins with the same 1,500 tokens, divided by the time of
the first request. Flow: the longest time between two tokens of running streams while a prompt of four full steps is
computed, divided by the time of a full step. A full step is a fourth of the time that such a prompt takes alone; its
steps differ, since later steps attend to more context. Figures are medians over rounds, each with its own prompts.
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


FULL = Workload(rounds=5, shared_len=1500, own_len=20, budget=512, long_steps=4, streams=8)
QUICK = Workload(rounds=2, shared_len=300, own_len=10, budget=64, long_steps=4, streams=2)


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
        workload, long_is_computed = self.workload, asyncio.Event()
        long_len = workload.long_steps * workload.budget
        full_step = await self.seconds_to_first_token(self.tokens(long_len)) / workload.long_steps
        streams = [self.stream(self.tokens(workload.own_len), 1000) for _ in range(workload.streams)]
        for stream in streams:
            await anext(stream)
        watches = [asyncio.create_task(_arrivals(stream, long_is_computed)) for stream in streams]
        begun = time.perf_counter()
        await self.seconds_to_first_token(self.tokens(long_len))
        ended = time.perf_counter()
        long_is_computed.set()
        gaps = [
            after - before
            for times in await asyncio.gather(*watches)
            for before, after in itertools.pairwise(times)
            if after > begun and before < ended
        ]
        return full_step, max(gaps)


async def _arrivals(stream: AsyncGenerator[RequestOutput, None], stop: asyncio.Event) -> list[float]:
    """Return when the outputs arrive, up to the first output after `stop`."""
    times = []
    async with contextlib.aclosing(stream):
        async for _ in stream:
            times.append(time.perf_counter())
            if stop.is_set():
                break
    return times


async def measure(engine: AsyncLLM, workload: Workload) -> list[dict[str, Any]]:
    """Return a record of each figure. Seconds and ratios are medians over the rounds, after one to warm up."""
    bench = Bench(engine, workload)
    records = []
    for name, run, goal in (
        ("sharing", bench.sharing_round, SHARING_GOAL),
        ("flow", bench.flow_round, FLOW_GOAL),
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
    args = parser.parse_args()
    workload = QUICK if args.quick else FULL
    engine_args = AsyncEngineArgs(max_model_len=4096, max_num_batched_tokens=workload.budget, disable_log_requests=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        records = asyncio.run(measure(engine, workload))
    finally:
        engine.shutdown()
    print(json.dumps(records, indent=1) if args.json else table(records, workload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
