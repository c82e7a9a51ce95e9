"""The turns of adapters at the slots of the device, with a stand-in for the model."""

import random

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.scheduler.request import NO_ROW
from vllm_mp.core.scheduler.waiting.adapter_turns import AdapterTurns


class StandInMemory:
    """Host memory that holds each adapter at once, or when the test says so."""

    def __init__(self, num_ahead=1, loads_at_once=True):
        self.num_ahead = num_ahead
        self.is_busy = False
        self.loads_at_once = loads_at_once
        self.loading = []
        """The adapters whose load was begun and has not ended, in order."""

    def load(self, adapter):
        if self.loads_at_once:
            adapter.weights = adapter.name
        elif adapter not in self.loading:
            self.loading.append(adapter)

    def end_load(self, adapter):
        self.loading.remove(adapter)
        adapter.weights = adapter.name

    def release(self, adapter):
        pass


class AdapterEngine(Engine):
    """A scheduler whose requests have adapters; it checks that each step finds its adapters in the slots."""

    def __init__(self, num_slots=2, num_ahead=1, loads_at_once=True, **options):
        self.adapter_memory = StandInMemory(num_ahead, loads_at_once)
        self.slots = {}
        """The name of the adapter in each slot."""
        self.num_copies = 0
        """Number of copies of an adapter into a slot."""
        self.num_slots = num_slots
        super().__init__(adapters=AdapterTurns(num_slots, self.adapter_memory, self._copy), **options)

    def adapter(self, number):
        return CachedAdapter(id=number, name=f"adapter {number}", path="/", number=number)

    def launch(self, step, token, failing):
        requests = [self.batch.request(row) for row in step.rows.tolist()]
        for row, request in zip(step.rows.tolist(), requests, strict=True):
            if request.adapter is not None:
                assert self.slots[self.batch.adapter_slot[row]] == request.adapter.name
        assert len({request.adapter for request in requests} - {None}) <= self.num_slots
        super().launch(step, token, failing)

    def _copy(self, slot, weights):
        running = {self.batch.adapter_slot[row] for row in self.batch.order.tolist()}
        assert slot not in running, "no running request loses its adapter"
        self.slots[slot] = weights
        self.num_copies += 1


def test_requests_of_the_base_model_and_of_several_adapters_share_a_step():
    engine = AdapterEngine(num_slots=2)
    first, second = engine.adapter(1), engine.adapter(2)
    for slot, adapter in enumerate((None, first, second, first)):
        engine.add(slot, adapter=adapter)
    engine.step()
    assert len(engine.batch) == 4
    engine.run()
    assert engine.ends == dict.fromkeys(range(4), "length")


def test_request_whose_adapter_finds_no_slot_is_passed_over_by_those_that_can_run():
    engine = AdapterEngine(num_slots=1)
    first, second = engine.adapter(1), engine.adapter(2)
    engine.add(0, adapter=first, max_tokens=20)
    engine.step()
    passed_over = engine.add(1, adapter=second)
    engine.add(2)
    engine.step()
    assert passed_over.row == NO_ROW
    assert len(engine.batch) == 2, "the base model does not wait"
    engine.run()
    assert list(engine.ends) == [2, 0, 1]


def test_adapter_with_endless_requests_keeps_no_other_adapter_waiting():
    engine = AdapterEngine(num_slots=1, max_num_seqs=2)
    busy, other = engine.adapter(1), engine.adapter(2)
    for slot in range(4):
        engine.add(slot, adapter=busy, max_tokens=2)
    engine.step()
    engine.add(1000, adapter=other, max_tokens=2)
    slot = 4
    while 1000 not in engine.ends:
        engine.add(slot, adapter=busy, max_tokens=2)
        engine.step()
        slot += 1
        assert slot < 60, "the other adapter waits for a bounded number of requests"
    engine.run()
    assert len(engine.ends) == slot + 1


def test_hundred_adapters_take_turns_at_two_slots_and_all_requests_end():
    engine = AdapterEngine(num_slots=2, num_ahead=2)
    adapters = [engine.adapter(number) for number in range(1, 101)]
    for slot in range(300):
        engine.add(slot, adapter=adapters[slot % 100], max_tokens=3)
    engine.run()
    assert engine.ends == dict.fromkeys(range(300), "length")
    assert engine.num_copies <= 110, "the requests of an adapter run together"


def test_adapter_stays_in_its_slot_until_another_needs_it():
    engine = AdapterEngine(num_slots=2)
    first, second, third = (engine.adapter(number) for number in (1, 2, 3))
    for slot, adapter in enumerate((first, second, first, second)):
        engine.add(slot, adapter=adapter)
        engine.run()
    assert engine.num_copies == 2
    engine.add(4, adapter=first)
    engine.run()
    engine.add(5, adapter=third)
    engine.run()
    assert set(engine.slots.values()) == {first.name, third.name}, "the least recently used adapter gives way"


