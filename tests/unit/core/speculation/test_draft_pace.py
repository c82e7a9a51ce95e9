"""How many drafts pay, by what is accepted and by what they cost."""

from vllm_mp.core.speculation.draft_pace import WEIGHT_OF_ALL, WEIGHT_OF_MODEL, DraftPace, RequestPace

LOOKS = 2.0
"""The least chance in a step that shows what steps without drafts take."""


def measured_pace(num_rows, cost, num_steps=60):
    """Return a pace that has seen steps in which a draft costs the share `cost` of a token."""
    pace, token = DraftPace(), 0.001
    for _ in range(num_steps):
        num_drafts = 2 * num_rows if pace.least_chance(num_rows) < LOOKS else 0
        pace.observe(num_rows, num_drafts, token * (num_rows + cost * num_drafts))
    return pace


def test_first_steps_of_a_size_have_no_drafts_and_the_fastest_counts():
    pace = DraftPace()
    for seconds in (0.05, 0.01, 0.02):  # the first is cold
        assert pace.least_chance(4) == LOOKS
        pace.observe(4, 0, seconds)
    before = pace.least_chance(4)
    assert before < 1
    assert pace.least_chance(50) == LOOKS
    pace.observe(4, 4, 0.012)  # a draft costs 0.2 of a token, less than was assumed, beside the fastest only
    assert 0.28 < pace.least_chance(4) < before


def test_requests_that_accept_get_more_drafts_and_requests_that_reject_get_none():
    pace = measured_pace(1, cost=0.1)
    least = pace.least_chance(1)
    lucky, unlucky = RequestPace(), RequestPace()
    before = pace.num_worthwhile(lucky, 3, 8, least)
    for _ in range(30):
        pace.note_drafts(lucky, 3, 4, 4)
    assert pace.num_worthwhile(lucky, 3, 8, least) == 8 > before
    for _ in range(30):
        pace.note_drafts(unlucky, 3, 4, 0)
    assert pace.num_worthwhile(unlucky, 3, 8, least) == 0


def test_proposals_of_a_request_rest_while_hardly_any_is_accepted():
    pace, lucky, unlucky = DraftPace(), RequestPace(), RequestPace()
    for _ in range(8):
        pace.note_drafts(lucky, 3, 1, 1)
        pace.note_drafts(unlucky, 3, 1, 0)
    pace.note_refusal(lucky, 0.1)
    assert not pace.is_resting(lucky)
    pace.note_refusal(unlucky, 0.1)
    assert [pace.is_resting(unlucky) for _ in range(5)] == [True, True, True, False, False]
    pace.note_refusal(lucky, 0.6)  # drafts are dear
    assert [pace.is_resting(lucky) for _ in range(4)] == [True, True, True, False]


def test_the_dearer_a_draft_the_fewer_are_worth_it():
    numbers = []
    for cost in (0.02, 0.3, 0.7, 1.2):
        pace, request = measured_pace(16, cost), RequestPace()
        for _ in range(8):
            pace.note_drafts(request, 3, 1, 1)
            pace.note_drafts(request, 3, 1, 1)
            pace.note_drafts(request, 3, 1, 0)
        numbers.append(pace.num_worthwhile(request, 3, 8, pace.least_chance(16)))
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[1] > numbers[-1] == 0


def test_chance_must_clearly_exceed_a_high_cost():
    assert measured_pace(16, cost=0.5).least_chance(16) > 0.65
    assert measured_pace(16, cost=0.02).least_chance(16) < 0.1


def test_steps_without_drafts_are_measured_again_from_time_to_time():
    pace = measured_pace(2, cost=0.1)
    looks = 0
    for _ in range(500):
        is_look = pace.least_chance(2) == LOOKS
        looks += is_look
        pace.observe(2, 0 if is_look else 4, 0.002 if is_look else 0.0024)
    assert 2 <= looks <= 5


def test_drafts_that_were_too_dear_are_tried_again_some_time():
    pace, request = measured_pace(16, cost=1.2), RequestPace()
    for _ in range(40):
        pace.note_drafts(request, 3, 1, 1)
    num_steps = 0
    while not pace.num_worthwhile(request, 3, 4, pace.least_chance(16)):
        num_steps += 1
        assert num_steps < 500
    assert num_steps > 20


def test_one_slow_step_does_not_forbid_drafts():
    pace, request = measured_pace(1, cost=0.05), RequestPace()
    for _ in range(20):
        pace.note_drafts(request, 3, 2, 2)
    pace.observe(1, 2, 10.0)
    assert pace.num_worthwhile(request, 3, 4, pace.least_chance(1)) > 0


def test_steps_without_drafts_are_measured_again_when_the_machine_becomes_slower():
    pace = measured_pace(1, cost=0.1)
    before = pace.least_chance(1)
    assert before < LOOKS
    num_with_drafts = 0
    while pace.least_chance(1) < LOOKS:  # everything takes twice as long, so that drafts cost the same share
        pace.observe(1, 2, 2 * 0.001 * 1.2)
        num_with_drafts += 1
    assert num_with_drafts == 3
    for _ in range(20):
        num_drafts = 2 if pace.least_chance(1) < LOOKS else 0
        pace.observe(1, num_drafts, 2 * 0.001 * (1 + 0.1 * num_drafts))
    assert abs(pace.least_chance(1) - before) < 0.05


def test_steps_of_many_rows_which_are_never_alike_tell_no_change_of_the_machine():
    pace = measured_pace(16, cost=0.3)
    for num_drafts in (8, 60, 9, 61, 8, 60, 9, 61):
        assert pace.least_chance(16) < LOOKS
        pace.observe(16, num_drafts, 0.01 + 0.001 * num_drafts)


def test_an_unlucky_run_of_one_request_says_less_of_the_drafts_of_a_model():
    chances = []
    for weight in (WEIGHT_OF_ALL, WEIGHT_OF_MODEL):
        pace, request = DraftPace(weight), RequestPace()
        for _ in range(40):
            pace.note_draft(RequestPace(), 15, True)
        for _ in range(4):
            pace.note_draft(request, 15, False)
        chances.append(pace.chance_of(request, 15))
    assert chances[0] < 0.6 < 0.75 < chances[1]
