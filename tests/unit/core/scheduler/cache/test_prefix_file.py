"""The prefix cache file: what is written to it, what is found in it, and what damage to it costs."""

import errno
import os

import numpy as np
import pytest
import torch

from vllm_mp.core.scheduler.cache.file_header import HEADER_BYTES
from vllm_mp.core.scheduler.cache.prefix_file import CHECK_BYTES, PrefixFile
from vllm_mp.core.scheduler.cache.prefix_reader import PrefixReader
from vllm_mp.core.scheduler.cache.prefix_writer import _IDLE_PAUSE_S as IDLE
from vllm_mp.core.scheduler.cache.prefix_writer import PrefixWriter
from vllm_mp.core.scheduler.cache.seal_table import HASH_BYTES
from vllm_mp.core.worker.memory import kept_memory
from vllm_mp.core.worker.memory.kept_memory import KeptMemory

SHAPES = [((2, 8), (2, 4))] * 3
BLOCK = 4
SLOT_BYTES = 2 * BLOCK * 2 * (8 + 4) * 3
ROW_BYTES = 2 * HASH_BYTES + CHECK_BYTES
NUM_BLOCKS = 8
LATER = 2.0
"""Seconds after which a copied block is an entry."""


def bytes_for(num_slots):
    return HEADER_BYTES + 4096 + num_slots * (SLOT_BYTES + ROW_BYTES + 8)


def digest_of(number):
    return number.to_bytes(HASH_BYTES, "big")


class Core:
    """The memory and the file of a core, and the writer beside it; the content of a block is its number."""

    def __init__(self, memory, file, num_slots=5, identity="model", adopts=False):
        self.memory, self.file, self.now = memory, file, 100.0
        self.kept = KeptMemory(memory, adopts, file)
        num_blocks = self.kept.num_blocks(BLOCK, [identity]) or NUM_BLOCKS
        self.caches = self.kept.caches(num_blocks, SHAPES, torch.bfloat16)
        self.table = self.kept.table()
        self.reader = self.kept.prefix_reader(bytes_for(num_slots), lambda: None)
        self.writer = PrefixWriter(memory, file, self.clock)

    def clock(self):
        return self.now

    def fill(self, block, number, before=0):
        """Let `block` hold the content `number`, under the hash of this number, after the content `before`."""
        one = np.array([block], np.int32)
        self.table.forget(one)
        for part in [part for layer in self.caches for part in layer]:
            part[block] = number
        self.table.begin_step()
        self.table.note_before(one, [digest_of(before)])
        self.table.note_full(one, [digest_of(number)])
        self.table.seal(one, BLOCK)

    def write(self, seconds=LATER):
        """Let the writer copy what is new, and make entries of it `seconds` later."""
        self.writer.turn()
        self.now += seconds
        self.writer.turn()

    def found(self, numbers=range(1, 40)):
        """Return which contents another core finds in the file, after checking each."""
        reader = opened(self.file, self)
        return {number for number in numbers if holds(self, reader, number)}

    def end(self):
        """Give the lock of the memory back, as the end of a process does."""
        del self.caches, self.table, self.reader
        self.kept._map = None
        os.close(self.kept._descriptor)


def opened(file, core):
    """Return a reader of the file that knows only what is in the file, and reads into the memory of `core`."""
    another = PrefixFile(file)
    another.load()
    return PrefixReader(another, core.reader._views)


def holds(core, reader, number, block=7):
    digest = digest_of(number)
    if not (reader.has(digest) and reader.read(digest, block)):
        return False
    assert all((part[block] == number).all() for layer in core.caches for part in layer)
    return True


@pytest.fixture
def descriptors(tmp_path):
    memory = os.memfd_create("test")
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield memory, file
    os.close(memory)
    os.close(file)


@pytest.fixture
def core(descriptors):
    return Core(*descriptors)


def flip(descriptor, offset):
    [byte] = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte ^ 4]), offset)


def test_full_blocks_are_found_after_a_while_and_by_the_next_core(core, descriptors):
    core.fill(1, 11)
    core.fill(3, 13)
    core.table.seal(np.array([4]), BLOCK - 1)
    core.writer.turn()
    assert core.found() == set()  # the core may be dying of what it has written to the wrong address
    core.now += LATER
    core.writer.turn()
    assert core.found() == {11, 13}
    core.end()
    assert Core(*descriptors).found() == {11, 13}


def test_last_turn_makes_entries_at_once(core):
    core.fill(1, 11)
    core.writer.turn(is_last=True)
    assert core.found() == {11}


