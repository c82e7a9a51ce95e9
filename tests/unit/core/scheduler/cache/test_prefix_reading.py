"""How the scheduler reads beginnings of requests from the prefix cache file; `Engine` checks what each row reads."""

import numpy as np
import pytest
from support.stand_in_engine import BLOCK, Engine

from vllm_mp.core.scheduler.cache.seal_table import SealTable

PROMPT = list(range(1, 43))
NUM_FULL = 10


class StandInFile:
    """Has blocks by hash, as `PrefixReader` does; each takes a millisecond to read."""

    def __init__(self):
        self.engine = None
        self.blocks = {}
        self.damaged = set()
        self.used = []
        self.now = 0.0
        self.num_blocks_read = 0

    def clock(self):
        return self.now

    def has(self, digest):
        return digest in self.blocks

    def expect(self, digests):
        assert set(digests) <= set(self.blocks)

    def read(self, digest, block):
        self.now += 0.001
        if digest in self.damaged:
            del self.blocks[digest]
            return False
        self.engine.contents[block] = self.blocks[digest]
        self.num_blocks_read += 1
        return True

    def note_used(self, digests):
        self.used.append(list(digests))

    def clear(self):
        self.blocks.clear()


@pytest.fixture
def file():
    """A file that has the full blocks of `PROMPT`."""
    found, first = StandInFile(), Engine()
    request = first.add(0, prompt=PROMPT, max_tokens=1)
    first.run()
    for index in range(NUM_FULL):
        found.blocks[request.hashes[index + 1]] = PROMPT[: (index + 1) * BLOCK]
    found.hashes = request.hashes[1 : NUM_FULL + 1]
    return found


def engine_with(file, **options):
    file.engine = Engine(file=file, **options)
    return file.engine


def test_beginning_in_the_file_is_not_computed(file):
    engine = engine_with(file)
    request = engine.add(0, prompt=PROMPT)
    step = engine.step()
    assert step.counts.tolist() == [len(PROMPT) - NUM_FULL * BLOCK]
    assert request.num_cached_tokens == NUM_FULL * BLOCK
    assert file.used == [file.hashes]
    engine.run()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_last_token_of_a_prompt_of_full_blocks_is_computed(file):
    engine = engine_with(file)
    engine.add(0, prompt=PROMPT[: NUM_FULL * BLOCK])
    assert engine.step().counts.tolist() == [BLOCK]


def test_only_what_the_pool_lacks_is_read(file):
    engine = engine_with(file)
    engine.add(0, prompt=PROMPT[: 3 * BLOCK + 1], max_tokens=1)
    engine.run()
    assert file.num_blocks_read == 3
    engine.add(1, prompt=PROMPT, max_tokens=1)
    engine.run()
    assert file.num_blocks_read == NUM_FULL
    engine.add(2, prompt=PROMPT, max_tokens=1)
    engine.run()
    assert file.num_blocks_read == NUM_FULL


def test_running_requests_go_on_while_a_beginning_is_read(file):
    engine = engine_with(file)
    engine.add(0, max_tokens=20)
    engine.step()
    engine.add(1, prompt=PROMPT)
    sizes, reads = [], []
    while 1 not in engine.outputs:
        sizes.append(engine.step().counts.tolist())
        reads.append(file.num_blocks_read)
    assert reads == [5, NUM_FULL]
    assert sizes == [[1], [1, len(PROMPT) - NUM_FULL * BLOCK]]


def test_damaged_block_and_those_after_it_are_computed(file):
    file.damaged.add(file.hashes[4])
    engine = engine_with(file)
    engine.add(0, prompt=PROMPT, max_tokens=1)
    sizes = []
    while (step := engine.step()) is not None:
        sizes.append(int(step.counts.sum()))
    assert sum(sizes) == len(PROMPT) - 4 * BLOCK


def test_request_that_may_not_read_the_cache_or_has_another_salt_reads_no_file(file):
    engine = engine_with(file)
    engine.add(0, prompt=PROMPT, reads_cache=False)
    engine.add(1, prompt=PROMPT, salt="another")
    engine.add(2, prompt=PROMPT, salt=None)
    engine.run()
    assert file.num_blocks_read == 0


def test_nothing_is_read_without_room_for_the_request(file):
    engine = engine_with(file, num_blocks=14)
    engine.add(0, num_prompt_tokens=30, max_tokens=4)
    engine.step()
    engine.add(1, prompt=PROMPT, max_tokens=4)
    engine.step()
    assert file.num_blocks_read == 0
    engine.run()
    assert file.num_blocks_read == NUM_FULL
    assert len(engine.outputs[1]) == 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_blocks_that_were_read_are_evicted_and_read_again(file, ahead):
    engine = engine_with(file, num_blocks=14, ahead=ahead)
    for slot in range(6):
        engine.add(slot, prompt=PROMPT if slot % 2 else None, num_prompt_tokens=40, max_tokens=8)
    engine.run()
    assert file.num_blocks_read >= 2 * NUM_FULL
    assert all(len(engine.outputs[slot]) == 8 for slot in range(6))


def test_reset_empties_the_file_and_sleep_does_not(file):
    engine = engine_with(file)
    engine.sleep.sleep(1)
    engine.settle_sleep()
    engine.sleep.wake_up()
    engine.settle_sleep()
    assert len(file.blocks) == NUM_FULL
    engine.cache.forget_prefixes()
    assert file.blocks == {}


def test_block_that_was_read_is_in_the_table_of_the_next_core(file):
    memory = bytearray(SealTable.num_bytes(101, BLOCK))
    engine = engine_with(file, table=SealTable(memory, 101, BLOCK))
    engine.add(0, prompt=PROMPT, max_tokens=1)
    engine.run()
    found = {each.digest: each.tokens for each in SealTable(memory, 101, BLOCK).found() if each.digest}
    for index, digest in enumerate(file.hashes):
        assert np.array_equal(found[digest], PROMPT[index * BLOCK : (index + 1) * BLOCK])
