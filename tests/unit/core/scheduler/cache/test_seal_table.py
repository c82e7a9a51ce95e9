"""The table that outlives a core: wherever the core dies, its successor finds what was computed, and nothing else."""

import copy
import itertools
from functools import partial

import numpy as np
import pytest
from support.drafts import draft_known_answers
from support.stand_in_engine import BLOCK, Engine

from vllm_mp.config import SpeculativeConfig
from vllm_mp.core.scheduler.cache.block_pool import chain_hash, root_hash
from vllm_mp.core.scheduler.cache.seal_table import NO_TOKEN, SealTable

NUM_BLOCKS = 30
SALTS = ("", "tenant")


class Killed(BaseException):
    """The core dies here."""


class Watched(np.ndarray):
    """An array whose elements are stored one after the other, with a call before each."""

    def __setitem__(self, key, value):
        if isinstance(key, slice) or not hasattr(self, "before_store"):
            super().__setitem__(key, value)
            return
        keys = np.broadcast_arrays(*key) if isinstance(key, tuple) else [key]
        values = np.broadcast_to(value, np.shape(self.view(np.ndarray)[key]))
        for at, each in enumerate(zip(*keys, strict=True)):
            self.before_store()
            super().__setitem__(each, values[at])


def watched_table(memory, before_store):
    table = SealTable(memory, NUM_BLOCKS + 1, BLOCK)
    for name in ("_words", "_ages", "_before", "_digests", "_tokens", "_ends"):
        array = getattr(table, name).view(Watched)
        array.before_store = before_store
        setattr(table, name, array)
    return table


def new_memory():
    return bytearray(SealTable.num_bytes(NUM_BLOCKS + 1, BLOCK))


def check_entries(memory, contents):
    """Check that each entry of the table names what the model has written to the block."""
    for found in SealTable(memory, NUM_BLOCKS + 1, BLOCK).found():
        written = contents[found.block]
        start = (len(written) - 1) // BLOCK * BLOCK
        tokens = found.tokens.tolist()
        assert tokens == written[start : start + len(tokens)]
        before = [root_hash(salt) for salt in SALTS]
        for at in range(0, start, BLOCK):
            before = [chain_hash(each, np.array(written[at : at + BLOCK], np.int32).tobytes()) for each in before]
        assert found.before in before
        if found.digest is not None:
            assert found.digest == chain_hash(found.before, np.array(tokens, np.int32).tobytes())


REQUESTS = {
    0: ([7] * 9, 6, ""),
    1: ([7] * 8 + [8, 9], 7, ""),
    2: ([8] * 5, 3, "tenant"),
    3: ([7] * 13, 5, "tenant"),
}
"""(prompt, number of output tokens, salt) by slot."""


def token_of(slot, position):
    return 20 + (5 * slot + 3 * position) % 11


def add_requests(engine, outputs, ends):
    for slot, (prompt, max_tokens, salt) in REQUESTS.items():
        if slot not in ends:
            engine.add(
                slot, prompt=prompt, max_tokens=max_tokens, salt=salt, output=outputs.get(slot, ()), ignore_eos=True
            )


class Life:
    """The life of a core that runs all requests, and dies before the event with the number `dies_at`.

    It is the first core, or goes on with what the core of the life `former` has left.
    """

    def __init__(self, ahead, dies_at=None, former=None, speculation=None):
        self.num_events = 0
        self.dies_at = dies_at
        self.memory, self.contents = new_memory(), {}
        if former is not None:
            self.memory, self.contents = bytearray(former.memory), copy.deepcopy(former.contents)
        self.engine = Engine(
            NUM_BLOCKS,
            3,
            budget=7,
            ahead=ahead,
            table=watched_table(self.memory, self.event),
            contents=self.contents,
            speculation=speculation,
        )
        if speculation is not None:
            answers = (
                (prompt, map(partial(token_of, slot), range(num_tokens)))
                for slot, (prompt, num_tokens, _) in REQUESTS.items()
            )
            draft_known_answers(self.engine.scheduler, answers)
        self.noted = {} if former is None else dict(former.noted)
        """Number of tokens by slot whose steps are complete and noted."""
        note_computed = self.engine.cache.note_computed

        def note(pending, failed):
            note_computed(pending, failed)
            self.noted |= zip(self.engine.batch.slot[pending.step.rows].tolist(), pending.ends.tolist(), strict=True)

        self.engine.cache.note_computed = note
        if former is not None:
            self.engine.outputs, self.engine.ends = copy.deepcopy((former.engine.outputs, former.engine.ends))
        add_requests(self.engine, copy.deepcopy(self.engine.outputs), self.engine.ends)
        try:
            while self.engine.step(token_of) is not None:
                self.event()
        except Killed:
            pass

    def event(self):
        """Check what a core would find that followed now."""
        check_entries(self.memory, self.contents)
        self.num_events += 1
        if self.num_events == self.dies_at:
            raise Killed


