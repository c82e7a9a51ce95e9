"""Drafts from what followed the last tokens of a request before."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mp.core.speculation.ngram import NgramProposer
from vllm_mp.core.speculation.token_index import TokenIndex, common_suffix


def ids(tokens):
    return np.array(tokens, np.int32)


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    size=st.integers(1, 4),
    cuts=st.lists(st.integers(1, 9)),
    most=st.integers(1, 5),
)
def test_index_finds_the_latest_places_however_the_sequence_grows(tokens, size, cuts, most):
    index, end = TokenIndex(size), 0
    for cut in [*cuts, len(tokens)]:
        end = min(len(tokens), end + cut)
        known = tokens[:end]
        expected = [i for i in range(size, end) if known[i - size : i] == known[end - size :]] if end > size else []
        assert index.find(ids(known), most) == expected[::-1][:most]


def propose(tokens, most=4, lookup=(2, 4)):
    return NgramProposer(*lookup).source(b"").propose(ids(tokens), most)


def test_what_followed_the_longest_match_is_proposed():
    text = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 1, 2, 3, 4]
    assert propose(text) == ([50, 51, 52, 9], 4), "the match of 4 tokens wins over the later match of 2"
    assert propose(text, lookup=(2, 2)) == ([60, 61, 1, 2], 2), "with the same length the latest place wins"
    assert propose(text, lookup=(5, 5)) == ([], 0)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end():
    assert propose([7, 8, 9, 7, 8], most=6) == ([9, 7, 8, 9, 7, 8], 2)
    assert propose([5, 5, 5], most=3) == ([5, 5, 5], 2)


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3, 4]])
def test_nothing_is_proposed_without_a_match(tokens):
    assert propose(tokens) == ([], 0)


def test_tokens_that_arrive_later_are_found_too():
    source = NgramProposer(2, 4).source(b"")
    assert source.propose(ids([1, 2, 3]), 4) == ([], 0)
    assert source.propose(ids([1, 2, 3, 4, 1, 2]), 2) == ([3, 4], 2)
    assert source.propose(ids([1, 2, 3, 4, 1, 2, 9, 4, 1]), 2) == ([2, 9], 2)


def test_common_suffix_is_counted_up_to_a_limit():
    assert common_suffix([1, 2, 3], [9, 2, 3, 4], 3, 5) == 2
    assert common_suffix([1, 2, 3], [2, 3], 2, 5) == 2
    assert common_suffix([1, 2, 3], [1, 2, 3], 3, 2) == 2