def test_pinned_adapter_keeps_its_slot():
    engine = AdapterEngine(num_slots=2)
    pinned, *others = (engine.adapter(number) for number in range(1, 6))
    engine.add(0, adapter=pinned)
    engine.run()
    pinned.is_pinned = True
    for slot, adapter in enumerate(others, 1):
        engine.add(slot, adapter=adapter)
    engine.run()
    assert pinned.slot >= 0
    assert engine.slots[pinned.slot] == pinned.name
    assert len(engine.ends) == 5


@pytest.mark.parametrize("num_slots", [1, 2])
def test_pinned_adapters_give_way_to_one_that_was_replaced_until_its_requests_have_ended(num_slots):
    engine = AdapterEngine(num_slots=num_slots, max_num_seqs=2)
    former, *pinned = (engine.adapter(number) for number in range(1, 2 + num_slots))
    for slot in range(50):
        engine.add(slot, adapter=former, max_tokens=2)
    engine.step()
    former.is_current = False
    for slot, adapter in enumerate(pinned, 50):
        adapter.is_pinned = True
        engine.add(slot, adapter=adapter, max_tokens=40)
    engine.run()
    assert engine.ends == dict.fromkeys(range(50 + num_slots), "length")
    engine.add(100, adapter=pinned[0])
    engine.add(101, adapter=engine.adapter(9))
    for _ in range(20):
        engine.step()
    assert engine.ends.get(100) == "length"
    assert pinned[0].slot >= 0


def test_adapter_that_was_replaced_and_is_only_in_its_slot_keeps_that_until_its_requests_have_ended():
    engine = AdapterEngine(num_slots=1, max_num_seqs=2)
    former, other = engine.adapter(1), engine.adapter(2)
    for slot in range(40):
        engine.add(slot, adapter=former, max_tokens=2)
    engine.step()
    former.is_current, former.weights = False, None
    engine.add(40, adapter=other)
    engine.run()
    assert list(engine.ends)[-1] == 40
    assert engine.num_copies == 2


def test_suspect_whose_adapter_was_replaced_runs_though_all_slots_are_pinned():
    engine = AdapterEngine(num_slots=1)
    former, pinned = engine.adapter(1), engine.adapter(2)
    pinned.is_pinned, former.is_current = True, False
    engine.add(0, adapter=pinned, max_tokens=20)
    engine.step()
    engine.add(1, adapter=former, isolate_until_num_tokens=1)
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}


def test_requests_wait_for_the_load_of_their_adapter_alone_and_without_work():
    engine = AdapterEngine(num_slots=2, num_ahead=4, loads_at_once=False)
    slow, fast = engine.adapter(1), engine.adapter(2)
    engine.add(0, adapter=slow)
    assert engine.step() is None
    assert not engine.scheduler.has_work, "a core that waits for a disk blocks"
    assert engine.scheduler.has_parked
    engine.add(1, adapter=fast)
    engine.add(2)
    engine.run()
    assert set(engine.ends) == {2}
    engine.adapter_memory.end_load(fast)
    engine.run()
    assert set(engine.ends) == {1, 2}
    engine.adapter_memory.end_load(slow)
    engine.run()
    assert set(engine.ends) == {0, 1, 2}


def test_requests_end_with_an_error_if_their_adapter_cannot_be_loaded():
    engine = AdapterEngine(loads_at_once=False)
    broken = engine.adapter(1)
    for slot in range(3):
        engine.add(slot, adapter=broken)
    engine.add(3)
    engine.step()
    engine.end(engine.scheduler.fail_adapter(broken, "no such folder"))
    engine.run()
    assert engine.ends == {0: "error", 1: "error", 2: "error", 3: "length"}
    assert not engine.scheduler.has_parked


@pytest.mark.parametrize("state", ["parked", "waiting", "running"])
def test_abort_gives_back_what_a_request_with_an_adapter_has(state):
    engine = AdapterEngine(num_slots=1, max_num_seqs=1)
    first, second = engine.adapter(1), engine.adapter(2)
    for slot, adapter in enumerate((first, first, second)):
        engine.add(slot, adapter=adapter, max_tokens=4)
    engine.step()
    slot = {"running": 0, "waiting": 1, "parked": 2}[state]
    engine.end([(0, engine.scheduler.abort(0, slot))])
    engine.run()
    assert engine.ends.pop(slot) == "abort"
    assert set(engine.ends.values()) == {"length"}
    assert not first.requests
    assert not second.requests
    assert first.num_rows == second.num_rows == 0


