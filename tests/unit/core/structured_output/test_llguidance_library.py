"""What llguidance holds output to, for each kind of constraint."""

import json
import re

import numpy as np
import pytest

from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.masks import fill_masks
from vllm_mp.requests.structured_outputs import Constraint

NUM_WORDS = (49_152 + 13 + 31) // 32
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-zé]+$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "size": {"enum": ["S", "größer"]},
            "born": {"type": "string", "format": "date"},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
        },
        "required": ["name", "age"],
    }
)


@pytest.mark.parametrize(
    ("constraint", "allowed", "forbidden"),
    [
        (
            Constraint("json", PERSON),
            [
                '{"name": "Zoé", "age": 130}',
                '{"name":"Al","age":0,"size":"größer","born":"2001-12-31","children":[{"name":"Bo","age":7}]}',
            ],
            ['{"name": "zoé", "age": 1}', '{"name": "Zoé", "age": 131}', '{"name": "Zoé"}', "[]", ""],
        ),
        (Constraint("json", '{"enum":[{"a":1}]}', any_whitespace=False), ['{"a":1}'], ['{"a":\n1}', '{ "a":1}']),
        (
            Constraint("json", '{"type":"object","properties":{"a":{"type":"null"}}}', additional_properties=False),
            ['{"a": null}', "{}"],
            ['{"a": null, "b": 1}'],
        ),
        (Constraint("json_object"), ['{"a": {"b": [true]}}', "{}"], ["[1]", '"a"']),
        (Constraint("regex", r"(é|日本)+/[0-9]{2}"), ["é日本/07"], ["/07", "é/0", "é/007"]),
        (Constraint("choice", '["ja", "nein \\"doch\\"", "日本\\n"]'), ["ja", 'nein "doch"', "日本\n"], ["j", "jaja"]),
        (Constraint("grammar", 'root ::= "(" root ")" | [0-9]+'), ["((42))", "7"], ["((42)", "()"]),
        (Constraint("grammar", 'start: "(" start ")" | /[0-9]+/'), ["((42))", "7"], ["((42)", "()"]),
    ],
    ids=["json", "compact", "closed", "json_object", "regex", "choice", "gbnf", "lark"],
)
def test_a_text_is_allowed_if_it_matches_the_constraint(library, constraint, allowed, forbidden):
    assert [text for text in allowed if not library.allows(constraint, text)] == []
    assert [text for text in forbidden if library.allows(constraint, text)] == []


def test_token_that_ends_the_reasoning_may_begin_the_constrained_text(library):
    texts = ((token, library.tokenizer.decode_bytes([token])) for token in range(library.source.vocab_size))
    last, rest = next((token, text[1:].decode()) for token, text in texts if re.fullmatch(rb">[!-~]+", text))
    constraint = Constraint(
        "choice", json.dumps([rest + "yes"]), starts_after=tuple(library.tokens("</think>")), reasoning_start=-1
    )
    output = ConstrainedOutput(constraint, may_force=False)
    output.begin(library.compile(constraint))
    matcher = output.matcher_after(np.array([*library.tokens("Well.</think"), last], np.int32))
    assert output.error is None
    [first, *_] = library.tokens("yes")
    assert first in library.allowed(matcher)
    assert library.tokens(rest)[0] not in library.allowed(matcher)


def test_compact_json_has_no_whitespace(library):
    constraint = Constraint("json_object", any_whitespace=False)
    assert library.allows(constraint, '{"a":[1,2]}')
    assert not library.allows(constraint, '{"a": 1}')


def test_whitespace_pattern_says_which_whitespace_json_may_have(library):
    constraint = Constraint("json_object", whitespace_pattern=" ?")
    assert library.allows(constraint, '{"a": 1}')
    assert not library.allows(constraint, '{"a":  1}')


def test_only_the_end_of_sequence_follows_the_end_of_a_grammar(library):
    matcher = library.compile(Constraint("choice", '["ja"]')).matcher()
    matcher.accept(library.tokens("ja"))
    assert library.allowed(matcher) == {0, 2}
    matcher.accept([2])
    assert library.allowed(matcher) == {0, 2}
    matcher.accept([0, 2])
    assert matcher.forced() == []
    with pytest.raises(GrammarError, match="token 5 "):
        matcher.accept([5])


