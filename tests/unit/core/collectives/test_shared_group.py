"""Sums, gathers and broadcasts through shared memory, with threads as ranks."""

import mmap
import os

import pytest
import torch
from support.rank_threads import make_groups, run_ranks

from vllm_mp.core.collectives.shared_group import SLOT_BYTES, SharedMemoryGroup, num_bytes, rounds


def part_of(rank, shape, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 7), (0, 8), (3, SLOT_BYTES // 8 + 5)], ids=["small", "empty", "rounds"])
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_get_the_same_sum(size, shape, dtype):
    parts = [part_of(rank, shape, dtype) for rank in range(size)]
    results = run_ranks(make_groups(size), lambda rank, group: group.sum(parts[rank].clone()))
    expected = torch.stack(parts).sum(0)
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], expected)


def test_results_stay_what_they_are_while_later_rounds_run():
    def run(rank, group):
        return [group.sum(torch.full((4,), float(rank + step))) for step in range(50)]

    for results in run_ranks(make_groups(3), run):
        assert [int(result[0]) for result in results] == [3 + 3 * step for step in range(50)]


def test_rank_0_gathers_the_parts_of_all_ranks_in_order():
    parts = [part_of(rank, (5, SLOT_BYTES // 16), torch.float32) for rank in range(3)]
    first, *others = run_ranks(make_groups(3), lambda rank, group: group.gather(parts[rank]))
    assert all(torch.equal(found, part) for found, part in zip(first, parts, strict=True))
    assert others == [[], []]


def test_all_ranks_get_the_tensor_of_rank_0():
    parts = [part_of(rank, (3, 9), torch.float32) for rank in range(3)]
    for result in run_ranks(make_groups(3), lambda rank, group: group.broadcast(parts[rank].clone())):
        assert torch.equal(result, parts[0])


def test_all_ranks_get_the_smallest_number():
    assert run_ranks(make_groups(3), lambda rank, group: group.minimum(2**40 - rank)) == [2**40 - 2] * 3


def test_rank_that_waits_checks_the_others():
    def check():
        raise RuntimeError("rank 1 has ended")

    memory = mmap.mmap(-1, num_bytes(2))
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        SharedMemoryGroup(memory, 0, 0, 2, check).sum(torch.ones(1))
    assert rounds(memory, 0, 2) == [1, 0], "rank 1 is the one behind"


def test_counters_may_overflow():
    memory = mmap.mmap(-1, num_bytes(2))
    for rank in range(2):
        memory[rank * 64 : rank * 64 + 4] = (2**32 - 3).to_bytes(4, "little")
    results = run_ranks(make_groups(2, memory), lambda rank, group: [int(group.sum(torch.ones(1))) for _ in range(8)])
    assert results == [[2] * 8] * 2
    assert rounds(memory, 0, 2) == [5, 5]


def test_group_of_processes_sums():
    memory = mmap.mmap(-1, num_bytes(2))
    child = os.fork()
    if not child:
        SharedMemoryGroup(memory, 0, 1, 2).minimum(3)
        os._exit(0)
    assert SharedMemoryGroup(memory, 0, 0, 2).minimum(5) == 3
    assert os.waitpid(child, 0)[1] == 0
