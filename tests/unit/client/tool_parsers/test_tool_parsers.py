"""Answers in the formats that models write become content and tool calls, wherever their text is cut."""

import json

import pytest
from support.answer_texts import TOOLS, divisions, in_order, parsed, pieces_of, tool_parser

from vllm_mp.client.answer_parser import AnswerParser
from vllm_mp.client.tool_parsers import TOOL_PARSERS, CallArguments, CallEnd, CallStart, ContentPiece

WEATHER = ("get_weather", '{"city": "Paris"}')
NOW = ("now", "{}")

CALLS = {
    "hermes": [
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [WEATHER]),
        (
            'I look it up.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
            "I look it up.\n\n",
            [WEATHER, NOW],
        ),
        ('<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n', "", [WEATHER]),
        ('<tool_call>{"name":"now"}</tool_call> Done.', " Done.", [NOW]),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOW]),
        (r'<tool_call>{"name": "get", "arguments": "{\"a\": 1}"}</tool_call>', "", [("get", '{"a": 1}')]),
        # Control characters within a string.
        (
            '<tool_call>{"name": "get", "arguments":\n{"a": "line\nline\t\0",\n"b\n": 1}}</tool_call>',
            "",
            [("get", '{"a": "line\\nline\\t\\u0000",\n"b\\n": 1}')],
        ),
        # Half a surrogate pair, which cannot be encoded.
        (
            r'<tool_call>{"name": "get", "arguments": "{\"a\": \"\ud800 \ud83d\ude00\"}"}</tool_call>',
            "",
            [("get", '{"a": "\ufffd 😀"}')],
        ),
        (
            '<tool_call>[\n{"name": "now", "arguments": {}},\n{"name": "now", "arguments": {}}\n]</tool_call>',
            "",
            [NOW, NOW],
        ),
        # Further keys.
        ('<tool_call>{"id": 1, "name": "now", "arguments": {}}</tool_call>', "", [NOW]),
        (
            r'<tool_call>{"why": {"a": ["}"]}, "name": "get_weather", "a\"b": null, '
            '"arguments": {"city": "Paris"}, "x": 1}</tool_call>',
            "",
            [WEATHER],
        ),
        # The end tag, or the last brace, is missing.
        ('<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now", "arguments": {}', "", [NOW, NOW]),
        ('<tool_call>{"name": "now", "arguments": {}\n</tool_call>!', "!", [NOW]),
        ('<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", [NOW]),
    ],
    "llama3_json": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [WEATHER]),
        ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [WEATHER]),
        ('{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
        (
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
            "",
            [WEATHER, NOW],
        ),
        ('{"name": "now", "parameters": {}}{"name": "now", "parameters": {}}', "", [NOW, NOW]),
        ('I ask:\n{"name": "now", "parameters": {}}\nReady.', "I ask:\n\nReady.", [NOW]),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
            '{"name": "now", "arguments": {}, "id": "D681PevKs"}]',
            "",
            [WEATHER, NOW],
        ),
        ('A moment.[TOOL_CALLS][{"name": "now", "arguments": {}}]', "A moment.", [NOW]),
        ('[TOOL_CALLS][{"number": 1, "name": "now", "arguments": {}}]', "", [NOW]),
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", [WEATHER, NOW]),
        ('[TOOL_CALLS]get_weather[CALL_ID]D681PevKs[ARGS]{"city": "Paris"}', "", [WEATHER]),
        ('[TOOL_CALLS]now{}[TOOL_CALLS]{"name": "now", "arguments": {}}', "", [NOW, NOW]),
    ],
    "qwen3_coder": [
        (
            "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</tool_call>",
            "I look.\n",
            [WEATHER],
        ),
        ("<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=now></function>", "", [NOW, NOW]),
        (
            '<tool_call><function=get_weather><parameter=city>a\n"b" </p>\n\n</parameter>\n<parameter=days>\n3\n'
            "</parameter><parameter=metric>True</parameter><parameter=unit>None</parameter><parameter=share>0.5"
            '</parameter><parameter=options>{"a": [1]}</parameter><parameter=places>[1, 2]</parameter>'
            "<parameter=level>1</parameter><parameter=anything>[]</parameter><parameter=unknown>1</parameter></tool_call>",
            "",
            [
                (
                    "get_weather",
                    r'{"city": "a\n\"b\" </p>\n", "days": 3, "metric": true, "unit": null, "share": 0.5, '
                    r'"options": {"a": [1]}, "places": [1, 2], "level": "1", "anything": [], "unknown": "1"}',
                )
            ],
        ),
        (
            "<function=get_weather><parameter=days>soon</parameter><parameter=options>{'a': x}</parameter>"
            "<parameter=unit>5</parameter></function>",
            "",
            [("get_weather", """{"days": "soon", "options": "{'a': x}", "unit": "5"}""")],
        ),
        # Python's lists and dicts, and words in any case.
        (
            "<function=get_weather><parameter=options>\n{'a': (True, None)}\n</parameter><parameter=places>['x', 1,]"
            "</parameter><parameter=metric>TRUE</parameter><parameter=unit>Null</parameter><parameter=share>[1, 'x']"
            "</parameter></function>",
            "",
            [
                (
                    "get_weather",
                    '{"options": {"a": [true, null]}, "places": ["x", 1], "metric": true, "unit": null, '
                    """"share": "[1, 'x']"}""",
                )
            ],
        ),
        # The end tags of parameters are missing.
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis <parameter=x>\n<parameter=days>\n3\n"
            "<parameter=unit>\nC\n\n</function>\n</tool_call>\n<function=get><parameter=a>x\n</function>",
            "",
            [("get_weather", r'{"city": "Paris <parameter=x>", "days": 3, "unit": "C\n"}'), ("get", '{"a": "x"}')],
        ),
    ],
    "pythonic": [
        ('[get_weather(city="Paris"), now()]', "", [WEATHER, NOW]),
        ("<|python_start|>[get_weather(city='Paris')]<|python_end|>", "", [WEATHER]),
        ("I ask:\n[now()]", "I ask:\n", [NOW]),
        ("[ now(), now() ,\n]", "", [NOW, NOW]),
        (
            "[get(a=-1, b=1.5e3, c=True, d=None, e=[1, 'x', {'k': false}], f={}, g=[], h=0x1F, i=.5, j=1_000,)]",
            "",
            [
                (
                    "get",
                    '{"a": -1, "b": 1.5e3, "c": true, "d": null, "e": [1, "x", {"k": false}], "f": {}, "g": [], '
                    '"h": 31, "i": 0.5, "j": 1000}',
                )
            ],
        ),
        (
            r"""[get(a="it's \"x\"\n\x41\u00e9\U0001F600\d\101", b='''"a" '' b''', c="")]""",
            "",
            [("get", r"""{"a": "it's \"x\"\nAé😀\\dA", "b": "\"a\" '' b", "c": ""}""")],
        ),
        (
            r'[get(a="\ud83d\ude00", b="\U0000d83d\U0000de00", c="\U0000d800")]',
            "",
            [("get", r'{"a": "\ud83d\ude00", "b": "\ud83d\ude00", "c": "\ud800"}')],
        ),
        (
            "[get(a=(1, 'x'), b=(), c=((1,), 2), d=(3), e=[(4)], f=({'k': (5, )}, ))]",
            "",
            [("get", '{"a": [1, "x"], "b": [], "c": [[1], 2], "d": 3, "e": [4], "f": [{"k": [5]}]}')],
        ),
        (
            "[get(a={1: 2, -1.5 : None, True: 'x', None: (), 'k' 'l': []})]",
            "",
            [("get", '{"a": {"1": 2, "-1.5": null, "true": "x", "null": [], "kl": []}}')],
        ),
        (
            """[get(a="x" 'y'\n'''z''', b=("x"\n "y"), c="" "", d="a""b")]""",
            "",
            [("get", '{"a": "xyz", "b": "xy", "c": "", "d": "ab"}')],
        ),
        (
            r"""[get(a=r"\d\"\n", b=R'\\', c=u"\n", d="\n" r'\n')]""",
            "",
            [("get", r"""{"a": "\\d\\\"\\n", "b": "\\\\", "c": "\n", "d": "\n\\n"}""")],
        ),
    ],
    "json": [
        (
            '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]',
            "",
            [WEATHER, NOW],
        ),
        ('{"name": "now", "parameters": {}}', "", [NOW]),
    ],
    "named": [('{"city": "Paris"}', "", [WEATHER])],
}

