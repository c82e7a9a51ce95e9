"""What structural tags hold output to."""

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
    "dispatch_once": (
        {
            "type": "dispatch",
            "loop": False,
            "rules": [
                [
                    "<f=",
                    sequence(
                        tag("", begin="bar>"),
                        {"type": "repeat", "min": 0, "max": 1, "content": tag("", begin="|<f=bar>")},
                    ),
                ]
            ],
        },
        ["hi", f"hi {CALL}", f"{CALL}|{CALL}"],
        [f"{CALL} ", f"{CALL}|{CALL}|{CALL}", "<f=baz>"],
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


def test_special_tokens_in_a_tag_are_the_tokens_themselves(library):
    format = tag("t", begin="<|im_start|>tool\n", content={"type": "any_text"}, end="<|im_start|>")
    constraint = Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": format}))
    matcher = library.compile(constraint).matcher()
    tokens = library.tokens("<|im_start|>tool\nhello<|im_start|>")
    assert tokens[0] == tokens[-1] == 1
    for token in tokens:
        assert token in library.allowed(matcher)
        matcher.accept([token])
    assert library.allowed(matcher) == {0, 2}


UNHELD = {
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "map": {"type": "object", "propertyNames": {"type": "string"}, "minProperties": 3},
        "word": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        "share": {"type": "number", "multipleOf": 0.01, "minimum": 0},
        "same": {"$ref": "#/$defs/same"},
    },
    "required": ["list"],
    "additionalProperties": False,
    "$defs": {"same": {"type": "boolean"}},
}


def test_schema_that_is_lenient_is_held_as_far_as_a_grammar_can(library):
    format = {"type": "json_schema", "json_schema": UNHELD}
    strict, lenient = (
        Constraint("structural_tag", json.dumps({"type": "structural_tag", "format": {**format, "lenient": each}}))
        for each in (False, True)
    )
    assert "format.json_schema: at #/properties/map/minProperties" in library.refusal(strict)
    assert library.allows(lenient, '{"list":[1,1],"map":{"a":1},"word":"x","share":0.5,"same":true}')
    for text in ('{"list":["a"]}', '{"map":{}}', '{"list":[],"other":1}', '{"list":[],"same":1}'):
        assert not library.allows(lenient, text), text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "it must have `format`"),
        ([], "it must have `format`"),
        ({"format": {"type": "shoe"}}, "format: the type 'shoe' is not served; use one of any_text, const_string,"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "`max_tokens` of a text is not served; use `max_chars`"),
        (
            {"format": {"type": "regex", "pattern": "a", "excludes": ["a"]}},
            "`excludes` of a regex is not served; leave",
        ),
        ({"format": {"type": "json_schema", "style": "qwen_xml"}}, "`style`, `any_order` and `excludes` of JSON are"),
        ({"format": sequence(const("a"), {"type": "const_string"})}, "format.elements[1].value must be a text"),
        ({"format": sequence()}, "format.elements must be a list that is not empty"),
        ({"format": TRIGGERED | {"triggers": ["x"]}}, "format.tags[0].begin must start with exactly one trigger"),
        ({"format": {"type": "tag", "begin": "a", "content": const("b")}}, "format.end must be a text or a list"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "at #/format/json_schema/not: "),
        (
            {"format": {"type": "grammar", "grammar": "root ::= a"}},
            "format.grammar: the grammar cannot be read as GBNF",
        ),
        ({"structures": [], "triggers": ["a"]}, "structures must be a list that is not empty"),
    ],
)
def test_a_tag_that_is_not_valid_is_refused_with_its_path(library, value, message):
    error = library.refusal(Constraint("structural_tag", json.dumps(value)))
    assert message in error
