"""The incremental JSON scanner accepts what RFC 8259 accepts, and finds the end of a value."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mp.client.answers.json_scanner import MAX_DEPTH, JsonScanner, is_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=8,
)
NEARLY_JSON = st.text('{}[]",:\\u0019-+.eEtrufalsn \n\x01é', max_size=12)


def is_valid(text):
    """Return whether Python's parser accepts `text`, without its extensions."""

    def refuse(constant):
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def scanned(parts):
    """Return the scanner that has read `parts`, and the number of characters that belong to the value."""
    scanner, length = JsonScanner(), 0
    for part in parts:
        end = scanner.scan(part)
        length += end
        if end < len(part):
            break
    return scanner, length


@given(VALUES, st.text(max_size=3), st.booleans())
def test_value_ends_where_it_ends(value, rest, escaped):
    text = json.dumps(value, ensure_ascii=escaped)
    whole, length = scanned([text + " " + rest])
    assert (whole.complete, length) == (True, len(text))
    by_character, length = scanned(text + " " + rest)
    assert (by_character.complete, length) == (True, len(text))


@given(NEARLY_JSON)
def test_text_is_json_if_pythons_parser_accepts_it(text):
    assert is_json(text) == (is_valid(text) and text == text.rstrip())


@pytest.mark.parametrize(
    "text", ["", " ", "01", "1.", "-", "1e", "+1", ".5", "NaN", "tru", "'a'", '"\t"', r'"\x"', r'"\u12"']
)
@pytest.mark.parametrize("around", ["{}", "[{}]", '{{"a": {}}}'])
def test_text_that_is_no_json_is_refused(text, around):
    if text.strip() or around != "[{}]":
        assert not is_json(around.format(text))


@pytest.mark.parametrize("text", ['{"a" 1}', "{1: 2}", '{"a": 1,}', "[1,]", "[1 2]", "[1}", "}", "[,]", '{"a"}', "[}"])
def test_structure_that_is_no_json_is_refused(text):
    scanner, length = scanned(text)
    assert scanner.failed
    assert length < len(text)


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nesting_is_limited(opening, closing):
    assert is_json(opening * MAX_DEPTH + ("1" if closing == "}" else "") + closing * MAX_DEPTH)
    assert scanned(opening * (MAX_DEPTH + 1))[0].failed
