"""The choice of the request to blame when cores die."""

import gc
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mp import SamplingParams, wire
from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.cores.recovery.suspects import DeathLedger, Suspects
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import GenerationStream, Isolation
from vllm_mp.client.prompts.request import GenerationRequest


class Client:
    """Live requests with `num_completions` each, and the deaths of their cores."""

    def __init__(self, *num_completions):
        self.suspected = Suspects()
        self.live = []
        self.unsent = 0
        """Number of tokens of each completion that a core has not sent when it dies."""
        for request, count in enumerate(num_completions):
            completions = [Completion(i, SamplingParams()) for i in range(count)]
            request_record = GenerationRequest(str(request), "", [1], wire.pack_ids([1]), SamplingParams(), 0.0)
            stream = GenerationStream(request_record, completions)
            for completion in completions:
                completion.slot = len(self.live)
                self.live.append((stream, completion))

    def die(self, *slots, outside=False, others=0, left=0, known=True):
        """Let a core die with `slots`, and `others` of other clients, in its step; return the ids of the culprits.

        `left` is the number of prompt tokens that were left. With `known` false the step is unknown.
        """
        in_step = (completion for _, completion in self.live if completion.slot in slots)
        had = {completion.slot: -left or completion.num_tokens + self.unsent for completion in in_step}
        death = Death("cause; log", had if known else {}, len(slots) + others, outside, is_step_known=known)
        convictions = self.suspected.record(death, self.live)
        culprits = [conviction.stream.request_id for conviction in convictions]
        self.live = [entry for entry in self.live if entry[0].request_id not in culprits]
        self.suspected.choose_sent_group(self.live)
        return culprits

    def give_token(self, *slots):
        for _, completion in self.live:
            if completion.slot in slots:
                completion.take_in(5, len(completion.token_ids))

    def groups(self):
        """Return the slots of each group of suspects, in the order of the groups."""
        slots_of = {}
        for _, completion in self.live:
            group = self.suspected.isolation(completion).group
            slots_of.setdefault(group, []).append(completion.slot)
        return [slots for group, slots in sorted(slots_of.items()) if group]


def test_first_death_makes_no_request_a_suspect():
    client = Client(1, 1, 1)
    assert not client.die(0, 2)
    assert client.groups() == []


def test_requests_in_two_deaths_are_tested_by_halves_until_they_get_a_token():
    client = Client(*[1] * 5)
    client.die(0, 1, 2, 3)
    client.die(0, 1, 2, 4)
    assert client.groups() == [[0, 1], [2]]
    client.give_token(1)
    assert client.groups() == [[0], [2]]


def test_half_in_whose_step_a_core_dies_is_divided_and_the_other_half_stays_together():
    client = Client(*[1] * 8)
    client.die(*range(8))
    client.die(*range(8))
    assert client.groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    client.die(0, 1, 2, 3)
    assert client.groups() == [[4, 5, 6, 7], [0, 1], [2, 3]]
    client.die(4, 5)
    assert client.groups() == [[6, 7], [0, 1], [2, 3], [4], [5]], "6 and 7 were not in the step"


def test_ledger_knows_the_suspects_until_they_are_found_innocent_or_gone():
    client, ledger = Client(1, 1, 1), DeathLedger()
    client.suspected = Suspects(ledger)
    client.die(0, 1, 2)
    assert len(ledger.suspects) == 0
    client.die(0, 1, 2)
    assert len(ledger.suspects) == 3
    client.give_token(0)
    client.die(0, 1)
    assert {completion.slot for completion in ledger.suspects} == {1, 2}
    client.live.clear()
    gc.collect()
    assert len(ledger.suspects) == 0


def test_conviction_keeps_the_suspicion_of_the_others():
    client = Client(*[1] * 4)
    client.die(0, 1, 2, 3)
    client.die(0, 1, 2, 3)
    client.die(0, 1)
    assert client.die(0) == ["0"]
    assert client.groups() == [[2, 3], [1]]
    assert client.die(1) == ["1"], "one death more, not two"


def test_lone_request_is_to_blame_for_its_second_death():
    client = Client(1)
    assert not client.die(0)
    assert client.die(0) == ["0"]


def test_progress_between_two_deaths_clears_a_request():
    client = Client(1)
    for _ in range(30):
        assert not client.die(0)
        client.give_token(0)


def test_kills_from_outside_count_only_if_there_are_several_without_progress():
    client = Client(1, 1)
    for _ in range(2):
        assert not client.die(0, 1, outside=True)
        assert client.groups() == []
    client.die(0, 1, outside=True)
    assert client.groups() == [[0], [1]]
    assert not client.die(0, outside=True)
    assert client.die(0, outside=True) == ["0"]


def test_kill_from_outside_during_a_search_changes_no_group():
    client = Client(*[1] * 4)
    client.die(0, 1, 2, 3)
    client.die(0, 1, 2, 3)
    groups = client.groups()
    assert not client.die(0, 1, outside=True)
    assert not client.die(2, outside=True)
    assert client.groups() == groups


def test_reading_a_prompt_is_progress_for_kills_from_outside():
    client = Client(1)
    for left in range(1000, 900, -10):
        assert not client.die(0, outside=True, left=left)
    assert client.groups() == []


def test_request_that_dies_at_any_chunk_of_its_prompt_is_to_blame():
    client = Client(1)
    assert not client.die(0, left=1000)
    assert client.die(0, left=900) == ["0"]


def test_request_that_shares_the_step_with_another_client_is_not_alone():
    client = Client(1)
    for _ in range(3):
        assert not client.die(0, others=1)
    assert client.die(0) == ["0"]