def test_padding_of_the_vocabulary_is_never_allowed(library):
    allowed = library.allowed(library.compile(Constraint("regex", ".*")).matcher())
    assert len(allowed) > 40_000
    assert max(allowed) < 49_152


def test_forced_tokens_are_allowed_one_after_the_other(library):
    schema = '{"type":"object","properties":{"surname":{"type":"boolean"}},"required":["surname"]}'
    matcher = library.compile(Constraint("json", schema, any_whitespace=False)).matcher()
    text = ""
    while forced := matcher.forced():
        for token in forced:
            assert token in library.allowed(matcher)
            matcher.accept([token])
        text += library.tokenizer.decode_str(forced)
    assert '{"surname":'.startswith(text)
    assert len(text) > 6


@pytest.mark.parametrize(
    ("kind", "form", "text"),
    [
        ("json", '{"const":{"<|im_start|>":"<|im_end|>"}}', '{"<|im_start|>":"<|im_end|>"}'),
        ("choice", '["see <|im_end|> here"]', "see <|im_end|> here"),
        ("regex", r"a<\|im_start\|>b", "a<|im_start|>b"),
        ("grammar", 'root ::= "a<|im_end|>b"', "a<|im_end|>b"),
    ],
)
def test_the_text_of_a_special_token_is_spelled_with_ordinary_tokens(library, kind, form, text):
    assert library.spelled(Constraint(kind, form, any_whitespace=False)) == text


def test_a_lark_grammar_may_name_special_tokens(library):
    matcher = library.compile(Constraint("grammar", 'start: "a" <|im_start|> "<|im_start|>"')).matcher()
    matcher.accept(library.tokens("a"))
    assert [library.allowed(matcher)] == [set(library.tokens("<|im_start|>"))]
    matcher.accept(library.tokens("<|im_start|>"))
    assert library.allowed(matcher).isdisjoint(library.tokens("<|im_start|>"))


def test_matcher_rebuilt_from_tokens_goes_on_as_the_first(library):
    grammar = library.compile(Constraint("json", PERSON))
    tokens = library.tokens('{"name": "Zoé", "age": 13, "children": [{"name": "Bo", "age": 7}]}')
    matcher = grammar.matcher()
    for position, token in enumerate(tokens):
        rebuilt = grammar.matcher()
        rebuilt.accept(tokens[:position])
        assert library.allowed(rebuilt) == library.allowed(matcher)
        assert rebuilt.forced() == matcher.forced()
        matcher.accept([token])


def test_drafts_have_the_masks_that_follow_them_and_do_not_advance_the_matcher(library):
    grammar = library.compile(Constraint("json", PERSON))
    tokens = library.tokens('{"name": "Zoé", "age": 13, "children": []}')
    matcher, ahead = grammar.matcher(), grammar.matcher()
    matcher.accept(tokens[:3])
    ahead.accept(tokens[:3])
    masks, expected = np.zeros((2, len(tokens) - 3, NUM_WORDS), np.int32)
    matcher.fill_ahead(tokens[3:], masks)
    for token, mask in zip(tokens[3:], expected, strict=True):
        ahead.accept([token])
        ahead.fill(mask)
    assert (masks == expected).all()
    assert matcher.num_allowed(tokens[3:]) == len(tokens) - 3
    matcher.accept(tokens[3:])


def test_drafts_are_allowed_up_to_the_first_that_the_grammar_forbids(library):
    matcher = library.compile(Constraint("choice", '["abc","abd"]')).matcher()
    drafts = [*library.tokens("ab"), *library.tokens("7"), *library.tokens("c")]
    allowed = matcher.num_allowed(drafts)
    assert 0 < allowed == len(library.tokens("ab"))
    masks = np.zeros((len(drafts), NUM_WORDS), np.int32)
    matcher.fill_ahead(drafts, masks)
    assert masks[:allowed].any(1).all()
    assert not masks[allowed:].any()


