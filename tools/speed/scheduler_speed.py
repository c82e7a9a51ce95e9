"""Measure how long the scheduler takes for a step, without a model.

The cases are 1, 256 and 1,024 running requests with contexts of 128, 1,024 and 8,192 tokens, with a prompt of their own
each or with the same prompt. The figures are medians of the processor time for three parts of a step: scheduling it,
laying out the model's inputs, and processing the output. Processor time makes other work on the machine count for
little. A decode step computes one token of each request. An admission step also computes the first chunk of one new
prompt.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vllm_mp.config import SchedulerConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.cache.block_pool import root_hash
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.scheduler.step import ModelOutput
from vllm_mp.core.worker.sampling.host_copies import all_to_device
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.requests.sampling_params import SamplingParams

BLOCK_SIZE = 16
CHUNK = 2048
"""Number of tokens of a new prompt that a step may compute beside the decodes."""
ANY_TOKEN = 7
GOAL_US, GOAL_US_A_REQUEST = 500, 1


class Workload(NamedTuple):
    """The cases to measure."""

    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    """Lengths in tokens."""
    num_steps: int
    """Number of decode steps per case."""
    num_admissions: int
    """Number of admission steps per case."""


FULL = Workload((1, 256, 1024), (128, 1024, 8192), 100, 20)
QUICK = Workload((1, 8), (32, 128), 8, 2)


class ReadyOutput(NamedTuple):
    """The handle of an output that is already computed."""

    output: ModelOutput

    def wait(self) -> ModelOutput:
        return self.output


class Bench:
    """A scheduler with running requests."""

    def __init__(self, num_requests: int, context: int, shares: bool, workload: Workload) -> None:
        """With `shares`, prompts differ only in their last tokens, so that nearly all of each is cached."""
        self.context = context
        self.shares = shares
        self.rng = np.random.default_rng(0)
        self.common = self.rng.integers(100, 30_000, context, dtype=np.int32)
        # Lengths are spread over a block, so that some requests reach the end of a block in each step.
        self.max_len = context + 2 * BLOCK_SIZE + workload.num_steps + workload.num_admissions + 1
        max_blocks = -(-self.max_len // BLOCK_SIZE)
        self.batch = Batch(num_requests + 1, self.max_len, BLOCK_SIZE, [])
        self.config = SchedulerConfig(
            max_num_seqs=num_requests + 1,
            max_num_batched_tokens=(num_requests + 1) * self.max_len,
            max_num_partial_prefills=1,
            enable_chunked_prefill=True,
            policy="fcfs",
            stream_interval=1,
        )
        cache = KVCacheManager(self.batch, (num_requests + 2) * max_blocks + 1, BLOCK_SIZE)
        self.scheduler = Scheduler(self.config, self.batch, cache)
        self.params = SamplingParams(max_tokens=self.max_len, ignore_eos=True, seed=1)
        self.slots = itertools.count()
        for _ in range(num_requests):
            self.add()
        self.time_step()
        self.config.max_num_batched_tokens = CHUNK + num_requests

    def add(self) -> int:
        """Add a request; return its slot."""
        slot = next(self.slots)
        own = self.rng.integers(100, 30_000, slot % BLOCK_SIZE + 1, dtype=np.int32)
        start = self.common if self.shares else self.rng.integers(100, 30_000, self.context, dtype=np.int32)
        prompt = np.concatenate([start, own])
        self.scheduler.add(
            Request(
                client=0,
                slot=slot,
                request_id=str(slot),
                params=self.params,
                tokens=prompt,
                num_prompt_tokens=len(prompt),
                max_total_tokens=self.max_len,
                order=self.scheduler.order_of(0),
                hashes=[root_hash("")],
            )
        )
        return slot

    def time_step(self) -> tuple[float, float, float]:
        """Run a step; return the processor seconds to schedule it, to lay it out, and to process its output."""
        start = time.thread_time()
        step = self.scheduler.schedule()
        assert step is not None
        scheduled = time.thread_time()
        step_inputs(step, self.batch, BLOCK_SIZE, _on_cpu)
        laid_out = time.thread_time()
        output = ReadyOutput(ModelOutput(np.full(int(step.samples.sum()), ANY_TOKEN)))
        begin = time.thread_time()
        self.scheduler.launched(step, output, 1)
        self.scheduler.update(output.wait())
        return scheduled - start, laid_out - scheduled, time.thread_time() - begin

    def decode(self, num_steps: int) -> list[tuple[float, float, float]]:
        return [self.time_step() for _ in range(num_steps)]

    def admit(self, num_admissions: int) -> list[tuple[float, float, float]]:
        """Run steps that each admit one more request, which is aborted after the step."""
        times = []
        for _ in range(num_admissions):
            slot = self.add()
            times.append(self.time_step())
            self.scheduler.abort(0, slot)
        return times


def _on_cpu(arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    return all_to_device(arrays, torch.device("cpu"))


def measure(workload: Workload) -> list[dict[str, Any]]:
    """Return a record for each case and kind of step, with medians in microseconds."""
    records = []
    for num_requests, context, shares in itertools.product(workload.requests, workload.contexts, (False, True)):
        bench = Bench(num_requests, context, shares, workload)
        for kind, times in (
            ("decode", bench.decode(workload.num_steps)),
            ("admission", bench.admit(workload.num_admissions)),
        ):
            schedule, inputs, update = (1e6 * statistics.median(part) for part in zip(*times, strict=True))
            records.append(
                {
                    "step": kind,
                    "requests": num_requests,
                    "context": context,
                    "prefix_hits": shares,
                    "schedule_us": schedule,
                    "inputs_us": inputs,
                    "update_us": update,
                    "total_us": 1e6 * statistics.median(map(sum, times)),
                    "goal_us": GOAL_US + GOAL_US_A_REQUEST * num_requests,
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Return the figures as a readable table."""
    head = ("step", "requests", "context", "prompts", "schedule", "inputs", "update", "total us", "goal us")
    lines = ["".join(f"{name:>11}" for name in head)]
    for record in records:
        cells = [record["step"], f"{record['requests']:,}", f"{record['context']:,}"]
        cells.append("shared" if record["prefix_hits"] else "own")
        cells += [f"{record[f'{name}_us']:,.0f}" for name in ("schedule", "inputs", "update", "total", "goal")]
        missed = "  missed" if record["total_us"] > record["goal_us"] else ""
        lines.append("".join(f"{cell:>11}" for cell in cells) + missed)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--quick", action="store_true", help="measure few and small cases, to try the tool itself")
    args = parser.parse_args()
    records = measure(QUICK if args.quick else FULL)
    print(json.dumps(records, indent=1) if args.json else table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