def test_number_of_deaths_without_progress_is_bounded_in_any_company():
    client = Client(1, 1)
    num_deaths = 1
    while not (culprits := client.die(0, others=1)):
        num_deaths += 1
        assert num_deaths <= 16
    assert culprits == ["0"]
    assert client.groups() == []


def test_completions_of_one_request_count_as_one():
    client = Client(3, 1)
    client.die(0, 1, 2, 3)
    client.die(0, 1, 2, 3)
    assert client.groups() == [[0, 1, 2], [3]]
    assert client.die(0, 1) == ["0"]


def test_death_between_two_steps_blames_no_request():
    client = Client(1)
    for _ in range(20):
        assert not client.die()
    assert client.groups() == []


def test_suspect_runs_isolated_past_the_tokens_that_the_core_had_not_sent():
    client = Client(1, 1)
    client.unsent = 2
    client.die(0, 1)
    client.die(0, 1)
    for _ in range(3):
        assert client.groups() == [[0], [1]]
        assert client.suspected.isolation(client.live[0][1]).until_num_tokens == 3
        client.give_token(0, 1)
    assert client.groups() == []
    assert client.suspected.isolation(client.live[0][1]) == Isolation()
    client.unsent = 0
    assert not client.die(0), "it has got past the step of the first deaths"


def test_conviction_names_the_number_and_the_causes_of_the_deaths():
    client = Client(1)
    suspected, live = client.suspected, client.live
    suspected.record(Death("the first cause; log lines", {0: 0}, 1, False), live)
    (conviction,) = suspected.record(Death("the last cause; log lines", {0: 0}, 1, False), live)
    assert conviction.why() == (
        "it was in the step of each of 2 cores that died, alone in the last (the first cause): "
        "the last cause; log lines"
    )


def search(client, culprits, is_in_step=lambda slot: True):
    """Let cores run the groups, then the other requests, until all innocents have a token; return the deaths.

    A core dies in a step with one of the slots `culprits`. `is_in_step` chooses the part of a group that is in a step.
    """
    convicted, num_deaths = [], 0
    waiting = {completion.slot for _, completion in client.live}
    while waiting:
        groups = client.groups()
        step = groups[0] if groups else sorted(waiting)
        step = [slot for slot in step if is_in_step(slot)] or step
        if culprits.isdisjoint(step):
            client.give_token(*step)
            waiting.difference_update(step)
        else:
            num_deaths += 1
            convicted += client.die(*step)
            waiting.difference_update(map(int, convicted))
    assert sorted(map(int, convicted)) == sorted(culprits)
    return num_deaths


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_search_convicts_the_culprits_and_no_innocent_in_a_bounded_number_of_deaths(data):
    num_requests = data.draw(st.integers(1, 200))
    culprits = data.draw(st.sets(st.integers(0, num_requests - 1), min_size=1, max_size=min(6, num_requests)))
    absent = data.draw(st.sets(st.integers(0, num_requests - 1), max_size=20))
    depth = math.ceil(math.log2(num_requests))
    assert search(Client(*[1] * num_requests), culprits) <= 2 + len(culprits) * depth
    if culprits.isdisjoint(absent):
        num_deaths = search(Client(*[1] * num_requests), culprits, lambda slot: slot not in absent)
        assert num_deaths <= 2 + len(culprits) * depth


@pytest.mark.parametrize("culprit", [0, 37, 63])
def test_one_culprit_among_64_costs_8_deaths(culprit):
    assert search(Client(*[1] * 64), {culprit}) == 8


def aged(ages):
    """Return a client whose requests have survived these numbers of steps."""
    client = Client(*[1] * len(ages))
    for slot, age in enumerate(ages):
        for _ in range(age):
            client.give_token(slot)
    return client


def test_new_request_among_old_ones_is_found_at_the_third_death():
    assert search(aged([10] * 20 + [0] + [50] * 11), {20}) == 3


@settings(max_examples=50, deadline=None)
@given(ages=st.lists(st.integers(0, 60), min_size=1, max_size=60), data=st.data())
def test_culprits_of_any_age_cost_at_most_one_death_more_than_by_halves(ages, data):
    culprits = data.draw(st.sets(st.integers(0, len(ages) - 1), min_size=1, max_size=min(4, len(ages))))
    assert search(aged(ages), culprits) <= 3 + len(culprits) * math.ceil(math.log2(len(ages)))


def run_unknown(client, culprits):
    """As `search`, for a core whose steps are unknown and that isolates no request; return the deaths."""
    convicted, num_deaths = [], 0
    waiting = {completion.slot for _, completion in client.live}
    while waiting:
        sent = {c.slot for _, c in client.live if not client.suspected.is_held_back(c)}
        assert sent, "requests are held back for ever"
        if culprits.isdisjoint(sent):
            client.give_token(*sent)
            waiting -= sent
            client.suspected.choose_sent_group(client.live)
        else:
            num_deaths += 1
            convicted += client.die(known=False)
            waiting.difference_update(map(int, convicted))
    assert sorted(map(int, convicted)) == sorted(culprits)
    return num_deaths


@settings(max_examples=50, deadline=None)
@given(num_requests=st.integers(1, 100), data=st.data())
def test_culprits_are_found_without_knowledge_of_the_steps(num_requests, data):
    culprits = data.draw(st.sets(st.integers(0, num_requests - 1), min_size=1, max_size=min(6, num_requests)))
    num_deaths = run_unknown(Client(*[1] * num_requests), culprits)
    assert num_deaths <= 5 + len(culprits) * math.ceil(math.log2(num_requests))