@pytest.mark.parametrize("may_use_threads", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_masks_of_many_rows_are_those_of_each_row(library, num_rows, may_use_threads):
    grammar = library.compile(Constraint("json", PERSON))
    tokens = library.tokens('{"name": "Zoé", "age": 13, "children": [{"name": "Bo", "age": 7}]}')
    matchers = [grammar.matcher() for _ in range(num_rows)]
    for row, matcher in enumerate(matchers):
        matcher.accept(tokens[: row % len(tokens)])
    masks = np.full((num_rows, NUM_WORDS), -1, np.int32)
    assert fill_masks(dict(enumerate(matchers)), masks, may_use_threads) == {}
    alone = np.full_like(masks, -1)
    for row, matcher in enumerate(matchers):
        matcher.fill(alone[row])
    assert (masks == alone).all()


@pytest.mark.parametrize(("num_rows", "may_use_threads"), [(2, True), (40, True), (40, False)])
def test_a_grammar_that_reaches_a_limit_fails_alone(library, num_rows, may_use_threads):
    good = library.compile(Constraint("json_object"))
    bad = library.compile(Constraint("grammar", 'start: ("a" "b"?){1,100000}')).matcher()
    try:
        while True:
            bad.accept(library.tokens("a"))
    except GrammarError:
        pass
    matchers = [good.matcher() for _ in range(num_rows)]
    matchers[1] = bad
    masks = np.zeros((num_rows, NUM_WORDS), np.int32)
    assert list(fill_masks(dict(enumerate(matchers)), masks, may_use_threads)) == [1]
    assert set(np.flatnonzero(masks.any(axis=1))) >= {0, *range(2, num_rows)}


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json", '{"properties":{"a/b":{"type":"array","uniqueItems":true}}}'), "at #/properties/a~1b/uniq"),
        (Constraint("json", '{"properties":{"a":{"pattern":"(x","type":"string"}}}'), "at #/properties/a/pattern: "),
        (Constraint("json", '{"properties":{"a":{"$ref":"#/$defs/b"}}}'), r"\$defs/b"),
        (Constraint("json", '{"type":"shoe"}'), "shoe"),
        (Constraint("json", "false"), "nothing matches"),
        (Constraint("json", '{"$ref":"#"}'), "at #/\\$ref: '#' leads back to itself"),
        (Constraint("json", '{"anyOf":[{"$ref":"#"}]}'), "no value of the schema ends"),
        (Constraint("grammar", "start: start"), "no text that ends: .* itself again"),
        (Constraint("json", '{"type":"integer","minimum":3,"maximum":2}'), "minimum"),
        (Constraint("regex", "a(?=b)"), "look-ahead"),
        (Constraint("regex", "(a"), "unclosed group"),
        (Constraint("grammar", "root ::= foo"), "foo"),
        (Constraint("grammar", "start: foo"), "foo"),
        (Constraint("grammar", "start: <no>"), r"no special token '<no>'; use one of .*<\|im_start\|>"),
        (Constraint("choice", "[]"), "list of strings"),
    ],
    ids=lambda value: value.text if isinstance(value, Constraint) else "",
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(library, constraint, message):
    error = library.refusal(constraint)
    assert re.search(message, error), error
    assert "\n" not in error


@pytest.mark.parametrize(
    ("constraint", "reason", "remedy"),
    [
        (Constraint("regex", "a(?=b)"), "look-ahead", "; use the syntax of Rust's crate regex"),
        (Constraint("regex", r"(a)\1"), "backreferences are not supported", "; use the syntax of Rust's crate regex"),
        (Constraint("json", r'{"type":"string","pattern":"a$b"}'), "at #/pattern: lookarounds", "; use the syntax"),
        (Constraint("json", r'{"type":"string","pattern":"\\cC"}'), "unrecognized escape", "; use the syntax"),
        (Constraint("json", '{"uniqueItems":true}'), "unsupported keywords: 'uniqueItems'", "; leave them out"),
        (
            Constraint("json", '{"type":"number","maximum":1e300}'),
            "at #/maximum: Unable to hold",
            "; use smaller numbers",
        ),
        (
            Constraint("json", '{"$schema":"http://a.b/c"}'),
            "at #/$schema: Resource 'http://a.b/c' is",
            "leave $schema out",
        ),
        (
            Constraint("json", '{"properties":{"type":{"type":["string","strin"]}}}'),
            "at #/properties/type/type: 'strin' is not a type",
            "; use string, number",
        ),
        (
            Constraint("json", '{"items":{"$ref":"#/$defs/a"}}'),
            "at #/items/$ref: the schema has no '/$defs/a'",
            "; add it, or correct the reference",
        ),
    ],
    ids=lambda value: value.text if isinstance(value, Constraint) else "",
)
def test_what_the_library_lacks_is_named_with_a_remedy(library, constraint, reason, remedy):
    error = library.refusal(constraint)
    assert reason in error
    assert remedy in error
