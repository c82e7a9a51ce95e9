"""What grammars in GBNF hold output to: the same as in llama.cpp and vLLM."""

import re

import pytest

from vllm_mp.core.structured_output.gbnf import gbnf_to_lark, is_gbnf
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.requests.structured_outputs import Constraint

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
LIST = r'root ::= ("- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n")+'


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        (ARITHMETIC, ["a+1=2\n", "(a +1 )*3 = b\n"], ["a+1\n", "a=\n"]),
        (JSON, ['{"a": 1, "b": [true, "x\\n", null]}', '{\n  "ab": -10.5e3\n}'], ['{"a"}', '{"a": 01}', '"\x7f"']),
        (LIST, ["- ab c\n- d\n"], ["- \n", "- a\u2028\n"]),
        ('root ::= word "end"\nword ::= [a-z]+', ["abend", "endend"], ["end", "aben"]),
        ('root ::= "true" | [a-z]+', ["true", "trust", "t"], ["", "1"]),
        ('root ::= .* "END"', ["END", "a\nENEND"], ["EN"]),
        ('root ::= digits "," digits{2}\ndigits ::= [0-9]+', ["1,23"], ["1,2", "1"]),
        (r'root ::= "\u0041bcd" "\x41b" "\U0001F600"', ["AbcdAb😀"], ["䆼d"]),
        (r'root ::= "\\\"\n\t\[\]\/\-" "it\'s \?"', ["\\\"\n\t[]/-it's ?"], []),
        ('root ::= "é/日\x7f" ""', ["é/日\x7f"], ["é/日"]),
        (r"root ::= [\u00e0-\u00ff/\]\-\\^x-z-]+", ["éà/]-\\^y"], ["a", "["]),
        (r"root ::= [-+*/] [^^\]] [^]", ["-a]", "+[^"], ["-^a", ",aa"]),
        ('root ::= "a" # comment "\n  | "b"\n  "c"\n\n# "d"\n', ["a", "bc"], ["b", "c"]),
        ('root::=("a"|\n("b" "c"))*', ["", "abca"], ["b"]),
        ('root ::= a-b a_b Ab 5\na-b ::= "x"\na_b ::= "y"\nAb ::= "z"\n5 ::= "!"', ["xyz!"], []),
        ('root ::= "a"{2} "b"{ 1, } "c"{1,2} "d"? ()', ["aabbcc", "aabcd"], ["aab", "abc", "aabccc"]),
        ('root ::= "(" root ")" | ("a"* )*', ["((aa))", "()"], ["(a", "a)"]),
        ("root ::= ", [""], ["a"]),
        ("root ::= ([a-z]+ | [0-9]+)* [.]", [".", "a1bc2."], ["", "a", "a..", "A."]),
        ('root ::= "(" root ")" | word* word?\nword ::= [a-z]+ "-"*', ["", "(ab-c--)", "((a))"], ["-a", "(a", "a)"]),
        ('root ::= item root | item\nitem ::= [a-z] item | ";"', ["a;", ";ab;"], ["", "a", ";a"]),
        ('root ::= a\na ::= "x" b | "."\nb ::= "y" a', [".", "xy.", "xyxy."], ["x.", "xyx."]),
        ('root ::= a\na ::= "x" a "y" | "z"* "z"*', ["", "zz", "xzy", "xxyy"], ["xzz", "xyy"]),
        ('root ::= [ab]* "a" [ab]{70} [ab]*', ["a" * 71, "bab" * 30], ["a" * 70, "b" * 80]),
        (r'root ::= [^\U00010000-\U0010ffff"]* [^"]* "é"', ["é", "日😀😀é"], ['"é', "日"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_text_is_allowed_if_the_grammar_derives_it(library, grammar, allowed, forbidden):
    constraint = Constraint("grammar", grammar)
    assert [text for text in allowed if not library.allows(constraint, text)] == []
    assert [text for text in forbidden if library.allows(constraint, text)] == []


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ("root ::= word+\nword ::= [a-z]+", "abcdefgh" * 500),
        ("root ::= [a-z]* [a-z]* [a-z ]*", "abcdefgh" * 500 + " a"),
        ("root ::= ((([a-z]*)* | [ ]+)*)+", "abc defgh " * 400),
        ("root ::= [a-z] root | [a-z]", "abcdefgh" * 500),
        (
            'root ::= "(" root ")" | text\ntext ::= (word | space)+\nword ::= [a-z]+\nspace ::= " "*',
            "((abc  de " + "x" * 4000 + "))",
        ),
        (r'root ::= "(" (root [a-z]* [a-z]*) ")" | "-"', "(-" + "abcdefgh" * 500 + ")"),
        (r'root ::= "\"" (char+ | "\\" .)* "\"" ws' + '\nchar ::= [^"\\\\]\nws ::= [ ]*', '"' + "ab\\n" * 1000 + '" '),
    ],
    ids=lambda value: value[:20],
)
def test_a_long_text_may_be_split_in_many_ways(library, grammar, text):
    matcher = library.compile(Constraint("grammar", grammar)).matcher()
    tokens = library.tokens(text)
    for begin in range(0, len(tokens), 200):
        matcher.accept(tokens[begin : begin + 200])
        allowed = library.allowed(matcher)
    assert len(text) > 3000
    assert library.eos in allowed


