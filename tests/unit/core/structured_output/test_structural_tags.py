"""What structural tags hold output to, with both libraries."""

import json

import pytest

from vllm_mp.requests.structured_outputs import Constraint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tag(name, **changes):
    content = {"type": "json_schema", "json_schema": SCHEMA}
    return {"type": "tag", "begin": f"<f={name}>", "content": content, "end": "</f>"} | changes


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("foo"), tag("bar")]}
CALL = '<f=bar>{"a":1}</f>'


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def const(text):
    return {"type": "const_string", "value": text}


FORMATS = {
    "triggered_tags": (TRIGGERED, ["", "hello", f"a {CALL} b {CALL}", "x < f = <f"], ["<f=baz>", '<f=foo>{"b":1}</f>']),
    "at_least_one": (TRIGGERED | {"at_least_one": True}, [CALL, f"{CALL} x {CALL}"], ["hello", ""]),
    "stop_after_first": (TRIGGERED | {"stop_after_first": True}, ["hi", f"hi {CALL}"], [f"{CALL} "]),
    "exactly_one": (TRIGGERED | {"at_least_one": True, "stop_after_first": True}, [CALL], [f"{CALL} ", f"x{CALL}"]),
    "excludes": (TRIGGERED | {"excludes": ["bad"]}, ["b ad", f"{CALL} ba"], ["so bad", f"{CALL} bad"]),
    "regex": (
        sequence(const("A:"), {"type": "regex", "pattern": "[a-z<>/]+"}, const("</x>")),
        ["A:abc</x>", "A:</x></x>"],
        ["A:</x>", "B"],
    ),
    "any_text": (
        sequence(tag("t", begin="<t>", content={"type": "any_text"}, end=["</t>", "</u>"]), const("!")),
        ["<t>a < /t </t>!", "<t></u>!"],
        ["<t></t> !", "<t>a"],
    ),
    "max_chars": ({"type": "any_text", "max_chars": 3}, ["日本語", ""], ["abcd"]),
    "tags_with_separator": (
        {"type": "tags_with_separator", "tags": [tag("foo"), tag("bar")], "separator": ","},
        ["", CALL, f"{CALL},{CALL}"],
        [f"{CALL},", f"{CALL}{CALL}"],
    ),
    "or": (
        {"type": "or", "elements": [const("yes"), {"type": "regex", "pattern": "no+"}, tag("foo")]},
        ["yes", "nooo", '<f=foo>{"a":1}</f>'],
        ["yesno", "n"],
    ),
    "grammar": ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab", "b"], ["a"]),
    "repeat": (
        sequence(
            {"type": "repeat", "min": 2, "max": 3, "content": const("ab")}, {"type": "star", "content": const("c")}
        ),
        ["abab", "abababcc"],
        ["ab", "ababababc"],
    ),
    "nested": (
        tag("a", begin="<a>", content=sequence(const("x"), TRIGGERED), end="</a>"),
        [f"<a>xhello {CALL} y</a>", "<a>x</a>"],
        ["<a>x</a>y", f"<a>x{CALL}"],
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["$$", {"type": "regex", "pattern": "[0-9]+;"}], ["##", const("x")]]},
        ["hi $$12; ##x and", "hi"],
        ["hi $$a"],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_text_is_allowed_if_it_matches_the_format(library, name):
    format, allowed, forbidden = FORMATS[name]
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    assert [text for text in allowed if not library.allows(constraint, text)] == []
    assert [text for text in forbidden if library.allows(constraint, text)] == []


def test_the_form_with_structures_and_triggers_is_understood(library):
    structures = [{"begin": f"<f={name}>", "schema": SCHEMA, "end": "</f>"} for name in ("foo", "bar")]
    constraint = Constraint("structural_tag", json.dumps({"structures": structures, "triggers": ["<f="]}))
    assert library.allows(constraint, f"a {CALL} b")
    assert not library.allows(constraint, "<f=baz>")


def test_special_tokens_in_a_tag_are_the_tokens_themselves(llguidance):
    format = tag("t", begin="<|im_start|>tool\n", content={"type": "any_text"}, end="<|im_start|>")
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    matcher = llguidance.compile(constraint).matcher()
    tokens = llguidance.tokens("<|im_start|>tool\nhello<|im_start|>")
    assert tokens[0] == tokens[-1] == 1
    for token in tokens:
        assert token in llguidance.allowed(matcher)
        matcher.accept([token])
    assert llguidance.allowed(matcher) == {0, 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "it must have `format`"),
        ([], "it must have `format`"),
        ({"format": {"type": "shoe"}}, "format: llguidance does not have the type 'shoe'"),
        ({"format": sequence(const("a"), {"type": "const_string"})}, "format.elements[1].value must be a text"),
        ({"format": sequence()}, "format.elements must be a list that is not empty"),
        ({"format": TRIGGERED | {"triggers": ["x"]}}, "format.tags[0].begin must start with exactly one trigger"),
        ({"format": {"type": "tag", "begin": "a", "content": const("b")}}, "format.end must be a text or a list"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "at #/format/json_schema/not: "),
        ({"structures": [], "triggers": ["a"]}, "structures must be a list that is not empty"),
    ],
)
def test_a_tag_that_is_not_valid_is_refused_with_the_place(llguidance, value, message):
    error = llguidance.refusal(Constraint("structural_tag", json.dumps(value)))
    assert message in error
