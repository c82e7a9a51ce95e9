"""Measure what recovery costs each step: writing the status page, and a heartbeat for each layer.

One run measures the processor time that a step spends on these, and the time between two tokens of a real engine that
decodes as many requests. Nothing else costs a step anything: the client keeps its records to serve a stream at all,
and its supervisor reads the status page a few times per second.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core_link.core_status import StepRequests
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.testing.measuring.engine_speed import steady_tokens_per_s, stream_batch

PROMPT_LEN = 128


def seconds_per_call(call: Callable[[], object], repeats: int) -> float:
    """Return the processor time of one call: the median of `repeats` rounds of 100 calls."""
    rounds = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(100):
            call()
        rounds.append((time.thread_time() - start) / 100)
    return statistics.median(rounds)


def page_cost(page: StatusPage, num_requests: int, repeats: int) -> float:
    """Return the seconds that a step spends on writing the status page."""
    batch = Batch(num_requests, 1024, 16, [])
    rows = np.arange(num_requests)

    def write() -> None:
        num_output_tokens = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
        page.begin_step(1, StepRequests(batch.client[rows], batch.slot[rows], num_output_tokens))
        page.end_step(num_requests, 0, 1, 1)

    return seconds_per_call(write, repeats)


def beat_cost(page: StatusPage, num_layers: int, repeats: int) -> float:
    """Return the seconds that a step spends on the heartbeats of its layers."""
    plain, beating = torch.nn.Identity(), torch.nn.Identity()
    beating.register_forward_pre_hook(lambda *_: page.beat())
    hidden = torch.zeros(1)
    return num_layers * (
        seconds_per_call(lambda: beating(hidden), repeats) - seconds_per_call(lambda: plain(hidden), repeats)
    )


def step_time(engine: AsyncLLM, num_requests: int, output_len: int, rounds: int) -> float:
    """Return the seconds between two tokens of each of `num_requests` streams: the median after a warm-up round."""
    times = []
    for _ in range(1 + rounds):
        streams = asyncio.run(stream_batch(engine, num_requests, PROMPT_LEN, output_len))
        times.append(num_requests / steady_tokens_per_s(streams))
    return statistics.median(times[1:])


def measure(engine: AsyncLLM, batches: list[int], output_len: int, rounds: int) -> list[dict[str, Any]]:
    """Return a record for each number of requests. Times are in microseconds."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        page = StatusPage.create(str(Path(folder) / "page"), incarnation=1)
        for num_requests in batches:
            on_page = page_cost(page, num_requests, 20 * rounds)
            beats = beat_cost(page, engine.model_config.architecture.num_layers, 20 * rounds)
            step = step_time(engine, num_requests, output_len, rounds)
            records.append(
                {
                    "requests": num_requests,
                    "page_us": 1e6 * on_page,
                    "beats_us": 1e6 * beats,
                    "step_us": 1e6 * step,
                    "percent_of_step": 100 * (on_page + beats) / step,
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Return the figures as a readable table."""
    lines = [f"{'requests':>10}{'page us':>10}{'beats us':>10}{'step us':>12}{'% of step':>11}"]
    lines += [
        f"{record['requests']:>10}{record['page_us']:>10.1f}{record['beats_us']:>10.1f}{record['step_us']:>12,.0f}"
        f"{record['percent_of_step']:>11.2f}"
        for record in records
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="numbers of requests (1 32 128)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens of each request (64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over which medians are taken (5)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(max_prefill_slowdown=0)  # all streams must decode at once
    args = parser.parse_args()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    try:
        records = measure(engine, args.batches, args.output_len, args.rounds)
    finally:
        engine.shutdown()
    print(json.dumps(records, indent=1) if args.json else table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
