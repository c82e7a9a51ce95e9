"""How steps are shared between requests, and how long requests wait, counted in steps."""

import random
from collections import Counter

import pytest
from support.stand_in_engine import BLOCK, Engine

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import NO_ROW
from vllm_mp.core.scheduler.room import Room

BUDGET, MAX_SEQS, LENGTH = 16, 6, 64
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(1, 4))]


class Load:
    """Requests that arrive at random times, and a record of what happens to each."""

    def __init__(self, monkeypatch, seed, num_requests=60, **config):
        self.random = random.Random(seed)
        self.engine = Engine(
            **{"num_blocks": 40, "max_num_seqs": MAX_SEQS, "budget": BUDGET, "max_model_len": LENGTH, **config}
        )
        self.requests = []
        self.num_requests = num_requests
        self.num_steps = 0
        self.first_token_at = {}
        """Number of the step that computed the first token, by slot."""
        self.num_preempted = Counter()
        self.step = None
        load, preempt, add = self, Room.preempt, Batch.add

        def watch_preempt(room, request):
            batch = load.engine.batch
            running = [batch.request(row).order for row in batch.order.tolist()]
            assert request.order == max(running), "the last in order is preempted"
            load.num_preempted[request.slot] += 1
            preempt(room, request)

        def watch_add(batch, request, *blocks):
            waiting = [other.order for other in load.requests if other.row == NO_ROW and not load.has_ended(other)]
            assert request.order == min(waiting), "the first in order is admitted"
            return add(batch, request, *blocks)

        monkeypatch.setattr(Room, "preempt", watch_preempt)
        monkeypatch.setattr(Batch, "add", watch_add)

    def has_ended(self, request):
        return request.slot in self.engine.ends

    def arrive(self, **options):
        request = self.engine.add(len(self.requests), **options)
        self.requests.append(request)
        return request

    def steps(self):
        """Add requests and run steps until all requests have ended.

        Yield after each step the requests that were in decode before it, and the preemptions and the numbers of output
        tokens before it.
        """
        while True:
            while len(self.requests) < self.num_requests and self.random.random() < 0.4:
                self.arrive(
                    num_prompt_tokens=self.random.choice([1, 3, 9, 30, 50]),
                    max_tokens=self.random.choice([1, 5, 20, 60]),
                    priority=self.random.randrange(-2, 3),
                    salt=self.random.choice(["", None]),
                )
            batch = self.engine.batch
            decoding = [
                request
                for request in self.requests
                if request.row != NO_ROW and batch.num_tokens[request.row] - batch.num_computed_tokens[request.row] == 1
            ]
            before = self.num_preempted.copy(), {slot: len(output) for slot, output in self.engine.outputs.items()}
            self.step = self.engine.step()
            self.num_steps += 1
            assert self.num_steps < 10_000
            if self.step is None and len(self.requests) == self.num_requests:
                return
            for slot in self.engine.outputs:
                self.first_token_at.setdefault(slot, self.num_steps)
            yield decoding, *before

    def run(self):
        for _ in self.steps():
            pass


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_no_step_exceeds_its_budget_and_every_decode_gets_a_token_unless_preempted(monkeypatch, seed, policy):
    load = Load(monkeypatch, seed, policy=policy, num_blocks=24, max_num_partial_prefills=1 + seed % 3)
    for decoding, preempted, num_outputs in load.steps():
        if load.step is None:
            continue
        assert load.step.counts.sum() <= BUDGET
        for request in decoding:
            if load.num_preempted[request.slot] == preempted[request.slot]:
                assert len(load.engine.outputs[request.slot]) == num_outputs.get(request.slot, 0) + 1
    assert load.num_preempted.total() > 0
    assert len(load.engine.ends) == load.num_requests