TEXTS = {
    "hermes": [
        "",
        " \n",
        "No call.",
        "The tag <tool_call> begins a call, and </tool_call> ends it.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get_", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "now", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "now", "name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "colour": 1}</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        '<tool_call>{"a": tru, "name": "now", "arguments": {}}</tool_call>',
        "<tool_call>\n",
        '<tool_call>\n{"name": "now", "argum',
        '{"name": "now", "arguments": {}}',
    ],
    "llama3_json": [
        '{"answer": 42}',
        '{"name": "Ada", "parameters": {}}',
        'See {"name": "now", "parameters": {}}',
        '<|python_tag|>now.call(query="x")',
        '{"name": "now", "parameters"',
        '{"id": 1, "name": "now", "parameters": {}}',
    ],
    "mistral": [
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "unknown"}]',
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]now[ARGS]1",
        "[TOOL_CALLS][now[ARGS]{}",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "Use <function=…> and <parameter=…>.",
        "<tool_call>\n<function=now",
    ],
    "pythonic": [
        "[1] is a note.",
        "[now]",
        "[unknown(a=1)]",
        '[now("Paris")]',
        "[now(a)]",
        "a[now()]",
        "now()",
        "[now(",
        "[,]",
        "[]",
    ],
    "json": ["No list.", "[1, 2]", '[{"name": "unknown", "parameters": {}}]'],
    "named": ["No object.", "[]"],
}