def check_successor(life):
    """Let a successor complete the requests; check outputs, and that it computes again only the interrupted steps."""
    engine = Engine(
        NUM_BLOCKS,
        4,
        budget=50,
        table=SealTable(life.memory, NUM_BLOCKS + 1, BLOCK),
        contents=life.contents,
    )
    engine.outputs, engine.ends = dict(life.engine.outputs), dict(life.engine.ends)
    add_requests(engine, life.engine.outputs, life.engine.ends)
    num_computed = dict.fromkeys(REQUESTS, 0)
    while (step := engine.step(token_of)) is not None:
        for row, count in zip(engine.batch.slot[step.rows].tolist(), step.counts.tolist(), strict=True):
            num_computed[row] += count
        check_entries(life.memory, life.contents)
    for slot, (prompt, max_tokens, _) in REQUESTS.items():
        assert engine.outputs[slot] == [token_of(slot, position) for position in range(max_tokens)]
        if slot not in life.engine.ends:
            known = len(prompt) + len(life.engine.outputs.get(slot, ()))
            left = len(prompt) + max_tokens - 1 - min(life.noted.get(slot, 0), known - 1)
            assert num_computed[slot] <= left
    assert engine.pool.num_free == engine.pool.num_blocks


@pytest.mark.parametrize("ahead", [0, 1])
def test_successor_computes_only_what_was_interrupted_wherever_the_core_dies(ahead):
    num_events = Life(ahead).num_events
    assert num_events > 150
    # An odd distance meets each kind of store.
    for dies_at in range(1, num_events + 1, 7):
        check_successor(Life(ahead, dies_at))


def test_successor_never_finds_rejected_drafts_wherever_the_core_dies():
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=1)
    life = Life(0, speculation=speculation)
    counters = life.engine.scheduler.drafting.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    for dies_at in range(1, life.num_events + 1, 3):
        check_successor(Life(0, dies_at, speculation=speculation))


@pytest.mark.extended
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_successor_computes_only_what_was_interrupted_before_each_single_store(ahead):
    for dies_at in range(1, Life(ahead).num_events + 1):
        check_successor(Life(ahead, dies_at))


@pytest.mark.extended
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_third_core_computes_only_what_was_interrupted_before_each_single_store_of_the_second(ahead):
    """The second core takes over blocks that were not full, and writes on in them."""
    num_events = Life(ahead).num_events
    for first_dies_at in (num_events // 3, 2 * num_events // 3):
        first = Life(ahead, first_dies_at)
        for dies_at in range(1, Life(ahead, former=first).num_events + 1):
            check_successor(Life(ahead, dies_at, first))


def test_damaged_entry_is_never_found():
    memory = bytearray(SealTable.num_bytes(5, BLOCK))
    table = SealTable(memory, 5, BLOCK)
    root = root_hash("")
    table.note_before(np.array([3]), [root])
    table.note_tokens(np.array([3, 3]), np.array([0, 1]), np.array([7, 8], np.int32))
    table.seal(np.array([3]), np.array([2]))
    [found] = table.found()
    assert (found.block, found.before, found.tokens.tolist(), found.digest) == (3, root, [7, 8], None)
    for bit in range(8 * len(memory)):
        memory[bit // 8] ^= 1 << bit % 8
        for each in SealTable(memory, 5, BLOCK).found():
            is_same = (each.block, each.before, each.digest) == (3, root, None)
            assert not is_same or len(each.tokens) == 2
        memory[bit // 8] ^= 1 << bit % 8


def test_blocks_are_evicted_in_the_order_of_their_last_use():
    memory = new_memory()
    table = SealTable(memory, NUM_BLOCKS + 1, BLOCK)
    for block in (5, 3, 9):
        table.begin_step()
        table.note_tokens(np.array([block]), np.array([0]), block)
        table.seal(np.array([block]), 1)
    engine = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK))
    order = engine.pool.allocate(NUM_BLOCKS).tolist()
    assert order[-3:] == [5, 3, 9]
    assert len(table.found()) == 0


def test_blocks_in_use_outlive_younger_ones_in_the_successor():
    """A request that continues finds its prefix, which an equal request computed before all other blocks."""
    memory, prompt = new_memory(), [7] * 9
    first = Engine(12, table=SealTable(memory, 13, BLOCK))
    first.add(0, prompt=prompt, max_tokens=1)
    first.run()
    first.add(1, prompt=prompt, max_tokens=50)
    for token in range(20, 26):
        first.add(token, prompt=[token] * 9, max_tokens=1)
        first.step(30)
    assert set(first.outputs) - set(first.ends) == {1}
    second = Engine(12, table=SealTable(memory, 13, BLOCK), contents=first.contents)
    second.add(3, prompt=[27] * 15, max_tokens=1)
    second.outputs[1] = first.outputs[1]
    second.add(1, prompt=prompt, max_tokens=50, output=first.outputs[1])
    assert sorted(second.step(30).counts.tolist()) == [1, 15]


def test_ends_of_uses_continue_in_the_successor():
    memory = new_memory()
    for prompt in ([7] * 9, [8] * 9):
        engine = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK))
        engine.add(0, prompt=prompt, max_tokens=1)
        engine.run()
    found = [each.tokens.tolist() for each in SealTable(memory, NUM_BLOCKS + 1, BLOCK).found()]
    # The beginning of each prompt is evicted last.
    assert found == [[7], [7] * 4, [7] * 4, [8], [8] * 4, [8] * 4]


