"""Weights that lie in small pages are moved to huge ones between steps, and stay what they are."""

import contextlib
import os
import threading

import pytest
import torch

from vllm_mp.core.pages import weight_pages
from vllm_mp.core.pages.mapping import HUGE_PAGE_BYTES
from vllm_mp.core.pages.weight_pages import map_weights, move_weights_later
from vllm_mp.machine.host_memory import HostMemory

NUM_BYTES = 3 * HUGE_PAGE_BYTES + 5000
DEADLINE_S = 20


class Alone:
    """What the core gives the thread: the number of times that it was alone, and `before` each of them."""

    def __init__(self, before=lambda: True):
        self.count = 0
        self._before = before

    @contextlib.contextmanager
    def __call__(self):
        self.count += 1
        yield self._before()


@pytest.fixture(autouse=True)
def small_pieces_at_once(monkeypatch):
    monkeypatch.setattr(weight_pages, "_DELAY_S", 0.0)
    monkeypatch.setattr(weight_pages, "_PIECE_BYTES", HUGE_PAGE_BYTES)
    monkeypatch.setattr(weight_pages, "_mappings", [])


@pytest.fixture
def file():
    """A file in memory, in small pages, with random bytes."""
    descriptor = os.memfd_create("weights")
    os.write(descriptor, os.urandom(NUM_BYTES))
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def weights(file):
    return map_weights(file, NUM_BYTES)


def move(alone):
    """Have the weights moved, and wait until that is done."""
    others = set(threading.enumerate())
    move_weights_later(alone)
    for thread in set(threading.enumerate()) - others:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def is_of_the_file(weights, byte=0):
    address = weights.data_ptr() + byte
    with open("/proc/self/maps") as maps:
        for line in maps:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return "memfd:weights" in line
    raise AssertionError("it is not mapped")


def test_weights_stay_the_same_at_the_same_place_and_no_longer_belong_to_the_file(weights):
    before, address, alone = weights.clone(), weights.data_ptr(), Alone()
    move(alone)
    if alone.count == 0:
        pytest.skip("this system gives no huge pages")
    assert torch.equal(weights, before)
    assert weights.data_ptr() == address
    assert not is_of_the_file(weights)
    assert not is_of_the_file(weights, 2 * HUGE_PAGE_BYTES)
    assert is_of_the_file(weights, 3 * HUGE_PAGE_BYTES), "what fills no huge page stays"
    assert alone.count == 3
    move(alone)
    assert alone.count == 3, "they were moved already"


def test_what_is_written_before_a_piece_is_moved_is_not_lost(weights):
    def write():
        weights[::4096] = 5
        return True

    move(Alone(write))
    assert (weights[::4096] == 5).all()


def test_nothing_is_moved_after_the_core_stops_or_the_weights_were_given_up(file):
    kept = [map_weights(file, NUM_BYTES)]
    stops = Alone(lambda: False)
    move(stops)
    assert is_of_the_file(kept[0])
    weight_pages._mappings.clear()
    kept[0] = map_weights(file, NUM_BYTES)
    given_up = Alone(lambda: kept.clear() or True)
    move(given_up)
    assert stops.count == given_up.count <= 1


@pytest.mark.parametrize("reason", ["little memory", "switched off"])
def test_weights_stay_in_the_file_without_room_or_if_that_is_switched_off(reason, weights, monkeypatch):
    if reason == "little memory":
        little = HostMemory(total=100 * NUM_BYTES, available=26 * NUM_BYTES, group_limit=None)
        monkeypatch.setattr("vllm_mp.kernels.cpu.packed.host_memory", lambda: little)
    else:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    alone = Alone()
    move(alone)
    assert alone.count == 0
    assert is_of_the_file(weights)


@pytest.mark.parametrize(
    ("field", "huge_kib", "is_moved"),
    [
        ("FilePmdMapped", 3900, False),
        ("AnonHugePages", 3900, False),
        ("FilePmdMapped", 2048, True),
    ],
)
def test_weights_stay_where_the_pages_that_were_read_are_huge(
    field, huge_kib, is_moved, weights, tmp_path, monkeypatch
):
    kib = {"Size": NUM_BYTES // 1024, "Rss": 4000, "AnonHugePages": 0, "FilePmdMapped": 0, field: huge_kib}
    smaps = tmp_path / "smaps"
    begin = weights.data_ptr()
    lines = [f"{address:x}-{address + NUM_BYTES:x} rw-p 00000000 00:01 7  memfd:weights" for address in (4096, begin)]
    fields = "".join(f"{name}: {value:8} kB\n" for name, value in kib.items()) + "VmFlags: rd wr mr mw me\n"
    smaps.write_text(f"{lines[0]}\n{fields.replace(str(huge_kib), '1')}{lines[1]}\n{fields}")
    monkeypatch.setattr(weight_pages, "_SMAPS", smaps)
    alone = Alone()
    move(alone)
    if is_moved and alone.count == 0:
        pytest.skip("this system gives no huge pages")
    assert (alone.count > 0) == is_moved