@pytest.mark.parametrize("seed", SEEDS)
def test_first_tokens_come_in_order_of_arrival(monkeypatch, seed):
    load = Load(monkeypatch, seed, num_blocks=24)
    load.run()
    times = [load.first_token_at[slot] for slot in range(load.num_requests)]
    assert times == sorted(times)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_number_of_preemptions_is_bounded(monkeypatch, seed, policy):
    """The cache holds just one request of the greatest length, and six requests run at a time."""
    load = Load(monkeypatch, seed, policy=policy, num_blocks=LENGTH // BLOCK)
    load.run()
    assert max(load.num_preempted.values()) <= 4
    assert load.num_preempted.total() <= load.num_requests // 2
    assert len(load.engine.ends) == load.num_requests


def steps_until_first_token(engine, slot, arrive=lambda: None):
    """Return the number of steps until the request in `slot` has its first token; call `arrive` before each step."""
    num_steps = 0
    while slot not in engine.outputs:
        arrive()
        engine.step()
        num_steps += 1
        assert num_steps < 1000
    return num_steps


def short_requests(engine, first_slot):
    """Return a function that adds one more short request, in the next slot."""
    slots = iter(range(first_slot, 1000))
    return lambda: engine.add(next(slots), num_prompt_tokens=4, max_tokens=3)


def test_long_prompt_is_not_delayed_by_a_stream_of_short_prompts():
    engine = Engine(budget=16, max_num_seqs=6, num_blocks=40)
    arrive = short_requests(engine, 1)
    for _ in range(10):
        arrive()
        engine.step()
    engine.add(0, num_prompt_tokens=60)
    assert steps_until_first_token(engine, 0, arrive) <= -(-60 // (16 - 5)), (
        "at most five other requests decode beside it"
    )


def test_short_prompt_waits_for_an_earlier_long_prompt_unless_two_prefills_may_run():
    for most, steps in ((1, 200 // 8 + 1), (2, 1)):
        engine = Engine(budget=8, max_model_len=256, max_num_partial_prefills=most)
        engine.add(0, num_prompt_tokens=200)
        engine.step()
        engine.add(1, num_prompt_tokens=4)
        assert steps_until_first_token(engine, 1) <= steps
        engine.run()


def test_number_of_partial_prefills_is_limited():
    for most in (1, 2, 3):
        engine = Engine(budget=6, max_num_seqs=8, max_num_partial_prefills=most)
        for slot in range(8):
            engine.add(slot, num_prompt_tokens=40, max_tokens=2)
        seen = set()
        while engine.step() is not None:
            rows = engine.batch.order
            seen.add(int((engine.batch.num_computed_tokens[rows] < engine.batch.num_prompt_tokens[rows]).sum()))
        assert max(seen) == most


def test_request_that_needs_the_whole_cache_runs_among_small_requests():
    engine = Engine(budget=16, max_num_seqs=6, num_blocks=16)
    arrive = short_requests(engine, 1)
    for _ in range(10):
        arrive()
        engine.step()
    engine.add(0, num_prompt_tokens=60, max_tokens=4)
    assert steps_until_first_token(engine, 0, arrive) <= 3 + 60 // 16 + 1, (
        "requests before it end, then its prompt is computed"
    )
    for _ in range(20):
        arrive()
        engine.step()
    assert engine.ends[0] == "length"
    engine.run()


def test_streams_get_a_token_in_every_step_while_long_prompts_are_computed():
    engine = Engine(budget=16, max_num_seqs=8, max_model_len=256, num_blocks=400)
    for slot in range(6):
        engine.add(slot, num_prompt_tokens=2, max_tokens=100)
    engine.step()
    for slot in (6, 7):
        engine.add(slot, num_prompt_tokens=200, max_tokens=1)
    num_steps = 1
    while 7 not in engine.ends:
        step = engine.step()
        num_steps += 1
        assert [len(engine.outputs[slot]) for slot in range(6)] == [num_steps] * 6
        assert step.counts.sum() <= 16
    assert num_steps == 1 + 2 * 200 // (16 - 6), "prompts get the budget that streams leave in each step"


def admitted(engine):
    """Return a list that will hold (client, slot) of each request that gets a row, in that order."""
    keys, add = [], engine.batch.add

    def watch_add(request, *blocks):
        keys.append(request.key)
        return add(request, *blocks)

    engine.batch.add = watch_add
    return keys


@pytest.mark.parametrize("max_tokens", [1, 20], ids=["only prompts", "long outputs"])
def test_single_request_of_a_client_waits_for_one_turn_of_a_client_with_many_requests(max_tokens):
    engine = Engine(budget=16, max_num_seqs=4, num_blocks=40)
    keys = admitted(engine)
    for slot in range(300):
        engine.add(slot, max_tokens=max_tokens)
    for _ in range(30):
        engine.step()
    num_before = len(keys)
    engine.add(1000, client=1, max_tokens=3)
    while 1000 not in engine.ends:
        engine.step()
    assert keys.index((1, 1000)) <= num_before + 1
    assert engine.scheduler.num_waiting > 150


def test_owner_of_many_clients_takes_no_more_turns_than_the_owner_of_one():
    engine = Engine(budget=16, max_num_seqs=4, num_blocks=40)
    keys = admitted(engine)
    for client in range(200):
        engine.add(client, client=client, owner="process 1", num_prompt_tokens=4, max_tokens=1)
    for slot in range(1000, 1040):
        engine.add(slot, client=1000, owner="process 2", num_prompt_tokens=14, max_tokens=1)
    while len(keys) < 60:
        engine.step()
    assert 13 <= Counter(client for client, _ in keys)[1000] <= 17, "turns count by tokens"
    first = [client for client, _ in keys if client < 1000]
    assert first == [*range(len(first))], "the clients of an owner take turns"


def test_tenants_of_one_client_take_turns():
    engine = Engine(budget=16, max_num_seqs=4, num_blocks=40)
    keys = admitted(engine)
    for slot in range(100):
        engine.add(slot, tenant=0, num_prompt_tokens=4, max_tokens=1)
    for slot in range(1000, 1010):
        engine.add(slot, tenant=1, num_prompt_tokens=4, max_tokens=1)
    while len(keys) < 20:
        engine.step()
    assert sum(slot >= 1000 for _, slot in keys) == 10
    engine.scheduler.drop_client(0)
    turns = engine.scheduler.waiting.turns
    assert (turns._lines, turns._lines_of, len(turns._owners)) == ({}, {}, 0), "a client that has left leaves nothing"


def test_clients_take_turns_by_the_tokens_that_were_computed_for_them():
    engine = Engine(budget=16, max_num_seqs=8, num_blocks=200)
    keys = admitted(engine)
    for slot in range(40):
        engine.add(slot, num_prompt_tokens=40, max_tokens=1)
    for slot in range(1000, 1400):
        engine.add(slot, client=1, num_prompt_tokens=4, max_tokens=1)
    while len(keys) < 200:
        engine.step()
    counts = Counter(client for client, _ in keys)
    assert abs((40 + 1) * counts[0] - (4 + 1) * counts[1]) <= 41
    for client in (0, 1):
        slots = [slot for owner, slot in keys if owner == client]
        assert slots == sorted(slots), "the requests of a client run in their order"


def test_output_tokens_count_for_their_client():
    engine = Engine(budget=16, max_num_seqs=1, num_blocks=40)
    keys = admitted(engine)
    for slot in range(100):
        engine.add(slot, num_prompt_tokens=1, max_tokens=30)
        engine.add(1000 + slot, client=1, num_prompt_tokens=1, max_tokens=2)
    while len(keys) < 60:
        engine.step()
    counts = Counter(client for client, _ in keys)
    assert counts[1] > 8 * counts[0]


def test_client_gets_no_credit_for_the_time_before_its_requests():
    engine = Engine(budget=16, max_num_seqs=1, num_blocks=40)
    keys = admitted(engine)
    engine.add(500, client=1, num_prompt_tokens=4, max_tokens=1)
    for slot in range(200):
        engine.add(slot, num_prompt_tokens=4, max_tokens=1)
    while len(keys) < 100:
        engine.step()
    for slot in range(1000, 1050):
        engine.add(slot, client=1, num_prompt_tokens=4, max_tokens=1)
    while len(keys) < 140:
        engine.step()
    assert 19 <= Counter(client for client, _ in keys[100:])[1] <= 21


def test_priority_counts_before_turns():
    engine = Engine(budget=16, max_num_seqs=1, policy="priority")
    keys = admitted(engine)
    for slot in range(3):
        engine.add(slot, max_tokens=1, priority=0)
        engine.add(1000 + slot, client=1, max_tokens=1, priority=-1)
    engine.run()
    assert [client for client, _ in keys] == [1, 1, 1, 0, 0, 0]


def test_client_that_has_most_is_preempted_and_the_only_request_of_another_is_not():
    engine = Engine(budget=64, max_num_seqs=8, num_blocks=12, max_model_len=48)
    for slot in range(5):
        engine.add(slot, num_prompt_tokens=4, max_tokens=30)
    engine.step()
    engine.add(1000, client=1, num_prompt_tokens=4, max_tokens=30)
    engine.step()
    preempted, preempt = [], engine.scheduler.room.preempt

    def watch(request):
        preempted.append(request.key)
        assert request.client == 0 or len(engine.batch) == 2, "the other client has several requests"
        preempt(request)

    engine.scheduler.room.preempt = watch
    engine.run()
    assert preempted[:2] == [(0, 4), (0, 3)], "the newest of the client with most blocks"
    assert len(engine.ends) == 6


def test_long_request_of_a_client_ends_beside_a_stream_of_small_ones():
    engine = Engine(budget=32, max_num_seqs=6, num_blocks=16)
    slots = iter(range(1000, 10_000))
    engine.add(next(slots), client=1, num_prompt_tokens=4, max_tokens=10)
    engine.step()
    engine.add(0, num_prompt_tokens=30, max_tokens=30)
    num_steps = 0
    while 0 not in engine.ends:
        engine.add(next(slots), client=1, num_prompt_tokens=4, max_tokens=10)
        engine.step()
        num_steps += 1
        assert num_steps < 300


def test_waiting_requests_of_a_client_run_by_their_arrival_times_within_a_priority():
    engine = Engine(budget=16, max_num_seqs=1, policy="priority")
    keys = admitted(engine)
    for slot, (priority, arrival_time) in enumerate([(1, 1.0), (0, 7.0), (0, 5.0), (0, 5.0), (0, -3.0), (1, 0.5)]):
        engine.add(slot, max_tokens=1, priority=priority, arrival_time=arrival_time)
    engine.scheduler.abort(0, 3)
    engine.run()
    assert [slot for _, slot in keys] == [4, 2, 1, 5, 0]


def test_arrival_time_of_one_client_gives_it_no_turn_of_another():
    engine = Engine(budget=16, max_num_seqs=1)
    keys = admitted(engine)
    for slot in range(20):
        engine.add(slot, max_tokens=1, arrival_time=100.0)
        engine.add(1000 + slot, client=1, max_tokens=1, arrival_time=-100.0 - slot)
    engine.run()
    assert [client for client, _ in keys] == [0, 1] * 20
    assert [slot for client, slot in keys if client] == [*range(1019, 999, -1)]


def test_early_arrival_time_does_not_save_a_running_request_from_its_preemption():
    engine = Engine(budget=64, max_num_seqs=8, num_blocks=12, max_model_len=48)
    for slot in range(5):
        engine.add(slot, num_prompt_tokens=4, max_tokens=30, arrival_time=100.0)
    engine.step()
    engine.add(5, num_prompt_tokens=4, max_tokens=30, arrival_time=-100.0)
    engine.step()
    preempted, preempt = [], engine.scheduler.room.preempt

    def watch(request):
        running = [engine.batch.request(row).order for row in engine.batch.order.tolist()]
        assert request.order == max(running), "the last to come is preempted"
        preempted.append(request.slot)
        preempt(request)

    engine.scheduler.room.preempt = watch
    engine.run()
    assert 5 in preempted
    assert len(engine.ends) == 6