def test_preempted_request_continues_with_its_adapter():
    engine = AdapterEngine(num_slots=2, num_blocks=8, max_num_seqs=4, max_model_len=32)
    adapters = [engine.adapter(number) for number in (1, 2, 3)]
    for slot in range(6):
        engine.add(slot, num_prompt_tokens=4, max_tokens=20, adapter=adapters[slot % 3])
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.outputs[slot] == [7] * 20 for slot in range(6))


def test_same_prompt_shares_blocks_with_the_same_adapter_only():
    engine = AdapterEngine(num_slots=2)
    first, second = engine.adapter(1), engine.adapter(2)
    cached = {}
    for slot, adapter in enumerate((None, first, second, first, None)):
        request = engine.add(slot, prompt=range(20), adapter=adapter)
        engine.run()
        cached[slot] = request.num_cached_tokens
    assert cached == {0: 0, 1: 0, 2: 0, 3: 16, 4: 16}


def test_priority_decides_which_adapter_gets_the_slot_and_who_keeps_it():
    engine = AdapterEngine(num_slots=1, max_num_seqs=1, policy="priority", num_ahead=3)
    adapters = [engine.adapter(number) for number in (1, 2, 3)]
    engine.add(0, adapter=adapters[0], priority=5)
    engine.step()
    engine.add(1, adapter=adapters[1], priority=9)
    engine.add(2, adapter=adapters[2], priority=1)
    engine.run()
    assert list(engine.ends) == [0, 2, 1]
    for slot in range(3, 40):
        engine.add(slot, adapter=adapters[0], priority=1, max_tokens=1)
    engine.add(40, adapter=adapters[1], priority=2, max_tokens=1)
    engine.run()
    assert list(engine.ends)[-1] == 40, "an adapter with requests of a higher priority is not closed"


def test_client_with_many_adapters_delays_the_adapter_of_another_client_by_a_few_turns():
    engine = AdapterEngine(num_slots=1, max_num_seqs=2)
    for slot in range(50):
        engine.add(slot, adapter=engine.adapter(slot + 1), max_tokens=2, client=1)
    engine.step()
    engine.add(1000, adapter=engine.adapter(1000), max_tokens=2, client=2)
    while 1000 not in engine.ends:
        engine.step()
    assert len(engine.ends) <= 5
    engine.run()
    assert len(engine.ends) == 51


def test_suspects_with_more_adapters_than_slots_run_past_the_step_of_the_death():
    engine = AdapterEngine(num_slots=1, loads_at_once=False)
    others = [engine.adapter(number) for number in (1, 2)]
    for slot in (0, 1):
        engine.add(slot, adapter=others[0], max_tokens=6)
    engine.step()
    engine.adapter_memory.end_load(others[0])
    engine.step()
    suspects = [engine.adapter(number) for number in (3, 4)]
    for slot, adapter in enumerate(suspects, 2):
        engine.add(slot, adapter=adapter, max_tokens=6, isolate_until_num_tokens=1, isolation_group=9)
    for _ in range(40):
        engine.step()
        for adapter in list(engine.adapter_memory.loading):
            engine.adapter_memory.end_load(adapter)
    assert engine.ends == dict.fromkeys(range(4), "length")


def test_requests_held_by_a_pause_wait_for_their_adapter_after_it():
    engine = AdapterEngine(num_slots=1)
    engine.pause_for("keep", clears_cache=False)
    engine.add(0, adapter=engine.adapter(1))
    assert engine.step() is None
    engine.pause.resume()
    engine.run()
    assert engine.ends == {0: "length"}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_end_whatever_their_adapters(seed, ahead):
    chance = random.Random(seed)
    engine = AdapterEngine(
        num_slots=chance.choice((1, 2, 3)), num_ahead=2, num_blocks=24, max_num_seqs=5, ahead=ahead, loads_at_once=False
    )
    adapters = [None, *(engine.adapter(number) for number in range(1, 8))]
    live = []
    for slot in range(150):
        adapter = chance.choice(adapters)
        isolated = chance.random() < 0.1
        engine.add(
            slot,
            num_prompt_tokens=chance.randint(1, 20),
            max_tokens=chance.randint(1, 12),
            adapter=adapter,
            client=slot % 3,
            isolate_until_num_tokens=int(isolated),
        )
        live.append((slot % 3, slot))
        if chance.random() < 0.1:
            client, aborted = live.pop(chance.randrange(len(live)))
            end = engine.scheduler.abort(client, aborted)
            if end is not None:
                engine.end([(client, end)])
        for adapter in list(engine.adapter_memory.loading):
            if chance.random() < 0.3:
                engine.adapter_memory.end_load(adapter)
        engine.step()
    for _ in range(3000):
        for adapter in list(engine.adapter_memory.loading):
            engine.adapter_memory.end_load(adapter)
        engine.step()
        if len(engine.ends) == 150:
            break
    assert len(engine.ends) == 150
    assert engine.pool.num_free == 24