def test_last_turn_replaces_what_was_just_copied_by_what_is_newer(core):
    for number in range(1, 6):
        core.fill(number, 10 + number)
    core.writer.turn()
    for number in range(1, 4):
        core.fill(number, 20 + number)
    core.writer.turn(is_last=True)
    assert core.found() >= {21, 22, 23}


def test_newest_prompt_is_written_before_the_rest_of_an_older_one(core):
    for number, before in ((1, 0), (2, 1), (11, 0), (12, 11), (13, 12)):
        core.fill(number % 10 + number // 10, number, before)
    core.writer.turn()
    core.fill(5, 14, before=13)
    core.fill(6, 21)
    core.fill(7, 22, before=21)
    core.writer.turn(is_last=True)
    assert core.found() == {11, 12, 13, 21, 22}


def test_blocks_of_memory_that_is_not_trusted_any_more_are_not_found(core):
    core.fill(1, 11)
    core.writer.turn()
    os.pwrite(core.memory, bytes(64), 0)
    core.now += LATER
    core.writer.turn(is_last=True)
    assert core.found() == set()


def test_blocks_are_found_that_were_copied_while_a_next_core_took_over_the_memory(core, monkeypatch):
    core.fill(1, 11)
    core.writer.turn()
    copy, whole = core.writer._copy, os.pread(core.memory, HEADER_BYTES, 0)

    def copy_meanwhile(*args):
        copy(*args)
        os.pwrite(core.memory, bytes(HEADER_BYTES), 0)

    core.fill(2, 12, before=11)
    monkeypatch.setattr(core.writer, "_copy", copy_meanwhile)
    core.writer.turn()
    monkeypatch.undo()
    os.pwrite(core.memory, whole, 0)
    core.write()
    assert core.found() == {11, 12}


def test_nothing_is_found_of_memory_that_loses_its_trust_in_the_last_turn(core, monkeypatch):
    core.fill(1, 11)
    read = core.writer._read

    def read_last(block, content):
        os.pwrite(core.memory, bytes(64), 0)
        return read(block, content)

    monkeypatch.setattr(core.writer, "_read", read_last)
    core.writer.turn(is_last=True)
    assert core.found() == set()


def test_block_that_is_given_away_while_it_is_copied_is_not_found(core, monkeypatch):
    core.fill(1, 11)
    core.fill(2, 12)
    read = core.writer._read

    def read_late(block, content):
        is_read = read(block, content)
        if block == 1:
            core.fill(1, 21)
        return is_read

    monkeypatch.setattr(core.writer, "_read", read_late)
    core.writer.turn()
    monkeypatch.undo()
    core.now += LATER
    core.writer.turn()
    assert core.found() == {12}
    core.write()
    assert core.found() == {12, 21}


def test_memory_that_was_given_back_is_not_copied(core):
    core.fill(1, 11)
    core.kept.release()
    core.write()
    assert core.found() == set()


def test_file_keeps_its_size_and_the_blocks_that_were_used_last(core):
    for number in range(1, 6):
        core.fill(number, number)
    core.write()
    assert core.found() == {1, 2, 3, 4, 5}
    core.reader.has(b"")
    core.reader._file.load()
    core.reader.note_used([digest_of(1), digest_of(2), digest_of(4)])
    size = os.fstat(core.file).st_size
    assert size <= bytes_for(5)
    core.fill(6, 6)
    core.fill(7, 7)
    core.write()
    assert core.found() == {1, 2, 4, 6, 7}
    assert os.fstat(core.file).st_size == size


def test_ends_of_prompts_are_replaced_before_their_beginnings(core):
    core.fill(1, 1)
    core.fill(2, 2, before=1)
    core.write()
    core.fill(3, 3, before=2)
    core.write()
    core.fill(4, 14)
    core.fill(5, 15, before=14)
    core.write()
    core.fill(6, 4, before=3)
    core.write()  # goes on with the first prompt
    assert core.found() == {1, 2, 3, 4, 14}
    core.fill(7, 16)
    core.fill(5, 17, before=16)
    core.write()
    assert core.found() == {1, 2, 3, 16, 17}


def test_entries_that_lead_into_a_circle_are_written(core):
    core.fill(1, 1)
    core.write()
    file, entries = core.writer._file, {}
    for number in (2, 3):
        content = torch.full((SLOT_BYTES // 2,), number, dtype=torch.bfloat16).view(torch.uint8).numpy()
        entries[number] = file.write(number, digest_of(5 - number), digest_of(number), content.data)
    file.add(entries)
    assert core.found() == {1, 2, 3}


def test_blocks_that_precede_one_another_end_no_turn(core):
    core.fill(1, 1, before=2)
    core.fill(2, 2, before=1)
    core.fill(3, 3)
    core.write()
    assert core.found() == {3}


def test_newest_blocks_are_kept_if_more_are_new_than_there_is_room_for(core):
    for number in range(1, 8):
        core.fill(number, number)
    core.write()
    assert core.found() == {3, 4, 5, 6, 7}
    core.write()
    assert core.found() == {3, 4, 5, 6, 7}


@pytest.mark.parametrize("at_once", [False, True])
def test_beginning_is_kept_of_a_prompt_longer_than_the_file(core, at_once):
    for number in range(1, 8):
        core.fill(8 - number, number, before=number - 1)
        if not at_once:
            core.write()
    core.write()
    assert core.found() == {1, 2, 3, 4, 5}
    core.fill(7, 21)
    core.write()
    assert core.found() == {1, 2, 3, 4, 21}
    assert core.writer.turn() == IDLE


def test_block_comes_after_the_one_that_precedes_it_if_both_are_of_one_step(core):
    core.fill(1, 3, before=2)
    core.fill(2, 2, before=1)
    core.fill(3, 1)
    core.table._ages[1:4] = 1
    core.write()
    assert core.found() == {1, 2, 3}


@pytest.mark.parametrize("change", [{"identity": "another"}, {"num_slots": 6}])
def test_file_of_another_model_or_size_is_emptied(core, descriptors, change, caplog):
    caplog.set_level("INFO")
    core.fill(1, 11)
    core.write()
    core.end()
    another = Core(*descriptors, **change)
    assert "it is emptied" in caplog.text
    assert another.found() == set()
    another.fill(1, 12)
    another.write()
    assert another.found() == {12}


def test_file_of_other_code_is_emptied(core, descriptors, monkeypatch):
    core.fill(1, 11)
    core.write()
    core.end()
    monkeypatch.setattr(kept_memory, "code_digest", lambda: "other code")
    assert Core(*descriptors).found() == set()


def test_every_flipped_bit_costs_a_block_at_most_and_is_never_served(core, descriptors):
    core.fill(1, 11)
    core.fill(2, 12)
    core.write()
    intact = os.pread(core.file, os.fstat(core.file).st_size, 0)
    header = core.writer._file.header
    served = []
    places = [*range(0, 300, 7), *range(HEADER_BYTES, HEADER_BYTES + 2 * ROW_BYTES), header.times_at]
    places += range(header.slots_at, header.slots_at + 2 * SLOT_BYTES, 13)
    for place in places:
        flip(core.file, place)
        served.append(core.found())  # which checks each content
        os.pwrite(core.file, intact, 0)
    assert {11, 12} in served
    assert {11} in served
    assert {12} in served
    assert set() in served


def test_file_that_is_cut_off_anywhere_is_used_as_far_as_it_is_whole(core):
    core.fill(1, 11)
    core.fill(2, 12)
    core.write()
    intact = os.pread(core.file, os.fstat(core.file).st_size, 0)
    for size in [0, 10, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 50, len(intact) - SLOT_BYTES, len(intact) - 1]:
        os.ftruncate(core.file, size)
        assert core.found() <= {11, 12}
        os.pwrite(core.file, intact, 0)
    assert core.found() == {11, 12}


class End(BaseException):
    """The process ends."""


@pytest.mark.parametrize("writes_half", [False, True])
def test_whole_blocks_alone_are_found_after_an_end_before_any_single_write(descriptors, monkeypatch, writes_half):
    real, done, ends_at, has_ended = os.pwrite, 0, 0, True

    def pwrite(descriptor, data, offset):
        nonlocal done
        done += 1
        if done == ends_at:
            if writes_half:
                real(descriptor, bytes(data)[: len(data) // 2], offset)
            raise End
        return real(descriptor, data, offset)

    while has_ended:
        for descriptor in descriptors:
            os.ftruncate(descriptor, 0)
        core = Core(*descriptors, num_slots=3)
        done, ends_at, has_ended = 0, ends_at + 1, False
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            try:
                for number in range(1, 7):
                    core.fill(number, number)
                    core.write()
            except End:
                has_ended = True
        found = core.found()  # which checks each content
        assert len(found) <= 3
        core.end()
        if has_ended:
            successor = Core(*descriptors, num_slots=3)
            successor.fill(1, 7)
            successor.write()
            assert 7 in successor.found()
            successor.end()
    assert found == {4, 5, 6}
    assert ends_at > 20


@pytest.mark.parametrize("is_cleared", [False, True])
def test_entries_have_their_room_on_the_disk_before_blocks_fill_it(is_cleared, descriptors):
    core = Core(*descriptors, num_slots=10_000)
    if is_cleared:
        core.reader.clear()
    found = os.fstat(core.file)
    assert found.st_blocks * 512 >= found.st_size >= 10_000 * (ROW_BYTES + 8)


def test_full_disk_keeps_what_is_there_and_replaces_it_without_growing(core, monkeypatch, caplog):
    for number in (1, 2):
        core.fill(number, number)
    core.write()
    size, real = os.fstat(core.file).st_size, os.pwrite

    def pwrite(descriptor, data, offset):
        room = size - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, "no space left")
        return real(descriptor, bytes(data)[:room], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    core.fill(3, 3)
    core.write()
    core.write()
    assert core.found() == {2, 3}
    core.fill(4, 4, before=3)
    core.write()
    assert core.found() == {3, 4}
    core.fill(5, 5, before=4)
    core.write()
    assert core.found() == {3, 4}  # what precedes a block is not replaced by it
    assert core.writer.turn() == IDLE
    assert caplog.text.count("does not grow") == 1
    monkeypatch.undo()
    core.now += 100
    core.fill(6, 6)
    core.write()
    assert core.found() == {3, 4, 6}


def test_nothing_is_found_after_a_reset_whatever_was_being_written(core):
    core.fill(1, 11)
    core.write()
    core.fill(2, 12)
    core.writer.turn()
    core.table.clear()
    core.reader.clear()
    core.now += LATER
    core.writer.turn(is_last=True)
    assert core.found() == set()
    core.fill(3, 13)
    core.write()
    assert core.found() == {13}


def test_entry_that_was_written_before_a_reset_is_not_valid_after_it(core):
    core.fill(1, 11)
    core.write()
    row = os.pread(core.file, ROW_BYTES, HEADER_BYTES)
    content = os.pread(core.file, SLOT_BYTES, core.writer._file.header.slots_at)
    core.reader.clear()
    os.pwrite(core.file, row, HEADER_BYTES)
    os.pwrite(core.file, content, core.writer._file.header.slots_at)
    assert core.found() == set()


def test_abandoned_file_is_empty_and_is_not_written(core):
    core.fill(1, 11)
    core.write()
    core.kept.forget_model()
    core.fill(2, 12)
    core.write()
    assert os.fstat(core.file).st_size == 0
    assert not core.reader.has(digest_of(11))


def test_core_learns_of_blocks_that_were_written_since(core):
    core.fill(1, 11)
    core.write()
    assert not core.reader.has(digest_of(11))
    core.reader._refresh_at = 0.0
    assert holds(core, core.reader, 11)


def test_block_that_was_replaced_in_the_meantime_is_not_served_and_not_removed(core):
    for number in range(1, 6):
        core.fill(number, number)
    core.write()
    reader = opened(core.file, core)
    core.fill(6, 6)
    core.write()
    assert [number for number in range(1, 6) if not holds(core, reader, number)] == [1]
    assert core.found() == {2, 3, 4, 5, 6}


def test_damaged_block_is_removed_and_written_again(core, caplog):
    core.fill(1, 11)
    core.write()
    flip(core.file, core.writer._file.header.slots_at + 3)
    assert core.found() == set()
    assert "damaged" in caplog.text
    core.fill(2, 11)
    core.write()
    assert core.found() == {11}


def test_error_of_the_disk_ends_the_use_of_the_file(core, monkeypatch, caplog):
    core.fill(1, 11)
    core.write()
    reader = opened(core.file, core)

    def fail(*_):
        raise OSError(errno.EIO, "the disk has failed")

    monkeypatch.setattr(os, "preadv", fail)
    assert reader.has(digest_of(11))
    assert not reader.read(digest_of(11), 7)
    monkeypatch.undo()
    assert not reader.has(digest_of(11))
    assert caplog.text.count("is not used any more") == 1


def test_size_without_room_for_a_block_is_refused(core):
    with pytest.raises(ValueError, match="prefix_cache_file_bytes=20000 is too small"):
        core.kept.prefix_reader(20_000, lambda: None)


def test_successor_in_the_same_memory_is_written_on(core, descriptors):
    core.fill(1, 11)
    core.writer.turn()
    core.end()
    successor = Core(*descriptors, adopts=True)
    core.now += LATER
    core.writer.turn()
    assert successor.found() == {11}
    successor.fill(2, 12)
    core.writer.turn(is_last=True)
    assert successor.found() == {11, 12}
