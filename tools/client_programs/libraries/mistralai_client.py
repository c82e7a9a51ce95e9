"""The client of Mistral."""

import pydantic
from checks import KEY, MODEL, TEXT, URL, check, run
from mistralai.client import Mistral

client = Mistral(api_key=KEY, server_url=URL)
messages = [{"role": "user", "content": TEXT}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


TOOL = {"type": "function", "function": {"name": "save_person", "parameters": Person.model_json_schema()}}


@check("chat")
def chat() -> None:
    answer = client.chat.complete(model=MODEL, messages=messages, max_tokens=20)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


@check("chat, streamed")
def streamed() -> None:
    with client.chat.stream(model=MODEL, messages=messages, max_tokens=20) as stream:
        parts = [event.data for event in stream]
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


@check("tool call, and its result")
def tools() -> None:
    answer = client.chat.complete(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    Person.model_validate_json(call.function.arguments)
    result = {"role": "tool", "name": "save_person", "tool_call_id": call.id, "content": "saved"}
    assert client.chat.complete(model=MODEL, messages=[*messages, message, result], tools=[TOOL], max_tokens=20).choices


@check("tool call, streamed")
def streamed_tools() -> None:
    with client.chat.stream(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=100
    ) as stream:
        calls = [call for event in stream for choice in event.data.choices for call in choice.delta.tool_calls or []]
    assert calls[0].function.name == "save_person"


@check("structured output, parsed")
def structured() -> None:
    answer = client.chat.parse(Person, model=MODEL, messages=messages, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, Person)


@check("embeddings")
def embeddings() -> None:
    assert len(client.embeddings.create(model=MODEL, inputs=["a", "b"]).data) == 2


run()
