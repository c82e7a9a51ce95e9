"""The groups and the pipeline by torch.distributed, which GPUs use, with Gloo on CPUs."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from vllm_mp.core.collectives.torch_group import TorchGroup, TorchPipeline
from vllm_mp.core.parallel.rank_state import WorkerFailedError

GROUP = """
import json, sys, torch
from vllm_mp.core.collectives.torch_group import join_all_ranks
rank = int(sys.argv[2])
group = join_all_ranks(sys.argv[1], rank, 2, torch.device("cpu"), 60.0)
x = torch.arange(3.0) + rank
print(json.dumps([
    group.sum(x.clone()).tolist(),
    [part.tolist() for part in group.gather(x)],
    group.broadcast(x.clone()).tolist(),
    group.minimum(7 - rank),
]))
group.close()
"""
PIPELINE = """
import json, sys, torch
from vllm_mp.core.collectives.torch_group import TorchPipeline, join_all_ranks
rank, cpu = int(sys.argv[2]), torch.device("cpu")
joined = join_all_ranks(sys.argv[1], rank, 4, cpu, 60.0)
group, pipeline = joined.divided(2), TorchPipeline(rank // 2, 2, joined, cpu)
results, num_steps = [], 6

def expect(step):
    return pipeline.expect((step, 3), torch.float32)

if pipeline.is_first:
    pending = []
    for step in range(num_steps):
        pipeline.send(torch.full((step, 3), float(step)))
        pending.append(expect(step))
        if len(pending) == 2:
            results.append(pending.pop(0)().flatten().tolist())
    results += [wait().flatten().tolist() for wait in pending]
else:
    for step in range(num_steps):
        pipeline.send(group.sum(expect(step)() + 10 * (rank - 2)))
print(json.dumps([
    results,
    group.sum(torch.tensor([float(rank)])).tolist(),
    [part.tolist() for part in group.gather(torch.tensor([rank]))],
    group.broadcast(torch.tensor([rank])).tolist(),
    joined.minimum(7 - rank),
]))
joined.close()
"""
STOPPED = """
import os, signal, sys, torch
from vllm_mp.core.collectives.torch_group import TorchPipeline, join_all_ranks
rank, cpu, waits = int(sys.argv[2]), torch.device("cpu"), not stops_in_step

def check():
    if waits and rank == 0:
        raise ValueError("rank 1 has stopped")

if rank and not stops_in_step:
    signal.pause()
try:
    pipeline = TorchPipeline(rank, 2, join_all_ranks(sys.argv[1], rank, 2, cpu, 600.0, check), cpu)
    if rank:
        signal.pause()
    waits = True
    pipeline.send(torch.zeros(1, 3))
    pipeline.expect((1, 3), torch.float32)()
except ValueError as error:
    print(error, flush=True)
    os._exit(0)
"""


def start(program, size, folder):
    """Start `program` as each rank."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", program, str(folder / "meeting"), str(rank)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]


def results_of(program, size, folder):
    """Return what each rank of `program` prints."""
    ranks = start(program, size, folder)
    return [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]


@pytest.mark.slow
def test_ranks_that_meet_in_a_private_file_compute_together(tmp_path):
    first, second = results_of(GROUP, 2, tmp_path)
    assert first == [[1.0, 3.0, 5.0], [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]], [0.0, 1.0, 2.0], 6]
    assert second == [[1.0, 3.0, 5.0], [], [0.0, 1.0, 2.0], 6]


@pytest.mark.extended  # two processes import torch
@pytest.mark.parametrize("stops_in_step", [True, False], ids=["in a step", "while joining"])
def test_first_stage_that_waits_for_another_keeps_looking_at_the_ranks(stops_in_step, tmp_path):
    ranks = start(f"stops_in_step = {stops_in_step}\n{STOPPED}", 2, tmp_path)
    try:
        assert "rank 1 has stopped" in ranks[0].communicate(timeout=120)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("operation", ["isend", "irecv"])
def test_transfer_that_cannot_begin_fails_for_the_reason_that_the_core_knows(operation, monkeypatch):
    def lost(*args, **options):
        raise RuntimeError("Connection reset by peer")

    def check():
        raise WorkerFailedError("rank 3 ended with signal SIGKILL")

    monkeypatch.setattr(dist, operation, lost)
    monkeypatch.setattr(TorchGroup, "new_group", lambda self, ranks: None)
    cpu = torch.device("cpu")
    pipeline = TorchPipeline(0, 2, TorchGroup(0, 2, cpu, check), cpu)
    with pytest.raises(WorkerFailedError, match="rank 3 ended"):
        pipeline.send(torch.ones(1, 2)) if operation == "isend" else pipeline.expect((1, 2), torch.float32)


@pytest.mark.slow
def test_stages_of_two_ranks_pass_steps_on_and_return_them_in_order(tmp_path):
    ranks = results_of(PIPELINE, 4, tmp_path)
    returned = [[2.0 * step + 10] * (3 * step) for step in range(6)]
    assert [of_rank[0] for of_rank in ranks] == [returned, returned, [], []]
    assert [of_rank[1:] for of_rank in ranks] == [
        [[1.0], [[0], [1]], [0], 4],
        [[1.0], [], [0], 4],
        [[5.0], [[2], [3]], [2], 4],
        [[5.0], [], [2], 4],
    ]
