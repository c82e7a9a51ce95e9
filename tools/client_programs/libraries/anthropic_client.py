"""The Python client of Anthropic."""

import anthropic
from checks import KEY, MODEL, TEXT, URL, check, run

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": TEXT}]
TOOL = {
    "name": "save_person",
    "description": "Save a person.",
    "input_schema": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "job": {"enum": ["baker", "teacher"]}},
        "required": ["name", "job"],
        "additionalProperties": False,
    },
}


@check("message")
def message() -> None:
    system = [{"type": "text", "text": "Answer in a word.", "cache_control": {"type": "ephemeral"}}]
    answer = client.messages.create(model=MODEL, messages=MESSAGES, system=system, max_tokens=8)
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 8
    assert answer.stop_reason in ("end_turn", "max_tokens")


@check("message, streamed")
def streamed() -> None:
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text


@check("tool call, streamed, and its result")
def tools() -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=200
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    (call,) = [block for block in final.content if block.type == "tool_use"]
    assert call.input["job"] in ("baker", "teacher")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "saved"}
    turns = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=20)
    assert answer.content


@check("tool runner")
def runner() -> None:
    @anthropic.beta_tool
    def save_person(name: str) -> str:
        """Save a person."""
        return f"saved {name}"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        model=MODEL, messages=MESSAGES, tools=[save_person], tool_choice=choice, max_tokens=100, max_iterations=2
    )
    first, second = [answer.usage.input_tokens + answer.usage.cache_read_input_tokens for answer in runner]
    assert second > first, "the second request has the whole conversation"


@check("stop sequence")
def stop() -> None:
    answer = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=60, stop_sequences=["a", "e"])
    assert answer.stop_reason == "stop_sequence"
    assert answer.stop_sequence in ("a", "e")


@check("token count")
def count() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 8


@check("error of a wrong value")
def wrong_value() -> None:
    refused = None
    try:
        client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=8, extra_body={"temperature": -1})
    except anthropic.BadRequestError as error:
        refused = error.body
    assert refused["error"]["type"] == "invalid_request_error"


run()
