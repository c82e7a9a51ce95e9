"""Parsers are chosen by name or by the chat template, and operators add their own from a file."""

import pytest
from support.answer_texts import split

from vllm_mp.client.answers.parser_registry import ParserRegistry, load_parser_plugin
from vllm_mp.client.reasoning import REASONING_PARSERS, reasoning_parser_for_template
from vllm_mp.client.tool_parsers import TOOL_PARSERS, HermesToolParser, tool_parser_for_template

# Parts of the chat templates of the families.
QWEN25 = r"""{{- "</tools>\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}" }}"""
QWEN3 = QWEN25 + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
HERMES = '{{ \'<tool_call>\\n{"arguments": <args-dict>, "name": <function-name>}\\n</tool_call>\' }}'
QWEN3_CODER = "{{ '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1' }}"
LLAMA31 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.' }}"""
LLAMA32_PYTHONIC = "{{- 'Respond in the format [func_name1(params_name1=params_value1, ...), func_name2(params)] ' }}"
MISTRAL = '{{- "[TOOL_CALLS] [" }}'
MAGISTRAL = "{{- '[THINK]' + text + '[/THINK]' }}{{- '[TOOL_CALLS]' + name + '[ARGS]' }}"
R1 = "{% set content = content.split('</think>')[-1] %}{{ '<｜Assistant｜><think>\\n' }}"
DEEPSEEK_V31 = "{% if thinking %}{{ '<｜Assistant｜><think>' }}{% else %}{{ '<｜Assistant｜></think>' }}{% endif %}"
GLM45 = "{{ '<tool_call>' + name }}<arg_key>{{ key }}</arg_key>"
SMOLLM2 = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"


@pytest.mark.parametrize(
    ("chat_template", "tools", "reasoning"),
    [
        (QWEN25, "hermes", None),
        (QWEN3, "hermes", "qwen3"),
        (HERMES, "hermes", None),
        (QWEN3_CODER, "qwen3_coder", None),
        (LLAMA31, "llama3_json", None),
        (LLAMA32_PYTHONIC, "pythonic", None),
        (MISTRAL, "mistral", None),
        (MAGISTRAL, "mistral", "mistral"),
        (R1, None, "deepseek_r1"),
        (DEEPSEEK_V31, None, "qwen3"),
        (GLM45, None, None),
        (SMOLLM2, None, None),
    ],
)
def test_template_chooses_the_parsers(chat_template, tools, reasoning):
    found = tool_parser_for_template(chat_template), reasoning_parser_for_template(chat_template)
    assert tuple(parser and parser.name for parser in found) == (tools, reasoning)


def test_unknown_name_is_refused_with_the_names_that_exist():
    with pytest.raises(ValueError, match=r"there is no tool parser 'hermse'; use one of hermes, json, llama3_json, "):
        TOOL_PARSERS.get("hermse")
    with pytest.raises(ValueError, match=r"no reasoning parser 'o1'; use one of deepseek_r1, mistral, qwen3"):
        REASONING_PARSERS.get("o1")


def test_class_of_an_operator_comes_before_the_others():
    registry = ParserRegistry("tool parser")
    registry.add(HermesToolParser)

    class Own(HermesToolParser):
        name = "own"

    registry.add(Own)
    assert registry.for_template(HERMES) is Own
    registry.add(HermesToolParser)
    assert registry.for_template(HERMES) is HermesToolParser
    assert registry.names() == ["hermes", "own"]


def test_plugin_registers_its_parser(tmp_path, monkeypatch):
    monkeypatch.setattr(TOOL_PARSERS, "_classes", dict(TOOL_PARSERS._classes))
    plugin = tmp_path / "angles.py"
    plugin.write_text(
        "from vllm_mp.client.tool_parsers import ToolParser, register_tool_parser\n"
        "@register_tool_parser\n"
        "class Angles(ToolParser):\n"
        "    name = 'angles'\n"
        "    def parse(self):\n"
        "        while (yield from self.answer.find('<<')):\n"
        "            yield from self.answer.literal('<<')\n"
        "            name = yield from self.answer.one_of(tuple(self.tools), before=('>>',))\n"
        "            if name and (yield from self.answer.literal('>>')):\n"
        "                self.answer.start_call(name)\n"
        "            self.answer.release()\n"
    )
    load_parser_plugin(str(plugin))
    answer = split("angles", "a <<b>> <<now>>")
    # A call that its parser leaves open ends with the answer.
    assert (answer.content, [(call.name, call.complete) for call in answer.calls]) == ("a <<b>> ", [("now", False)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a Python file"),
        ("oops(", "failed: SyntaxError: .*; correct it"),
        ("import no_such_module", "failed: ModuleNotFoundError: No module named 'no_such_module'; correct it"),
    ],
)
def test_plugin_that_cannot_be_loaded_is_refused(tmp_path, text, message):
    plugin = tmp_path / "plugin.py"
    if text is not None:
        plugin.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_parser_plugin(str(plugin))
