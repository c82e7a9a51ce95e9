"""Stop strings in a text that arrives in pieces.

The stop string that is complete first counts, however the text is cut into pieces. If several end at the same
character, the first in the list counts.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mp.client.outputs.stop_strings import StopStrings

# Few different characters, so that stops occur, overlap, and begin each other.
TEXT = st.text(st.sampled_from("aab\né😀"), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("aab\né😀"), min_size=1, max_size=6), min_size=1, max_size=5)
CUTS = st.lists(st.integers(0, 40), max_size=12)


def pieces_of(text, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


def first_stop(text, stops):
    """Return (start, stop string) of the stop that counts, by trying every end; None without a stop."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


def length_of_beginning(text, stops):
    """Return the largest number of characters at the end of `text` that begin a stop without completing it."""
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@given(TEXT, CUTS, STOPS, st.booleans())
def test_text_is_passed_on_up_to_the_first_stop_and_never_too_early(text, cuts, stops, include):
    search = StopStrings(stops, include)
    passed = known = ""
    for piece in pieces_of(text, cuts):
        known += piece
        passed += search.feed(piece)
        if found := first_stop(known, stops):
            start, stop = found
            assert search.found == stop
            assert passed == known[:start] + (stop if include else "")
            assert search.flush() == ""
            return
        assert search.found is None
        assert passed == known[: len(known) - length_of_beginning(known, stops)]
    assert passed + search.flush() == text


@pytest.mark.parametrize(
    ("stops", "pieces", "passed", "found"),
    [
        (["stop"], ["a st", "op b"], ["a ", ""], "stop"),
        (["stop"], ["a st", "ar"], ["a ", "star"], None),
        (["aab"], ["aaa", "ab"], ["a", "a"], "aab"),
        (["abc", "ab"], ["abc"], [""], "ab"),
        (["abc", "ab"], ["ab", "c"], [""], "ab"),
        (["bcd", "abcde"], ["abcd", "e"], ["a"], "bcd"),
        (["abcd", "b"], ["abcd"], ["a"], "b"),
        (["b", "ab"], ["xab"], ["xa"], "b"),
        (["ab", "b"], ["xab"], ["x"], "ab"),
        (["é"], ["caf", "é"], ["caf", ""], "é"),
        (["."], ["a.b.c"], ["a"], "."),
        (["(a|b)*"], ["aab (a", "|b)*"], ["aab ", ""], "(a|b)*"),
    ],
)
def test_each_piece_passes_on_the_text_that_no_stop_can_change(stops, pieces, passed, found):
    search = StopStrings(stops, include=False)
    passed_on = []
    for piece in pieces:
        passed_on.append(search.feed(piece))
        if search.found:
            break
    assert passed_on == passed
    assert search.found == found


def test_text_that_was_held_back_is_flushed_once_at_the_end():
    search = StopStrings(["\n\nUser:"], include=False)
    assert search.feed("Bye.\n\nUse") == "Bye."
    assert search.flush() == "\n\nUse"
    assert search.flush() == ""