INCOMPLETE = {
    "hermes": [
        ('<tool_call>{"name": "get", "arguments": {"a": "b', "", '{"a": "b'),
        ('<tool_call>{"name": "get", "arguments": {"a": oops}}</tool_call>', "oops}}</tool_call>", '{"a": '),
        (r'<tool_call>{"name": "get", "arguments": {"a": "C:\dir"}}', 'dir"}}', '{"a": "C:\\'),
        ('<tool_call>{"name": "get", "arguments": {"a": ' + "[" * 99, "[" * 36, '{"a": ' + "[" * 63),
    ],
    "llama3_json": [('{"name": "get", "parameters": {"a": 01}}', "1}}", '{"a": 0')],
    "mistral": [("[TOOL_CALLS]get[ARGS]{a", "a", "{")],
    "qwen3_coder": [
        ("<function=get><parameter=a>\nx\n</param", "", '{"a": "x\\n</param'),
        ("<function=get><parameter=a>x</parameter>\nWell", "\nWell", '{"a": "x"'),
        ("<function=get><parameter=a>x</parameter>\n</func", "", '{"a": "x"'),
        ("<function=get_weather><parameter=days>1", "", '{"days": '),
        ("<function=get><parameter=a<b>x", "<parameter=a<b>x", ""),
    ],
    "pythonic": [
        ("[get(a=oops)]", "oops)]", '{"a": '),
        ("[get(a=1, 2)]", ", 2)]", '{"a": 1'),
        ("[get(a=1 b=2)]", " b=2)]", '{"a": 1'),
        (r'[get(a="\xq")]', r'\xq")]', '{"a": "'),
        ("[get(a=1--2)]", "1--2)]", '{"a": '),
        ("[get(a={x: 2})]", "x: 2})]", '{"a": {'),
        ("[get(a={[]: 2})]", "[]: 2})]", '{"a": {'),
        ("[get(a={1, 2})]", ", 2})]", '{"a": {"1"'),
        ("[get(a=(1, x))]", ", x))]", '{"a": [1, '),
        ("[get(a=(1 x))]", " x))]", '{"a": [1'),
        ("[get(a=('x", "", '{"a": ["x'),
        ("[get(a=(,))]", ",))]", '{"a": ['),
        ('[get(a="x" b=2)]', " b=2)]", '{"a": "x"'),
        ('[get(a="x" "y', "", '{"a": "xy'),
        ('[get(a=b"x")]', 'b"x")]', '{"a": '),
        ("[get(a=" + "(" * 65, "(", '{"a": ' + "[" * 64),
        ("[get(a=" + "[" * 65, "[", '{"a": ' + "[" * 64),
        ("[get(a=[1, Tr", "", '{"a": [1, '),
    ],
    "json": [('[{"name": "get", "parameters": {"a": 1,}}]', "}}]", '{"a": 1,')],
    "named": [('{"city": "Par', "", '{"city": "Par')],
}


def cases(table):
    return [pytest.param(name, *row if isinstance(row, tuple) else (row,)) for name in table for row in table[name]]


@pytest.mark.parametrize(("name", "text", "content", "calls"), cases(CALLS))
def test_calls_are_found_in_what_models_write(name, text, content, calls):
    for parts in divisions(text):
        answer = parsed(tool_parser(name), parts)
        assert answer.content == content
        assert [(call.name, call.arguments, call.complete) for call in answer.calls] == [
            (*call, True) for call in calls
        ]
    for call in answer.calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(("name", "text"), cases(TEXTS))
def test_text_that_is_no_call_of_a_known_tool_is_content(name, text):
    for parts in divisions(text):
        pieces = pieces_of(tool_parser(name), parts)
        assert {type(piece) for piece in pieces} <= {ContentPiece}
        assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize(("name", "text", "content", "arguments"), cases(INCOMPLETE))
