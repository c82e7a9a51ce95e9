"""Measure what several ranks cost beside their work: the message of a step, and the sums of a layer.

The ranks are processes of this machine with a thread each, without a model. A message is measured from the moment at
which the core begins to write it until the rank has laid out its rows, both for a rank that waits for it and for one
that has fallen asleep. A sum is measured over many in a row. The figures are medians in microseconds.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from vllm_mp.core.collectives.shared_group import SharedMemoryGroup, num_bytes
from vllm_mp.core.parallel.ring import SPIN_S, MessageRing
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.step_message import ARGMAX, RowMirror, StepEncoder, decode_step
from vllm_mp.requests.sampling_params import SamplingParams

BLOCK_SIZE: Final = 16
CONTEXT: Final = 1024
SLOT_BYTES: Final = 2**20
ASLEEP_S: Final = 0.002
"""Time without messages after which a rank has fallen asleep."""
WIDTHS: Final = (576, 4096, 64 * 4096)
"""Numbers of float32 that are summed: a token of a small model, a token of a model with 8B parameters, 64 of them."""
GOAL_US: Final = 100


def main() -> int:
    """Print the figures; return 1 if a message of up to 64 rows takes longer than the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="Measure N ranks. Default: 2.")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="Measure N steps of each kind.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    messages = [
        {"rows": rows, "asleep": asleep, **message_times(rows, args.ranks, args.steps, asleep)}
        for rows in (1, 64, 256)
        for asleep in (False, True)
    ]
    sums = [{"floats": width, "us": sum_time(width, args.ranks, args.steps)} for width in WIDTHS]
    if args.json:
        print(json.dumps({"ranks": args.ranks, "messages": messages, "sums": sums}))
    else:
        for case in messages:
            state = "that sleeps" if case["asleep"] else "that waits"
            print(
                f"step of {case['rows']:>3} rows to a rank {state}: written after {case['written_us']:.0f} us, "
                f"laid out after {case['read_us']:.0f} us"
            )
        for of_width in sums:
            print(f"sum of {of_width['floats']:>6} floats over {args.ranks} ranks: {of_width['us']:.0f} us")
    return int(any(case["rows"] <= 64 and case["read_us"] > GOAL_US for case in messages))


def message_times(num_rows: int, num_ranks: int, num_steps: int, asleep: bool) -> dict[str, float]:
    """Return the medians in microseconds until a decode step is written, and until the last rank has its rows."""
    num_readers = num_ranks - 1
    memory = mmap.mmap(-1, MessageRing.num_bytes(num_readers, SLOT_BYTES))
    ring = MessageRing(memory, 0, num_readers, SLOT_BYTES)
    arrivals = np.frombuffer(mmap.mmap(-1, 8 * num_readers), np.int64)
    events = [os.eventfd(0) for _ in range(num_readers)]

    def read(reader: int) -> None:
        mirror = RowMirror(num_rows, 2 * CONTEXT, BLOCK_SIZE)
        for _ in range(num_steps):
            message = ring.read(reader, events[reader], [], SPIN_S)
            assert message is not None
            decode_step(memoryview(message), mirror)
            arrivals[reader] = time.monotonic_ns()

    batch = full_batch(num_rows)
    encoder = StepEncoder(num_rows)
    rows, ones = np.arange(num_rows), np.ones(num_rows, np.int64)
    written, laid_out = [], []

    def write() -> None:
        for _ in range(num_steps):
            if asleep:
                time.sleep(ASLEEP_S)
            step = ScheduledStep.of(batch, rows, ones, num_rows)
            arrivals[:] = 0
            start = time.monotonic_ns()
            ring.write(encoder.encode(step, batch, ARGMAX), events, lambda: None)
            written.append(time.monotonic_ns() - start)
            while not arrivals.all():
                time.sleep(0)
            laid_out.append(int(arrivals.max()) - start)
            batch.num_computed_tokens += 1
            batch.num_tokens += 1

    run_ranks([write, *(lambda reader=reader: read(reader) for reader in range(num_readers))])
    return {"written_us": statistics.median(written) / 1e3, "read_us": statistics.median(laid_out) / 1e3}


def sum_time(width: int, num_ranks: int, num_sums: int) -> float:
    """Return the time of a sum of `width` floats over the ranks, in microseconds."""
    memory = mmap.mmap(-1, num_bytes(num_ranks))
    times: list[float] = []

    def add(rank: int) -> None:
        group, x = SharedMemoryGroup(memory, 0, rank, num_ranks), torch.ones(width)
        for _ in range(num_sums):
            start = time.perf_counter()
            group.sum(x)
            times.append(time.perf_counter() - start)

    run_ranks([lambda rank=rank: add(rank) for rank in range(num_ranks)])
    return 1e6 * statistics.median(times)


def run_ranks(ranks: list[Callable[[], Any]]) -> None:
    """Run the first of `ranks` in this process, and each other in a child; raise RuntimeError if one fails."""
    children = []
    for run in ranks[1:]:
        child = os.fork()
        if not child:
            try:
                run()
            except BaseException:
                os._exit(1)
            os._exit(0)
        children.append(child)
    ranks[0]()
    if any(os.waitpid(child, 0)[1] for child in children):
        raise RuntimeError("a rank has failed")


def full_batch(num_rows: int) -> Batch:
    """Return a batch of requests with `CONTEXT` tokens, all but the last of which are computed."""
    batch = Batch(num_rows, 2 * CONTEXT, BLOCK_SIZE, [])
    tokens = np.arange(CONTEXT, dtype=np.int32)
    blocks = np.arange(2 * CONTEXT // BLOCK_SIZE, dtype=np.int32)
    for slot in range(num_rows):
        batch.add(Request(0, slot, str(slot), SamplingParams(), tokens, CONTEXT, 2 * CONTEXT, (0, slot)), blocks)
    batch.num_computed_tokens[:] = CONTEXT - 1
    return batch


if __name__ == "__main__":
    sys.exit(main())
