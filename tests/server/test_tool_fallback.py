"""Tools with the default model, whose chat template knows none: clients of agents work at first contact."""

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from support.server_process import served

from vllm_mp.model_store import DEFAULT_MODEL

pytestmark = pytest.mark.usefixtures("forked_programs")


class GetWeather(pydantic.BaseModel, extra="forbid"):
    """Return the weather of a city."""

    city: str = pydantic.Field(max_length=20)
    days: int = pydantic.Field(1, ge=1)


class Add(pydantic.BaseModel, extra="forbid"):
    """Add two integers."""

    a: int
    b: int


KINDS = {"get_weather": GetWeather, "add": Add}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": kind.__doc__, "parameters": kind.model_json_schema()},
    }
    for name, kind in KINDS.items()
]
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
RUN = {"model": DEFAULT_MODEL, "tools": TOOLS, "max_tokens": 120, "temperature": 0.0}


@pytest.fixture(scope="module")
def server(default_model, tmp_path_factory):
    """A server with room for several turns and their tools."""
    folder = tmp_path_factory.mktemp("tool_fallback")
    with served(DEFAULT_MODEL, folder, "--max-model-len", "2048") as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def called(city: str, name: str = "get_weather") -> list[dict[str, Any]]:
    """Return a question and its answer, a call, which the model then repeats for another question."""
    function = {"name": name, "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
    ]