@pytest.mark.parametrize("command", ['"name%d" ws arg ws arg', 'ws "name%d" ws arg ws arg ws'])
def test_a_grammar_may_have_many_alternatives_with_repetitions(library, command):
    commands = " | ".join(command % number for number in range(200))
    grammar = f'root ::= cmd ("\\n" cmd)*\ncmd ::= {commands}\narg ::= [a-z0-9]+\nws ::= [ \\t]*'
    assert library.allows(Constraint("grammar", grammar), "name7  some thing\nname142 other 2\nname199 a b")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= a\na ::= "x" foo\nb ::= ""', "rule 'a', line 2: the rule 'foo' is not defined"),
        ('a ::= "x"', r"no rule 'root', .*; add `root ::= …`"),
        ('root ::= "a"\n\nroot ::= "b"', "rule 'root', line 3: the rule is defined twice"),
        ('root ::= a\na ::= "b" )', r"rule 'a', line 2: expected an expression, \| or a rule \(`name ::=`\), got '\)'"),
        ('root ::= ("a"', r"rule 'root', line 1: expected an expression, \| or \), got 'the end of the grammar'"),
        ('root ::= "a"**', r"line 1: expected an expression, .*, got '\*'"),
        ("root ::= * a", r"line 1: expected an expression, .*, got '\*'"),
        (
            "root ::= \"a\" |\n  'b'",
            "rule 'root', line 2: cannot read \"'b'\"; a literal must end with a quotation mark",
        ),
        ('root ::= "a\nb ::= c', "rule 'root', line 1: cannot read .*; a literal must end with a quotation mark"),
        ('root ::= "a"{3,1}', r"line 1: the first number of \{3,1\} must not exceed the second"),
        (r'root ::= "\d"', r"line 1: unknown escape \\d; use one of \\n, .*, or a class"),
        (r"root ::= [\ud83d]", r"line 1: \\ud83d is no character; write one beyond \\uFFFF as \\U0001F600"),
        (r'root ::= "\x4"', r"line 1: unknown escape \\x"),
        ("root ::= [z-a]", "line 1: the range z-a is reversed"),
        ("root ::= []", r"line 1: the class \[\] contains no character"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "groups are nested deeper than 64 levels"),
        ('root ::= "' + "a" * 60_001 + '"', "line 1: the grammar has more than 60000 characters in literals"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_gbnf_is_refused_with_the_rule_the_line_and_what_was_expected(grammar, message):
    with pytest.raises(GrammarError) as error:
        gbnf_to_lark(grammar)
    assert re.search(message, str(error.value)), error.value


def test_gbnf_and_lark_are_told_apart():
    assert is_gbnf('# comment\nroot::="a"')
    assert not is_gbnf('start: "a"\n// b ::= c')
