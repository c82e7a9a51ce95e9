"""The memory that outlives a core: what a successor finds in it, and who may use it."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_mp.core.worker.memory import kept_memory as module
from vllm_mp.core.worker.memory.kept_memory import KeptMemory, kept_memory, map_early
from vllm_mp.core_link.core_launch import KeptCache

SHAPES = [((2, 8), (2, 4))] * 3
BLOCK = 4
IDENTITY = ("model", torch.bfloat16, SHAPES)


@pytest.fixture
def descriptor():
    found = os.memfd_create("test")
    yield found
    os.close(found)


def first_core(descriptor, num_blocks=6):
    """Let a core fill its caches and note a block."""
    memory = KeptMemory(descriptor, adopts=False)
    assert memory.num_blocks(BLOCK, IDENTITY) == 0
    for layer, (keys, values) in enumerate(memory.caches(num_blocks, SHAPES, torch.bfloat16)):
        keys.fill_(layer)
        values.fill_(10 + layer)
    table = memory.table()
    table.note_tokens(np.array([2]), np.array([0]), 7)
    table.seal(np.array([2]), 1)
    return memory


def in_another_process(target, *args):
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_successor_finds_caches_and_table_of_a_core_of_the_same_model_and_layout(descriptor):
    in_another_process(first_core, descriptor)
    memory = KeptMemory(descriptor, adopts=True)
    assert memory.num_blocks(BLOCK, IDENTITY) == 6
    caches = memory.caches(6, SHAPES, torch.bfloat16)
    for layer, (keys, values) in enumerate(caches):
        assert (keys.shape, values.shape) == ((6, BLOCK, 2, 8), (6, BLOCK, 2, 4))
        assert (keys == layer).all()
        assert (values == 10 + layer).all()
    assert [found.tokens.tolist() for found in memory.table().found()] == [[7]]


def test_file_of_a_core_that_serves_is_mapped_before_the_turn_of_its_successor(descriptor, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    first = KeptMemory(descriptor, adopts=False)
    first.num_blocks(BLOCK, IDENTITY)
    caches = first.caches(10_000, SHAPES, torch.bfloat16)
    caches[0][0][:500].fill_(3)  # 64,000 bytes
    num_blocks_of_disk = os.fstat(descriptor).st_blocks
    early = map_early(descriptor)
    early.map_pages()
    assert os.fstat(descriptor).st_blocks == num_blocks_of_disk, "pages that the core does not use take no memory"
    assert 64 <= resident_kib(early) <= 1024
    with pytest.raises(BlockingIOError):
        KeptMemory(descriptor, adopts=True, early=map_early(descriptor))
    first.unlock()
    memory = KeptMemory(descriptor, adopts=True, early=early)
    assert memory.num_blocks(BLOCK, IDENTITY) == 10_000
    [keys, *_], *_ = memory.caches(10_000, SHAPES, torch.bfloat16)
    assert (keys[:500] == 3).all()
    begin = np.frombuffer(early.memory, np.uint8).ctypes.data
    assert begin <= keys.data_ptr() < begin + len(early.memory), "the same map is used"


def test_pages_that_the_core_has_filled_since_are_mapped_before_the_turn_of_its_successor(descriptor, monkeypatch):
    monkeypatch.setattr(module, "_NEW_BYTES", 2**20)
    first = KeptMemory(descriptor, adopts=False)
    first.num_blocks(BLOCK, IDENTITY)
    [keys, *_], *_ = first.caches(10_000, SHAPES, torch.bfloat16)
    early = map_early(descriptor)
    early.map_new_pages()
    assert resident_kib(early) == 0
    keys[:9000].fill_(3)  # 1,152,000 bytes
    early.map_new_pages()
    assert resident_kib(early) >= 1024
    keys.fill_(3)
    resident = resident_kib(early)
    early.map_new_pages()
    assert resident_kib(early) == resident, "128,000 bytes are too few for another look"


def test_pages_are_mapped_beside_the_start_until_the_file_is_emptied(descriptor):
    in_another_process(first_core, descriptor)
    size = os.fstat(descriptor).st_size
    early, late = map_early(descriptor), map_early(descriptor)
    calls = []
    early.map_pages_beside(lambda: calls.append(resident_kib(early)))
    while not resident_kib(early):
        pass
    assert calls == [0]
    late.stop()
    late.map_pages_beside(lambda: None)
    memory = KeptMemory(descriptor, adopts=False, early=early)
    os.ftruncate(descriptor, size)
    late.map_pages()
    assert resident_kib(late) == 0
    assert os.fstat(descriptor).st_blocks == 0, "nothing is written to a file that was emptied"
    assert memory.num_blocks(BLOCK, IDENTITY) == 0


def resident_kib(early):
    """Return how much of the map this process can read without a page fault, in KiB."""
    resident = [line for line in smaps_of(early.memory) if line.startswith("Rss:")]
    return int(resident[0].split()[1])


def smaps_of(memory):
    """Return what the system tells of the map that `memory` is."""
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{begin:x}-"))
    return lines[at + 1 : at + 24]


@pytest.mark.parametrize("adopts", [True, False])
def test_memory_of_another_model_or_that_is_not_trusted_is_given_back(descriptor, adopts):
    in_another_process(first_core, descriptor)
    memory = KeptMemory(descriptor, adopts)
    assert memory.num_blocks(BLOCK, ("another model", *IDENTITY[1:]) if adopts else IDENTITY) == 0
    assert os.fstat(descriptor).st_size == 0
    memory.caches(3, SHAPES, torch.bfloat16)
    assert len(memory.table().found()) == 0


@pytest.mark.parametrize("offset", [0, 70])
def test_damaged_header_is_none(descriptor, offset):
    in_another_process(first_core, descriptor)
    [byte] = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    assert KeptMemory(descriptor, adopts=True).num_blocks(BLOCK, IDENTITY) == 0


def test_released_caches_take_no_memory_and_the_table_stays(descriptor):
    memory = first_core(descriptor)
    before = os.fstat(descriptor).st_blocks
    table = memory.table()
    memory.release()
    assert os.fstat(descriptor).st_blocks < before
    assert [found.tokens.tolist() for found in table.found()] == [[7]]
    for keys, _ in memory.caches(6, SHAPES, torch.bfloat16):
        assert (keys == 0).all()


def stay(descriptor, is_ready):
    first_core(descriptor)
    is_ready.set()
    signal.pause()


def test_successor_waits_for_the_end_of_a_killed_core_and_goes_without_one_that_stays(descriptor, monkeypatch, caplog):
    context = multiprocessing.get_context("fork")
    is_ready = context.Event()
    process = context.Process(target=stay, args=(descriptor, is_ready))
    process.start()
    is_ready.wait()
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.05)
    assert kept_memory(KeptCache(descriptors=[descriptor], adopts=True), 0, torch.device("cpu")) is None
    assert "prompts are read again" in caplog.text
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 20.0)
    process.kill()
    found = kept_memory(KeptCache(descriptors=[descriptor], adopts=True), 0, torch.device("cpu"))
    assert found is not None
    assert found.num_blocks(BLOCK, IDENTITY) == 6
    process.join()


def test_core_without_a_file_does_without():
    assert kept_memory(None, 0, torch.device("cpu")) is None
