"""Calls of tools and reasoning over HTTP, with OpenAI's own client and a core that holds calls to their schemas."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from support.grammar_library import Library
from support.server_process import served
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from vllm_mp import SamplingParams
from vllm_mp.client.tool_parsers import TOOL_PARSERS
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.server.openai.answer_parts import read_answer_format
from vllm_mp.server.openai.tools import FunctionDefinition, read_tools

pytestmark = pytest.mark.usefixtures("forked_programs")

TEMPLATE = Path(__file__).parents[1] / "support" / "tool_template.jinja"
MODEL = "model"
MESSAGES = [{"role": "user", "content": "How is the weather in Bern?"}]
RANDOM = {"model": MODEL, "temperature": 1.0, "max_tokens": 200, "seed": 5}


class GetWeather(pydantic.BaseModel):
    """Return the weather of a city."""

    city: Literal["Bern", "Basel"]
    days: int = pydantic.Field(ge=1, le=9)


class SetAlarm(pydantic.BaseModel):
    hour: int = pydantic.Field(ge=0, le=23)


TOOLS = [openai.pydantic_function_tool(GetWeather), openai.pydantic_function_tool(SetAlarm)]


@pytest.fixture(scope="module")
def server(small_model, tmp_path_factory):
    """A server of a small random model with a chat template that knows tools and thinking."""
    folder = tmp_path_factory.mktemp("tools")
    with served(str(small_model), folder, "--chat-template", str(TEMPLATE), "--served-model-name", MODEL) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def named(name):
    return {"type": "function", "function": {"name": name}}


def checked(calls):
    """Return the parsed arguments of calls, which must be the arguments of a tool."""
    kinds = {kind.__name__: kind for kind in (GetWeather, SetAlarm)}
    return [kinds[call.function.name].model_validate_json(call.function.arguments) for call in calls]


@pytest.mark.parametrize("choice", ["required", named("SetAlarm")], ids=["required", "named"])
def test_a_call_that_must_be_made_has_arguments_of_its_schema(client, choice):
    request = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **RANDOM}
    answer = client.chat.completions.create(n=3, **request)
    for answered in answer.choices:
        [call] = answered.message.tool_calls
        [arguments] = checked([call])
        assert answered.message.content is None
        assert call.id.startswith("call_")
        if choice == "required":
            assert answered.finish_reason == "tool_calls"
        else:
            assert isinstance(arguments, SetAlarm)
            assert answered.finish_reason == "stop"


def allowed_in_chat(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(map(named, names))}}


def allowed_in_response(mode, *names):
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def test_of_all_tools_in_the_prompt_only_the_allowed_ones_are_called(client):
    request = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, **RANDOM}
    choice = allowed_in_chat("required", "SetAlarm")
    answer = client.chat.completions.create(n=3, tool_choice=choice, **request)
    assert {each.finish_reason for each in answer.choices} == {"tool_calls"}
    assert {call.function.name for each in answer.choices for call in each.message.tool_calls} == {"SetAlarm"}
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, tool_choice=choice, **request)]
    [name, *_] = [call.function.name for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert name == "SetAlarm"
    free = client.chat.completions.create(tool_choice=allowed_in_chat("auto", "SetAlarm"), **request)
    plain = client.chat.completions.create(tool_choice="auto", **request)
    usages = (answer.usage, free.usage, plain.usage)
    assert len({usage.prompt_tokens for usage in usages}) == 1, "the prompt is the same"
    choice = allowed_in_response("required", "SetAlarm")
    response = client.responses.create(**RESPONSE, tools=RESPONSE_TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert [item.name for item in response.output] == ["SetAlarm"]
    assert response.tool_choice.model_dump() == choice


@pytest.mark.parametrize(
    ("allowed_names", "held"), [(["a", "c"], ["a", "c"]), (["c"], ["c"]), ([], []), (["b", "a", "c", "a"], [])]
)
def test_calls_that_the_model_is_free_to_make_are_held_to_the_allowed_tools(allowed_names, held):
    use = read_tools(
        [FunctionDefinition(name=name) for name in "abc"],
        "auto",
        is_parallel=True,
        form=None,
        chat_template="{{ tools }} <tool_call>",
        parser_name="hermes",
        tool_fallback=True,
        allowed_names=allowed_names,
    )
    tags = [] if use.form is None else use.form.structural_tag["format"]["tags"]
    assert [json.loads(tag["begin"].removeprefix("<tool_call>") + "{}}")["name"] for tag in tags] == held
    assert len(use.definitions) == 3


@pytest.fixture(scope="module")
def library(default_model):
    return Library.load(TokenizerSource(str(default_model), 49_152, [2]))


@pytest.mark.parametrize("reason", ["strict", "single", "allowed"])
@pytest.mark.parametrize("template", ["{{ tools }}", "{{ tools }} [ARGS]"])
@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_every_format_with_a_trigger_holds_the_calls_between_text(library, name, template, reason):
    """The calls are held because a function is strict, the request wants at most one, or only some are allowed."""
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    use = read_tools(
        [FunctionDefinition(name=tool, parameters=parameters, strict=reason == "strict") for tool in ("f", "g")],
        "auto",
        is_parallel=reason != "single",
        form=None,
        chat_template=template,
        parser_name=name,
        tool_fallback=True,
        allowed_names=["f"] if reason == "allowed" else [],
    )
    call_format = TOOL_PARSERS.get(name).call_format(use.tools, template)
    if call_format is None or not call_format.trigger:
        assert use.form is None
        return
    constraint = use.form.constraint()

    def answer(*arguments, name="f"):
        first = call_format.calls[0]
        calls = [first.begin.replace("f", name) + text + first.end for text in arguments]
        return "Well.\n" + call_format.begin + call_format.separator.join(calls) + call_format.end

    assert library.allows(constraint, "Well.")
    assert library.allows(constraint, answer('{"n": 1}'))
    assert library.allows(constraint, answer('{"n": 1}', "{}")) == (reason != "single")
    assert library.allows(constraint, answer('{"n": "x"}')) == (reason != "strict")
    assert not library.allows(constraint, answer("1"))
    assert library.allows(constraint, answer("{}", name="g")) == (reason != "allowed")
    assert not library.allows(constraint, answer("{}", name="h"))


UNIQUE = {"type": "object", "properties": {"t": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}}}
"""No grammar holds all of it."""


def test_schema_of_a_function_that_is_not_strict_is_held_as_far_as_a_grammar_can(server):
    request = {"messages": MESSAGES, "tool_choice": "required", **RANDOM}
    function = {"name": "f", "parameters": UNIQUE | {"required": ["t"], "additionalProperties": False}}
    status, answer = server.post(
        "/v1/chat/completions", request | {"tools": [{"type": "function", "function": function}]}
    )
    assert status == 200
    arguments = json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    assert {*arguments["t"]} <= {"a", "b"}
    strict = [{"type": "function", "function": {**function, "strict": True}}]
    status, answer = server.post("/v1/chat/completions", request | {"tools": strict})
    assert status == 400
    assert "unsupported keywords: 'uniqueItems'" in answer["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_schema_of_a_function_that_cannot_be_held_is_named_with_its_function(server, path, choice):
    wrong = {"properties": {"a": {"type": "object", "properties": {"b": {"type": "strin"}}}}}
    definitions = [{"name": "f"}, {"name": "g", "parameters": wrong, "strict": True}]
    if path == "/v1/chat/completions":
        fields = {"tools": [{"type": "function", "function": each} for each in definitions], "tool_choice": choice}
    elif path == "/v1/responses":
        fields = {"input": "x", "tools": [{"type": "function", **each} for each in definitions], "tool_choice": choice}
    else:
        fields = {"tools": [{"name": "f"}, {"name": "g", "input_schema": wrong, "strict": True}], "max_tokens": 9}
        fields["tool_choice"] = {"type": {"required": "any"}.get(choice, choice)}
    status, answer = server.post(path, fields if "input" in fields else {"messages": MESSAGES, **fields})
    assert status == 400
    assert (
        "the parameters of 'g' at #/properties/a/properties/b/type: 'strin' is not a type" in answer["error"]["message"]
    )
    param = {"/v1/chat/completions": "tools[1].function.parameters", "/v1/responses": "tools[1].parameters"}.get(path)
    assert answer["error"].get("param") == param


def test_form_that_cannot_be_held_beside_tools_is_named_by_its_field(server):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"items": {"type": "strin"}}}}
    request = {"messages": MESSAGES, "tools": TOOLS, "response_format": form}
    status, answer = server.post("/v1/chat/completions", request)
    assert (status, answer["error"]["param"]) == (400, "response_format.json_schema.schema")
    assert "failed: at #/items/type: 'strin' is not a type" in answer["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_parser_sees_the_marker_of_calls_that_is_a_special_token_without_a_name(choice):
    # Mistral's files and GGUF files name only a few of their special tokens.
    template = "{{ tools }}{% for message in messages %}{{ '[TOOL_CALLS] [AVAILABLE_TOOLS]' }}{% endfor %}"
    backend = Tokenizer(models.BPE(vocab={"<s>": 0}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    functions = [FunctionDefinition(name="f")]
    use = read_tools(
        functions,
        choice,
        is_parallel=True,
        form=None,
        chat_template=template,
        parser_name="mistral",
        tool_fallback=True,
    )
    state = SimpleNamespace(
        options=SimpleNamespace(reasoning_parser="auto"), engine=SimpleNamespace(model_tokenizer=tokenizer)
    )
    params = SamplingParams()
    read_answer_format(state, params, template, "prompt", use, True)
    assert not params.skip_special_tokens


def test_a_stream_brings_the_name_first_and_then_the_arguments_in_pieces(client):
    request = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **RANDOM}
    whole = client.chat.completions.create(**request).choices[0].message.tool_calls[0].function
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **request)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert (calls[0].index, calls[0].type, calls[0].function.name) == (0, "function", whole.name)
    assert calls[0].id
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert "".join(call.function.arguments for call in calls) == whole.arguments
    assert len(calls) > 2
    assert not any(delta.content for delta in deltas)


def anthropic_tool(tool):
    return {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}


def streamed(server, path, body):
    """Return the events of a streamed answer."""
    answer = httpx.post(server.url + path, json={**body, "stream": True}, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return list(map(json.loads, lines))


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_call_that_is_cut_off_leaves_no_markup_as_content(server, choice):
    chat = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": named("SetAlarm") if choice == "named" else choice}
    response = {"input": "x", "tools": RESPONSE_TOOLS}
    response["tool_choice"] = {"type": "function", "name": "SetAlarm"} if choice == "named" else choice
    message = {"messages": MESSAGES, "tools": list(map(anthropic_tool, TOOLS))}
    message["tool_choice"] = {"type": "tool", "name": "SetAlarm"} if choice == "named" else {"type": "any"}
    begun = set()
    for limit in (1, 2, 5, 10, 20, 30):
        common = {"temperature": 0.0, "chat_template_kwargs": {"enable_thinking": False}}
        status, answer = server.post("/v1/chat/completions", {**chat, **common, "max_tokens": limit})
        [chosen] = answer["choices"]
        assert (status, chosen["finish_reason"]) == (200, "length")
        assert not chosen["message"]["content"]
        calls = chosen["message"].get("tool_calls", [])
        events = streamed(server, "/v1/chat/completions", {**chat, **common, "max_tokens": limit})
        choices = [event["choices"][0] for event in events]
        assert not any(each["delta"].get("content") for each in choices)
        assert choices[-1]["finish_reason"] == "length"
        pieces = [call["function"] for each in choices for call in each["delta"].get("tool_calls", [])]
        arguments = "".join(piece["arguments"] for piece in pieces)
        assert arguments == "".join(call["function"]["arguments"] for call in calls)
        begun.add(len(calls))

        answer = server.post("/v1/responses", {**response, **common, "max_output_tokens": limit})[1]
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert {item["status"] for item in answer["output"]} == {"incomplete"}
        texts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
        assert not any(texts)
        events = streamed(server, "/v1/responses", {**response, **common, "max_output_tokens": limit})
        assert events[-1]["type"] == "response.incomplete"
        assert not any(event["type"] == "response.output_text.delta" for event in events)
        assert [item["type"] for item in events[-1]["response"]["output"]] == [
            item["type"] for item in answer["output"]
        ]

        answer = server.post("/v1/messages", {**message, **common, "max_tokens": limit})[1]
        assert answer["stop_reason"] == "max_tokens"
        assert all(block["type"] == "tool_use" for block in answer["content"])
        events = streamed(server, "/v1/messages", {**message, **common, "max_tokens": limit})
        assert not any(event.get("delta", {}).get("text") for event in events)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert begun == {0, 1}, "the limits lie before and within the arguments"


def test_openais_helpers_parse_calls(client):
    request = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **RANDOM}
    answer = client.chat.completions.parse(**request)
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather | SetAlarm)
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert streamed.parsed_arguments == answer.choices[0].message.tool_calls[0].function.parsed_arguments


def test_a_model_that_is_free_to_call_may_answer_in_text(client):
    answer = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, **RANDOM | {"max_tokens": 20})
    [choice] = answer.choices
    assert choice.message.content or choice.message.tool_calls


def test_an_answer_that_is_no_call_has_the_form_that_is_demanded(client):
    for seed in range(4):
        answer = client.chat.completions.create(
            messages=MESSAGES,
            tools=TOOLS,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 22]}}},
            **RANDOM | {"seed": seed, "parallel_tool_calls": False},
        )
        message = answer.choices[0].message
        assert checked(message.tool_calls) if message.tool_calls else json.loads(message.content) in (1, 22)


def test_no_call_is_made_if_none_may_be(client, server):
    request = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none", "max_tokens": 4}
    status, answer = server.post("/v1/chat/completions", request)
    plain = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4})[1]
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"], "the prompt has no tools"


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"arguments": '{"city": "Bern"}'}, '{"city": "Bern"}'),
        ({"arguments": {"city": "Bern"}}, '{"city": "Bern"}'),
        ({"arguments": ""}, "{}"),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
    ],
)
def test_calls_and_results_of_earlier_turns_reach_the_template(server, given, written):
    call = {"id": "call_1", "type": "function", "function": {"name": "GetWeather", **given}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "I look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
    ]
    status, answer = server.post("/v1/chat/completions", {"messages": history, "tools": TOOLS, "max_tokens": 2})
    assert status == 200, answer
    text = server.post("/tokenize", {"messages": history, "return_token_strs": True})[1]
    prompt = server.post("/detokenize", {"tokens": text["tokens"]})[1]["prompt"]
    assert f'"name": "GetWeather", "arguments": {written}' in prompt


@pytest.mark.parametrize("fields", [{}, {"include_reasoning": False}])
def test_usage_counts_the_tokens_of_the_thought(client, fields):
    request = {"messages": MESSAGES, **RANDOM | {"max_tokens": 20}, "n": 2}
    for thinks, expected in ((True, 40), (False, 0)):
        request["extra_body"] = {"chat_template_kwargs": {"enable_thinking": thinks}, **fields}
        usages = [client.chat.completions.create(**request).usage]
        for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
            *_, last = client.chat.completions.create(stream=True, stream_options=options, **request)
            usages.append(last.usage)
        assert [usage.completion_tokens_details.reasoning_tokens for usage in usages] == [expected] * 3


@pytest.mark.parametrize("content", ["<think>\nLet me", [{"type": "text", "text": "<think>\nLet me"}]])
def test_a_thought_that_the_request_began_goes_on(server, content):
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    request = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "ignore_eos": True}
    status, answer = server.post("/v1/chat/completions", request)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert message["reasoning"]
    assert not message["content"]


def test_a_form_begins_after_the_thought(client):
    request = {"messages": MESSAGES, "response_format": {"type": "json_object"}, **RANDOM | {"max_tokens": 30}}
    thinking = client.chat.completions.create(
        **request, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    ).choices[0]
    assert thinking.message.reasoning_content
    assert thinking.message.reasoning == thinking.message.reasoning_content
    assert not thinking.message.content, "the random model does not end its thought"
    plain = client.chat.completions.create(
        **request, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    ).choices[0]
    assert plain.message.content.lstrip().startswith("{")
    assert plain.message.reasoning is None
    assert not hasattr(plain.message, "reasoning_content")
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(
            stream=True, **request, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
    ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == thinking.message.reasoning_content
    hidden = client.chat.completions.create(
        **request,
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False},
    )
    assert hidden.choices[0].message.reasoning is None
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools[0].type", "must be 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "got 'a b'"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].function.name", "'f' is there twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
            "must be an object",
        ),
        ({"tools": [FUNCTION], "tool_choice": named("g")}, "tool_choice", "names 'g', which is not a tool"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": allowed_in_chat("auto", "f")}, "tool_choice", "needs tools"),
        ({"tools": [FUNCTION], "tool_choice": allowed_in_chat("auto", "f", "g")}, "tool_choice", "'g', which is not"),
        ({"tools": [FUNCTION], "tool_choice": allowed_in_chat("auto")}, "tool_choice.allowed_tools.tools", "length"),
        (
            {"tools": [FUNCTION], "tool_choice": allowed_in_chat("none", "f")},
            "tool_choice.allowed_tools.mode",
            "'auto', 'required', got 'none'",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "mcp"}},
            "tool_choice.type",
            "one of 'function', 'allowed_tools', got 'mcp'",
        ),
        ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice", "any"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": 5}}}}],
                "tool_choice": "required",
            },
            "tools",
            "schema",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_tools_are_refused_with_the_field_at_fault(server, fields, param, words):
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, **fields})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]


RESPONSE_TOOLS = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
RESPONSE = {"input": "How is the weather?", "model": MODEL, "max_output_tokens": 200, "temperature": 1.0}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "SetAlarm"}], ids=["required", "named"])
def test_a_response_calls_with_arguments_of_the_schema(client, choice):
    request = {**RESPONSE, "tools": RESPONSE_TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    request["extra_body"] = {"seed": 5, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.responses.create(**request)
    [call] = answer.output
    [arguments] = checked([SimpleNamespace(function=call)])
    assert choice == "required" or isinstance(arguments, SetAlarm)
    assert (call.type, call.status, answer.status) == ("function_call", "completed", "completed")
    assert (answer.tools[0].name, answer.tools[0].strict) == ("GetWeather", True)
    with client.responses.stream(**request) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        streamed = stream.get_final_response()
    assert (streamed.output[0].name, streamed.output[0].arguments) == (call.name, call.arguments)
    assert "".join(deltas) == call.arguments
    history = [{"role": "user", "content": "How is the weather?"}, *answer.output]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    again = client.responses.create(
        **RESPONSE | {"input": [*history, output], "tools": RESPONSE_TOOLS, "max_output_tokens": 2}
    )
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_a_response_has_its_thought_in_an_item(client):
    request = {**RESPONSE, "text": {"format": {"type": "json_object"}}, "max_output_tokens": 20}
    request["extra_body"] = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.responses.create(**request)
    [thought] = answer.output
    assert (thought.type, thought.status) == ("reasoning", "incomplete")
    assert thought.content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens == answer.usage.output_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_of_a_response_that_cannot_be_compiled_is_refused_by_its_path(server, stream):
    format = {"type": "json_schema", "name": "a", "schema": {"type": "foo"}}
    status, answer = server.post("/v1/responses", {"input": "a", "stream": stream, "text": {"format": format}})
    assert (status, answer["error"]["param"]) == (400, "text.format.schema")
    assert "foo" in answer["error"]["message"]