def test_prefixes_that_were_forgotten_are_not_found_by_the_successor():
    life = Life(0, dies_at=120)
    life.engine.cache.forget_prefixes()
    assert len(SealTable(life.memory, NUM_BLOCKS + 1, BLOCK).found()) == 0


def test_embeddings_are_described_by_the_hash_of_a_full_block_alone():
    memory = new_memory()
    table = SealTable(memory, NUM_BLOCKS + 1, BLOCK)
    table.note_before(np.array([1]), [root_hash("")])
    table.note_full(np.array([1]), [root_hash("x")])
    table.note_tokens(np.full(BLOCK, 1), np.arange(BLOCK), NO_TOKEN)
    table.seal(np.array([1]), BLOCK)
    pool = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK)).pool
    assert pool.find([root_hash("x")]) == [1]
    assert pool.find_begun(root_hash(""), np.zeros(3, np.int32))[1] == 0


def test_only_one_of_two_requests_takes_the_block_that_both_have_begun():
    memory = new_memory()
    first = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK))
    first.add(0, prompt=[7, 7], max_tokens=5)
    first.step(9)
    second = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK), contents=first.contents)
    for slot in (0, 1):
        second.outputs[slot] = [9]
        second.add(slot, prompt=[7, 7], max_tokens=5, output=[9])
    step = second.step(9)
    assert step.counts.tolist() == [1, 2]
    blocks = [second.batch.block_table[row, 0] for row in step.rows]
    assert len(set(itertools.chain(blocks))) == 2
    second.run(9)
    assert second.outputs == {0: [9] * 5, 1: [9] * 5}


def test_request_takes_its_own_block_and_not_that_of_an_equal_one_that_is_further():
    memory = new_memory()
    table = SealTable(memory, NUM_BLOCKS + 1, BLOCK)
    blocks = {3: [7, 8, 9], 5: [7, 8], 6: [7, 8, 9, 9]}
    for block, tokens in blocks.items():
        table.note_before(np.array([block]), [root_hash("")])
        table.note_tokens(np.full(len(tokens), block), np.arange(len(tokens)), np.array(tokens, np.int32))
        table.seal(np.array([block]), len(tokens))
    pool = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK)).pool
    for block, tokens in blocks.items():
        assert pool.find_begun(root_hash(""), np.array(tokens, np.int32)) == (block, len(tokens))


def test_request_that_goes_on_otherwise_than_a_block_takes_only_what_is_equal_from_it():
    memory = new_memory()
    first = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK))
    first.add(0, prompt=[7, 7, 8, 8, 9], max_tokens=1)
    first.run()
    second = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK), contents=first.contents)
    second.add(0, prompt=[7, 7, 8, 9, 9], max_tokens=2)
    step = second.scheduler.schedule()
    assert step.counts.tolist() == [2]
    # What the block held before must not be found while the step writes to it.
    [found] = [each for each in SealTable(memory, NUM_BLOCKS + 1, BLOCK).found() if each.before == root_hash("")]
    assert found.tokens.tolist() == [7, 7, 8]
