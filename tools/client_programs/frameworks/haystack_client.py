"""Haystack with its components for OpenAI's API."""

import os

import pydantic
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

os.environ["OPENAI_API_KEY"] = KEY
LIMITS = {"max_tokens": 100}
messages = [ChatMessage.from_system("Answer in a word."), ChatMessage.from_user(TEXT)]


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def save_person(name: str, age: int) -> str:
    """Save a person."""
    return "saved"


tool = create_tool_from_function(save_person)
demand = {"type": "function", "function": {"name": "save_person"}}


@check("OpenAIChatGenerator")
def chat() -> None:
    generator = OpenAIChatGenerator(api_base_url=BASE_URL, model=MODEL, generation_kwargs=LIMITS)
    (reply,) = generator.run(messages)["replies"]
    assert reply.text
    assert reply.meta["usage"]["completion_tokens"]


@check("chat, streamed")
def streamed() -> None:
    parts = []
    generator = OpenAIChatGenerator(
        api_base_url=BASE_URL, model=MODEL, generation_kwargs=LIMITS, streaming_callback=parts.append
    )
    (reply,) = generator.run(messages)["replies"]
    assert reply.text == "".join(part.content for part in parts)


@check("tool call, plain and streamed, and its result")
def tools() -> None:
    for callback in (None, lambda part: None):
        generator = OpenAIChatGenerator(
            api_base_url=BASE_URL, model=MODEL, tools=[tool], streaming_callback=callback, generation_kwargs=LIMITS
        )
        (reply,) = generator.run(messages, generation_kwargs={"tool_choice": demand})["replies"]
        (call,) = reply.tool_calls
        result = ChatMessage.from_tool("saved", origin=call)
        assert generator.run([*messages, reply, result])["replies"]


@check("structured output")
def structured() -> None:
    generator = OpenAIChatGenerator(
        api_base_url=BASE_URL, model=MODEL, generation_kwargs={**LIMITS, "response_format": Person}
    )
    Person.model_validate_json(generator.run(messages)["replies"][0].text)


@check("agent with a tool")
def agent() -> None:
    generator = OpenAIChatGenerator(
        api_base_url=BASE_URL, model=MODEL, generation_kwargs={**LIMITS, "tool_choice": demand}
    )
    result = Agent(chat_generator=generator, tools=[tool], max_agent_steps=2).run(messages=messages[1:])
    assert any(message.tool_call_result for message in result["messages"])


@check("OpenAIResponsesChatGenerator, plain and streamed")
def responses() -> None:
    for callback in (None, lambda part: None):
        generator = OpenAIResponsesChatGenerator(
            api_base_url=BASE_URL,
            model=MODEL,
            generation_kwargs={"max_output_tokens": 100},
            streaming_callback=callback,
        )
        assert generator.run(messages)["replies"][0].text


@check("OpenAIResponsesChatGenerator with a tool")
def responses_tool() -> None:
    for callback in (None, lambda part: None):
        generator = OpenAIResponsesChatGenerator(
            api_base_url=BASE_URL,
            model=MODEL,
            tools=[tool],
            streaming_callback=callback,
            generation_kwargs={"max_output_tokens": 100},
        )
        demand = {"tool_choice": {"type": "function", "name": "save_person"}}
        (reply,) = generator.run(messages, generation_kwargs=demand)["replies"]
        (call,) = reply.tool_calls
        assert generator.run([*messages, reply, ChatMessage.from_tool("saved", origin=call)])["replies"]


@check("embeddings")
def embeddings() -> None:
    assert OpenAITextEmbedder(api_base_url=BASE_URL, model=MODEL).run("a")["embedding"]
    documents = OpenAIDocumentEmbedder(api_base_url=BASE_URL, model=MODEL).run([Document(content="a")])["documents"]
    assert documents[0].embedding


run()