def test_call_whose_arguments_break_off_is_incomplete_and_the_rest_is_content(name, text, content, arguments):
    for parts in divisions(text):
        answer = parsed(tool_parser(name), parts)
        (call,) = answer.calls
        assert (answer.content, call.arguments, call.complete) == (content, arguments, False)


@pytest.mark.parametrize(("name", "text"), [(name, row[0]) for name in CALLS for row in CALLS[name]])
def test_order_of_pieces_does_not_depend_on_the_cuts(name, text):
    whole, *others = [in_order(pieces_of(tool_parser(name), parts)) for parts in divisions(text)]
    assert all(other == whole for other in others)


def test_name_comes_first_and_arguments_follow_as_they_arrive():
    parser = tool_parser("hermes")
    assert parser.feed('Well. <tool_call>{"name": "get", "arguments": ') == [ContentPiece("Well. ")]
    assert parser.feed('{"a') == [CallStart(0, "get"), CallArguments(0, '{"a')]
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]
    assert parser.feed("}") == [CallArguments(0, "}"), CallEnd(0)]
    assert parser.feed("}</tool_call>") == []
    assert parser.finish() == []


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_strings_arrive_before_they_end_in_formats_without_json(name):
    parser = tool_parser(name)
    parser.feed({"qwen3_coder": "<function=get><parameter=a>b", "pythonic": '[get(a="b'}[name])
    assert parser.feed("x\ty") == [CallArguments(0, r"x\ty")]


@pytest.mark.parametrize(
    ("name", "text", "passed"),
    [
        ("hermes", "a < b <to", "a < b "),
        ("hermes", "a <tool_call>", "a "),
        ("hermes", 'a <tool_call>{"name": "x', 'a <tool_call>{"name": "x'),
        ("llama3_json", '{"name": "g', ""),
        ("llama3_json", '{"title', '{"title'),
        ("mistral", "[TOOL_", ""),
        ("mistral", "[TOOLS", "[TOOLS"),
        ("qwen3_coder", "<func", ""),
        ("pythonic", "[get_we", ""),
        ("pythonic", "[get_wh", "[get_wh"),
    ],
)
def test_content_is_held_back_only_while_it_may_begin_a_call(name, text, passed):
    for parts in divisions(text):
        parser = tool_parser(name)
        assert "".join(piece.text for part in parts for piece in parser.feed(part)) == passed


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
@pytest.mark.parametrize("chat_template", ["", "[ARGS]"])
def test_constrained_answer_is_parsed_as_its_calls(name, chat_template):
    call_format = TOOL_PARSERS.get(name).call_format(TOOLS, chat_template)
    arguments = ['{"city": "Paris"}', '{"a": [1, 2]}', "{}"]
    calls = [call.begin + text + call.end for call, text in zip(call_format.calls, arguments, strict=True)]
    text = call_format.begin + call_format.separator.join(calls) + call_format.end
    assert text.startswith(call_format.trigger)
    for parts in divisions(text):
        answer = parsed(tool_parser(name), parts)
        assert answer.content == ""
        assert [(call.name, call.arguments) for call in answer.calls] == list(
            zip((tool.name for tool in TOOLS), arguments, strict=True)
        )


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
@pytest.mark.parametrize("chat_template", ["", "[ARGS]"])
def test_constrained_answer_that_is_cut_off_anywhere_has_no_content(name, chat_template):
    call_format = TOOL_PARSERS.get(name).call_format(TOOLS, chat_template)
    calls = [call.begin + '{"a": [1]}' + call.end for call in call_format.calls]
    text = call_format.begin + call_format.separator.join(calls) + call_format.end
    before = "Well.\n" if call_format.trigger else ""
    for end in range(1, len(text)):
        for parts in divisions(text[:end]):
            answer = parsed(AnswerParser(tools=tool_parser(name), calls_after=""), parts)
            assert answer.content == ""
            assert [call.name for call in answer.calls] == [tool.name for tool in TOOLS[: len(answer.calls)]]
        if call_format.trigger and end >= len(call_format.trigger):
            parser = AnswerParser(tools=tool_parser(name), calls_after=call_format.trigger)
            assert parsed(parser, divisions(before + text[:end])[2]).content.rstrip() == before.rstrip()


def test_formats_without_json_have_no_grammar():
    assert TOOL_PARSERS.get("pythonic").call_format(TOOLS, "") is None
    assert TOOL_PARSERS.get("qwen3_coder").call_format(TOOLS, "") is None
