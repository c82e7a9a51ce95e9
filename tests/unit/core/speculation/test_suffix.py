"""Drafts from recent answers: the longest match, and what followed it most often."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_mp.core.speculation.suffix import AnswerPool, SuffixProposer
from vllm_mp.core.speculation.token_index import hashes

A, B = b"a", b"b"


def ids(tokens):
    return np.array(tokens, np.int32)


def proposer(max_depth=24, max_answers=100, factor=4.0, min_probability=0.1):
    return SuffixProposer(max_depth, max_answers, factor, min_probability)


def propose(method, tokens, pool=A, most=4):
    return method.source(pool).propose(ids(tokens), most)


def test_answers_of_the_same_pool_are_read_and_no_others():
    method = proposer()
    method.note_answer(A, ids([1, 2, 3, 4, 5, 6, 7, 8]))
    assert propose(method, [90, 3, 4, 5]) == ([6, 7, 8], 3)
    assert propose(method, [90, 3, 4, 5], pool=B) == ([], 0)
    assert propose(method, [90, 91, 4, 5]) == ([], 0), "two tokens are no match"


def test_the_longest_match_wins_over_what_is_more_frequent():
    method = proposer()
    for _ in range(3):
        method.note_answer(A, ids([9, 3, 4, 5, 6, 6]))
    method.note_answer(A, ids([8, 3, 4, 5, 7, 7]))
    assert propose(method, [1, 3, 4, 5]) == ([6, 6], 3)
    assert propose(method, [1, 8, 3, 4, 5]) == ([7, 7], 4)


def test_own_text_is_read_too_and_repetition_goes_on():
    assert propose(proposer(), [1, 2, 3, 4, 9, 1, 2, 3]) == ([4, 9, 1, 2], 3)


def test_drafts_end_where_places_disagree_too_much():
    method = proposer(min_probability=0.6)
    for last in (10, 11, 12):
        method.note_answer(A, ids([3, 4, 5, 6, last]))
    assert propose(method, [1, 3, 4, 5]) == ([6], 3)
    assert len(propose(proposer(min_probability=0.0), [1, 3, 4, 5, 6, 3, 4, 5]).tokens) == 4


def test_a_longer_match_allows_more_drafts():
    method = proposer(factor=0.5)
    method.note_answer(A, ids(range(20, 40)))
    assert propose(method, [1, 20, 21, 22], most=9) == ([23], 3)
    assert propose(method, [1, *range(20, 30)], most=9) == ([30, 31, 32, 33, 34], 10)
    shallow = proposer(max_depth=4, factor=0.5)
    shallow.note_answer(A, ids(range(20, 40)))
    assert propose(shallow, [1, *range(20, 30)], most=9) == ([30, 31], 4)


def test_oldest_answers_of_all_pools_make_room():
    method = proposer(max_answers=2)
    method.note_answer(A, ids([1, 2, 3, 4]))
    method.note_answer(B, ids([1, 2, 3, 5]))
    method.note_answer(A, ids([1, 2, 3, 6]))
    assert propose(method, [9, 1, 2, 3]) == ([6], 3)
    method.note_answer(A, ids([7, 7, 7, 7]))
    assert propose(method, [9, 1, 2, 3], pool=B) == ([], 0)
    assert method._pools.keys() == {A}
    none = proposer(max_answers=0)
    none.note_answer(A, ids([1, 2, 3, 4]))
    assert propose(none, [9, 1, 2, 3]) == ([], 0)


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=12), max_size=8), st.integers(1, 4))
def test_pool_finds_the_latest_places_and_keeps_nothing_of_dropped_answers(answers, num_kept):
    pool = AnswerPool()
    for number, answer in enumerate(answers, 1):
        pool.add(number, ids(answer))
        if number > num_kept:
            pool.drop(number - num_kept)
    kept = answers[-num_kept:]
    places = [(answer, end) for answer in kept for end in range(3, len(answer) + 1)]
    for ngram in {tuple(answer[end - 3 : end]) for answer, end in places}:
        found = pool.find([*ngram])
        assert found == [place for place in places[::-1] if tuple(place[0][place[1] - 3 : place[1]]) == ngram][:8]
    assert pool._places.keys() == {key for answer in kept for key in hashes(ids(answer), 3).tolist()}
