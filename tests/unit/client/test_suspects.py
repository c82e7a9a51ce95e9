"""Who is to blame when a core dies."""

from vllm_mp import SamplingParams
from vllm_mp.client.engine.supervisor import Death
from vllm_mp.client.engine.suspects import Suspects
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import RequestStream


class Book:
    """Live requests, each of one answer unless told otherwise, and the deaths of cores."""

    def __init__(self, *num_answers):
        self.suspicion = Suspects()
        self.live = []
        self.unsent = 0
        """Tokens of each answer that a core has when it dies, and has not sent."""
        for request, count in enumerate(num_answers):
            answers = [Completion(i, SamplingParams()) for i in range(count)]
            stream = RequestStream(str(request), "", [1], answers, 0.0)
            for answer in answers:
                answer.slot = len(self.live)
                self.live.append((stream, answer))

    def die(self, *slots, outside=False, others=0):
        """A core dies with these slots in its step, and so many of other clients; the id of the culprit."""
        in_step = (answer for _, answer in self.live if answer.slot in slots)
        had = {answer.slot: len(answer.token_ids) + self.unsent for answer in in_step}
        death = Death("cause", had, len(slots) + others, outside)
        culprit = self.suspicion.note(death, self.live)
        return culprit and culprit.request_id

    def give_token(self, slot):
        self.live[slot][1].take_in(5, len(self.live[slot][1].token_ids))

    def suspects(self):
        return [answer.slot for _, answer in self.live if self.suspicion.suspect_until(answer)]


def test_all_who_were_in_the_step_are_suspects_until_they_get_a_token():
    book = Book(1, 1, 1)
    assert book.die(0, 2) is None
    assert book.suspects() == [0, 2]
    book.give_token(2)
    assert book.suspects() == [0]


def test_who_dies_again_alone_is_to_blame_and_the_others_are_free():
    book = Book(1, 1, 1)
    book.die(0, 1, 2)
    assert book.die(1) == "1"
    assert book.suspects() == []


def test_a_lone_request_is_to_blame_after_its_second_death_whoever_seems_to_have_done_it():
    for outside in (False, True):
        book = Book(1)
        assert book.die(0, outside=outside) is None
        assert book.die(0, outside=outside) == "0"


def test_progress_between_two_deaths_clears():
    book = Book(1)
    for _ in range(10):
        assert book.die(0) is None
        book.give_token(0)


def test_a_kill_from_outside_makes_nobody_a_suspect_at_once():
    book = Book(1, 1)
    assert book.die(0, 1, outside=True) is None
    assert book.suspects() == []
    assert book.die(0, 1, outside=True) is None
    assert book.suspects() == [0, 1]
    assert book.die(0, outside=True) == "0"


def test_who_shares_the_step_with_another_clients_request_is_not_alone():
    book = Book(1)
    assert book.die(0, others=1) is None
    assert book.die(0, others=1) is None
    assert book.die(0) == "0"


def test_the_answers_of_one_request_count_as_one():
    book = Book(3)
    assert book.die(0, 1, 2) is None
    assert book.suspects() == [0, 1, 2]
    assert book.die(0, 1) == "0"


def test_a_death_between_two_steps_blames_nobody():
    book = Book(1)
    for _ in range(5):
        assert book.die() is None
    assert book.suspects() == []


def test_what_a_core_had_not_sent_yet_is_passed_again_alone():
    book = Book(1, 1)
    book.unsent = 2
    book.die(0, 1)
    for _ in range(3):
        assert book.suspects() == [0, 1]
        assert book.suspicion.suspect_until(book.live[0][1]) == 3
        book.give_token(0)
        book.give_token(1)
    assert book.suspects() == []
    book.unsent = 0
    assert book.die(0) is None, "it has got beyond where it was"


def test_where_no_request_can_be_computed_each_costs_two_deaths_and_no_more():
    book = Book(*[1] * 5)
    num_deaths = 0
    while book.live:
        suspects = book.suspects()
        slots = suspects[:1] or [answer.slot for _, answer in book.live]
        culprit = book.die(*slots)
        num_deaths += 1
        if culprit is not None:
            book.live = [(stream, answer) for stream, answer in book.live if stream.request_id != culprit]
        assert num_deaths <= 2 * 5
    assert num_deaths == 2 * 5
