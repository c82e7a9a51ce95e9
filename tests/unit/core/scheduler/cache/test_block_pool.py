import weakref

import numpy as np
import pytest

from vllm_mp.core.scheduler.cache.block_pool import BlockPool
from vllm_mp.core.scheduler.cache.seal_table import SealTable


def test_each_block_is_allocated_once_and_the_padding_block_never():
    pool = BlockPool(8)
    blocks = np.concatenate([pool.allocate(3), pool.allocate(4)])
    assert sorted(blocks.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_freed_blocks_can_be_allocated_again():
    pool = BlockPool(5)
    first = pool.allocate(4)
    pool.free(first[:2])
    assert pool.num_free == 2
    assert set(pool.allocate(2).tolist()) == set(first[:2].tolist())


def test_freeing_a_block_twice_or_the_padding_block_raises():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="free already"):
        pool.free(blocks)
    with pytest.raises(RuntimeError):
        pool.free(np.array([0], np.int32))


def test_allocating_more_blocks_than_are_free_raises():
    with pytest.raises(RuntimeError, match="cannot allocate 4 blocks: 3 are free"):
        BlockPool(4).allocate(4)


def test_registered_block_is_found_until_it_is_allocated_again():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.register(int(blocks[0]), b"one")
    pool.register(int(blocks[1]), b"two")
    pool.free(blocks)
    assert pool.find([b"one", b"two", b"three"]) == blocks.tolist()
    assert pool.num_free == 3
    pool.allocate(1)
    pool.allocate(1)
    assert pool.find([b"one", b"two"]) == [blocks[0]], "the beginning of a prefix is evicted last"


def test_shared_block_is_free_after_its_last_user_frees_it():
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.register(int(blocks[0]), b"one")
    pool.share(pool.find([b"one"]))
    pool.free(blocks)
    assert pool.num_free == 1
    assert pool.num_free_among(blocks.tolist()) == 0
    pool.free(blocks)
    assert pool.num_free == 2
    with pytest.raises(RuntimeError, match="free already"):
        pool.free(blocks)


def test_first_of_two_blocks_with_the_same_hash_is_found():
    pool = BlockPool(4)
    first, second = pool.allocate(2).tolist()
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find([b"same"]) == [first]
    pool.forget_all()
    assert pool.find([b"same"]) == []


def adopted(*blocks):
    """Return a pool of five blocks that has found `blocks` of an earlier core, with these tokens, from block 1 on."""
    memory = bytearray(SealTable.num_bytes(6, 4))
    table = SealTable(memory, 6, 4)
    for block, tokens in enumerate(blocks, 1):
        one, count = np.array([block], np.int32), len(tokens)
        table.begin_step()
        table.note_before(one, [b"b" * 32])
        table.note_tokens(one.repeat(count), np.arange(count), np.array(tokens, np.int32))
        table.seal(one, count)
    table = SealTable(memory, 6, 4)
    pool = BlockPool(6, table)
    pool.adopt(table.found())
    return pool


def find_begun(pool, *tokens):
    return pool.find_begun(b"b" * 32, np.array(tokens, np.int32))


def test_begun_block_is_the_one_with_most_of_the_tokens_and_then_with_the_fewest_others():
    pool = adopted([1], [1, 2, 9], [1, 2], [1, 3, 4])
    assert find_begun(pool, 1, 2, 5) == (3, 2)
    assert find_begun(pool, 1, 3, 4, 5, 6) == (4, 3)
    assert find_begun(pool, 1) == (1, 1)
    assert find_begun(pool, 2, 2) == (0, 0)
    assert find_begun(pool) == (0, 0)
    pool.take_begun(3, 2)
    assert find_begun(pool, 1, 2, 5) == (2, 2), "a block in use is not given to another"
    assert pool.find_begun(b"c" * 32, np.array([1], np.int32)) == (0, 0)


def test_begun_block_is_no_longer_found_once_it_is_allocated_again():
    pool = adopted([1, 2], [3, 4])
    pool.allocate(4)
    assert find_begun(pool, 1, 2) == (0, 0)
    assert find_begun(pool, 3, 4) == (2, 2)


@pytest.mark.parametrize("way", ["allocated", "forgotten"])
def test_nothing_is_kept_of_the_blocks_of_an_earlier_core_that_cannot_be_found_any_more(way):
    pool = adopted([1, 2], [3, 4])
    found = weakref.ref(pool._found)
    if way == "allocated":
        pool.allocate(5)
    else:
        pool.forget_all()
    assert found() is None
    assert find_begun(pool, 1, 2) == (0, 0)
    assert pool.num_found == 2, "it says what was found at the start"