def checked(calls: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of calls, which must fit the schemas of their tools."""
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    for name, arguments in found:
        KINDS[name].model_validate(arguments, strict=True)
    return found


@pytest.mark.slow
def test_a_model_that_may_call_answers_with_text_or_with_valid_calls(client):
    kinds = set()
    # A model without tools repeats a call of a function that does not exist, unless a grammar holds it.
    unknown = [*called("Tokyo", "get_time"), *called("Oslo", "get_time")]
    for messages in ([QUESTION], [*called("Rome"), QUESTION], [*unknown, QUESTION]):
        for parallel in (False, True):
            answer = client.chat.completions.create(
                messages=messages, parallel_tool_calls=parallel, **RUN | {"max_tokens": 400 if parallel else 60}
            )
            [choice] = answer.choices
            calls = checked(choice.message.tool_calls or [])
            assert len(calls) <= (8 if parallel else 1)
            kinds.add(choice.finish_reason if calls else "text")
            if calls:
                assert choice.message.content is None, "nothing follows a call"
            else:
                assert choice.message.content
                assert "<tool_call>" not in choice.message.content
    assert {"text", "tool_calls"} <= kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_must_be_made_streams_as_it_comes_whole(client, choice):
    request = {"messages": [QUESTION], "tool_choice": choice, "parallel_tool_calls": False, **RUN}
    whole = client.chat.completions.create(**request).choices[0]
    [(name, arguments)] = checked(whole.message.tool_calls)
    assert choice == "required" or name == "add"
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **request)]
    pieces = [call for delta in deltas for call in delta.tool_calls or []]
    assert pieces[0].function.name == name
    assert pieces[0].id
    assert len(pieces) > 2
    assert json.loads("".join(piece.function.arguments for piece in pieces)) == arguments
    assert not any(delta.content for delta in deltas)


def test_parallel_calls_end_by_themselves(client):
    answer = client.chat.completions.create(messages=[QUESTION], tool_choice="required", **RUN | {"max_tokens": 1000})
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert 1 <= len(checked(choice.message.tool_calls)) <= 8


def test_a_model_that_may_call_some_tools_only_calls_no_other(client):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
    # The model repeats the call of an earlier turn.
    messages = [*called("Rome"), *called("Oslo"), QUESTION]
    for choice, names in (("auto", ["get_weather"]), ({"type": "allowed_tools", "allowed_tools": allowed}, ["add"])):
        answer = client.chat.completions.create(
            messages=messages, tool_choice=choice, parallel_tool_calls=False, **RUN | {"max_tokens": 60}
        )
        assert [name for name, _ in checked(answer.choices[0].message.tool_calls or [])] == names


def test_an_agent_runs_several_turns_with_results(client):
    messages: list[Any] = [{"role": "system", "content": "Be short."}, QUESTION]
    for choice in ("required", "required", "auto", "none"):
        answer = client.chat.completions.create(
            messages=messages, tool_choice=choice, parallel_tool_calls=False, **RUN | {"max_tokens": 60}
        )
        [turn] = answer.choices
        messages.append(turn.message.model_dump(exclude_none=True))
        assert turn.message.tool_calls or choice != "required"
        for call in turn.message.tool_calls or []:
            checked([call])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny."})
    assert messages[-1]["role"] == "assistant"
    assert messages[-1]["content"]
    assert not messages[-1].get("tool_calls")


def test_an_answer_that_is_no_call_has_the_form_that_is_demanded(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}
    answer = client.chat.completions.create(messages=[QUESTION], response_format=form, **RUN)
    message = answer.choices[0].message
    assert checked(message.tool_calls) if message.tool_calls else json.loads(message.content) in ("yes", "no")


def test_a_response_calls_and_takes_the_result(client):
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    request = {"model": DEFAULT_MODEL, "tools": tools, "temperature": 0.0, "parallel_tool_calls": False}
    first = client.responses.create(
        input="Add 17 and 25.", tool_choice={"type": "function", "name": "add"}, max_output_tokens=100, **request
    )
    [call] = first.output
    Add.model_validate_json(call.arguments, strict=True)
    turns = [
        {"role": "user", "content": "Add 17 and 25."},
        *first.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
    ]
    second = client.responses.create(input=turns, tool_choice="auto", max_output_tokens=30, **request)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output
    with client.responses.stream(input="Add 17 and 25.", tool_choice="required", **request) as stream:
        kinds = {event.type for event in stream}
    assert "response.function_call_arguments.delta" in kinds


def test_schemas_with_more_than_a_grammar_has_are_held_as_far_as_it_can(client):
    parameters = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["tags", "place"],
        "additionalProperties": False,
        "propertyNames": {"type": "string"},
        "$defs": {"Place": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "additionalProperties": False}},
    }
    function = {"name": "put", "parameters": parameters}
    request = {**RUN, "messages": [QUESTION], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.create(**request | {"tools": [{"type": "function", "function": function}]})
    arguments = json.loads(answer.choices[0].message.tool_calls[0].function.arguments)
    assert arguments.keys() == {"tags", "place"}
    assert set(arguments["tags"]) <= {"a", "b"}
    with pytest.raises(openai.BadRequestError, match="propertyNames"):
        client.chat.completions.create(
            **request | {"tools": [{"type": "function", "function": {**function, "strict": True}}]}
        )


def test_tokens_of_a_conversation_are_counted_with_its_tools(client, server):
    status, counted = server.post("/tokenize", {"messages": [QUESTION], "tools": TOOLS})
    answer = client.chat.completions.create(messages=[QUESTION], **RUN | {"max_tokens": 1})
    assert (status, counted["count"]) == (200, answer.usage.prompt_tokens)


def test_log_says_that_the_template_knows_no_tools(client, server):
    client.chat.completions.create(messages=[QUESTION], **RUN | {"max_tokens": 1})
    assert server.log.read_text().count("the chat template knows no tools") == 1


def test_server_without_the_fallback_refuses_tools(in_process):
    async def refuse(path: str, body: dict[str, Any]) -> Any:
        async with in_process(tool_fallback=False) as client:
            response = await client.post(path, json=body)
            return response.status_code, response.json()["error"]

    for path, body in (
        ("/v1/chat/completions", {"messages": [QUESTION], "tools": TOOLS}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **TOOLS[0]["function"]}]}),
    ):
        status, error = asyncio.run(refuse(path, body))
        assert (status, error["param"]) == (400, "tools")
        assert "knows no tools" in error["message"]
