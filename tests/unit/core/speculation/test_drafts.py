"""Which drafts are accepted, and where the tokens of a step with drafts are."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.speculation.drafts import Drafts, num_accepted, spread

TOKENS = st.integers(0, 2)


@given(st.lists(st.tuples(st.lists(TOKENS, max_size=4), st.lists(TOKENS | st.just(-1), min_size=5)), min_size=1))
def test_drafts_are_accepted_up_to_the_first_that_was_not_chosen(rows):
    expected, chosen = [], []
    for drafts, tokens in rows:
        tokens = tokens[: len(drafts) + 1]
        count = 0
        while count < len(drafts) and drafts[count] == tokens[count]:
            count += 1
        # Another step finds out why there is no token after the last accepted draft.
        expected.append(count - 1 if count and tokens[count] < 0 else count)
        chosen += tokens
    counts = np.array([len(drafts) for drafts, _ in rows])
    flat = np.array([token for drafts, _ in rows for token in drafts], np.int64)
    assert num_accepted(counts, flat, np.array(chosen)).tolist() == expected


def test_numbers_are_spread_over_sequences_of_any_length():
    assert spread(np.array([2, 0, 1, 3])).tolist() == [0, 1, 0, 0, 1, 2]
    assert spread(np.array([0])).tolist() == []


def step_with_drafts():
    """Return a step of a decode, two rows with drafts, a prompt that ends and one that goes on."""
    counts = np.array([1, 3, 2, 4, 5])
    drafts = Drafts(np.array([0, 2, 1, 0, 0]), np.array([11, 12, 13]))
    samples = np.array([True, True, True, True, False])
    return ScheduledStep(np.array([4, 0, 2, 3, 1]), counts, 1, samples, np.zeros(5, np.bool_), drafts=drafts)


def test_a_token_is_chosen_after_the_last_known_token_and_after_each_draft():
    step = step_with_drafts()
    assert step.num_choices.tolist() == [1, 3, 2, 1]
    assert step.chosen_indices().tolist() == [0, 1, 2, 3, 4, 5, 9]
    rows, num_tokens = step.choices(np.array([10, 20, 30, 0, 0]))
    assert rows.tolist() == [4, 0, 0, 0, 2, 2, 3]
    assert num_tokens.tolist() == [11, 21, 22, 23, 31, 32, 4]
    assert step.is_yielded(np.array([7, 11, 9, 9, 13, 9, 7])).tolist() == [1, 1, 1, 0, 1, 1, 1]


def test_rows_that_leave_a_step_take_their_drafts_with_them():
    left = step_with_drafts().of_rows(np.array([True, False, True, True, True]))
    assert (left.rows.tolist(), left.num_decodes) == ([4, 2, 3, 1], 1)
    assert left.drafts.counts.tolist() == [0, 1, 0, 0]
    assert left.drafts.tokens.tolist() == [13]
