"""Tensors pass from one rank to another in order; the writer waits for room, the reader for a tensor."""

import mmap
import threading

import pytest
import torch

from vllm_mp.core.collectives.tensor_queue import TensorQueue

SIZES = (4, 2**12)


def make_queue(memory=None, **options):
    return TensorQueue(memory or mmap.mmap(-1, TensorQueue.num_bytes(*SIZES)), 0, *SIZES, **options)


def fail():
    raise RuntimeError("the other rank has ended")


@pytest.mark.parametrize("spins", [False, True])
def test_tensors_arrive_in_order_and_stay_what_they_are(spins):
    memory = mmap.mmap(-1, TensorQueue.num_bytes(*SIZES))
    writer, reader = make_queue(memory, spins=spins), make_queue(memory, spins=spins)
    sent = [torch.full((n % 4, 5), float(n), dtype=(torch.float32, torch.bfloat16)[n % 2]) for n in range(40)]
    thread = threading.Thread(target=lambda: [writer.put(x) for x in sent])
    thread.start()
    taken = [reader.take(x.shape, x.dtype) for x in sent]
    thread.join()
    assert all(torch.equal(own, wanted) for own, wanted in zip(taken, sent, strict=True))
    assert TensorQueue.written(memory, 0) == len(sent)


def test_rank_that_waits_checks_the_other():
    queue = make_queue(check=fail)
    with pytest.raises(RuntimeError, match="has ended"):
        queue.take((1, 1), torch.float32)
    for _ in range(SIZES[0]):
        queue.put(torch.ones(1, 1))
    with pytest.raises(RuntimeError, match="has ended"):
        queue.put(torch.ones(1, 1))


def test_numbers_may_overflow():
    memory = mmap.mmap(-1, TensorQueue.num_bytes(*SIZES))
    for at in (0, 64):
        memory[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    queue = make_queue(memory, check=fail)
    for n in range(8):
        queue.put(torch.full((1, 1), float(n)))
        if n:  # one stays in the queue
            assert int(queue.take((1, 1), torch.float32)) == n - 1
