"""The choice of the request to blame when cores die."""

from vllm_mp import SamplingParams, wire
from vllm_mp.client.engine.supervisor import Death
from vllm_mp.client.engine.suspects import Suspects
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.request import GenerationRequest


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

    def die(self, *slots, outside=False, others=0):
        """Let a core die with `slots`, and `others` of other clients, in its step; return the id of the culprit."""
        in_step = (completion for _, completion in self.live if completion.slot in slots)
        had = {completion.slot: completion.num_tokens + self.unsent for completion in in_step}
        death = Death("cause", had, len(slots) + others, outside)
        culprit = self.suspected.record(death, self.live)
        return culprit and culprit.request_id

    def give_token(self, slot):
        self.live[slot][1].take_in(5, len(self.live[slot][1].token_ids))

    def suspects(self):
        return [completion.slot for _, completion in self.live if self.suspected.isolate_until(completion)]


def test_all_requests_in_the_step_are_suspects_until_they_get_a_token():
    client = Client(1, 1, 1)
    assert client.die(0, 2) is None
    assert client.suspects() == [0, 2]
    client.give_token(2)
    assert client.suspects() == [0]


def test_request_that_is_alone_in_a_second_death_is_to_blame_and_clears_the_others():
    client = Client(1, 1, 1)
    client.die(0, 1, 2)
    assert client.die(1) == "1"
    assert client.suspects() == []


def test_lone_request_is_to_blame_for_its_second_death_even_if_both_came_from_outside():
    for outside in (False, True):
        client = Client(1)
        assert client.die(0, outside=outside) is None
        assert client.die(0, outside=outside) == "0"


def test_progress_between_two_deaths_clears_a_request():
    client = Client(1)
    for _ in range(10):
        assert client.die(0) is None
        client.give_token(0)


def test_first_kill_from_outside_makes_no_request_a_suspect():
    client = Client(1, 1)
    assert client.die(0, 1, outside=True) is None
    assert client.suspects() == []
    assert client.die(0, 1, outside=True) is None
    assert client.suspects() == [0, 1]
    assert client.die(0, outside=True) == "0"


def test_request_that_shares_the_step_with_another_client_is_not_alone():
    client = Client(1)
    assert client.die(0, others=1) is None
    assert client.die(0, others=1) is None
    assert client.die(0) == "0"


def test_completions_of_one_request_count_as_one():
    client = Client(3)
    assert client.die(0, 1, 2) is None
    assert client.suspects() == [0, 1, 2]
    assert client.die(0, 1) == "0"


def test_death_between_two_steps_blames_no_request():
    client = Client(1)
    for _ in range(5):
        assert client.die() is None
    assert client.suspects() == []


def test_suspect_runs_isolated_past_the_tokens_that_the_core_had_not_sent():
    client = Client(1, 1)
    client.unsent = 2
    client.die(0, 1)
    for _ in range(3):
        assert client.suspects() == [0, 1]
        assert client.suspected.isolate_until(client.live[0][1]) == 3
        client.give_token(0)
        client.give_token(1)
    assert client.suspects() == []
    client.unsent = 0
    assert client.die(0) is None, "it has got past the step of the first deaths"


def test_each_request_costs_at_most_two_deaths_if_every_step_kills():
    client = Client(*[1] * 5)
    num_deaths = 0
    while client.live:
        suspects = client.suspects()
        slots = suspects[:1] or [completion.slot for _, completion in client.live]
        culprit = client.die(*slots)
        num_deaths += 1
        if culprit is not None:
            client.live = [entry for entry in client.live if entry[0].request_id != culprit]
        assert num_deaths <= 2 * 5
    assert num_deaths == 2 * 5
