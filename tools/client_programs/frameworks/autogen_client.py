"""AutoGen's agents with its client for OpenAI's API."""

import asyncio

import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import BASE_URL, KEY, MODEL, TEXT, check, run

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


async def save_person(name: str, age: int) -> str:
    """Save a person."""
    return "saved"


def client() -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=MODEL, base_url=BASE_URL, api_key=KEY, model_info=INFO, max_tokens=100)


messages = [SystemMessage(content="Answer in a word."), UserMessage(content=TEXT, source="user")]


@check("create and create_stream")
def plain() -> None:
    async def go() -> None:
        answer = await client().create(messages)
        assert answer.content
        assert answer.usage.completion_tokens
        last = [part async for part in client().create_stream(messages)][-1]
        assert last.content

    asyncio.run(go())


@check("structured output")
def structured() -> None:
    Person.model_validate_json(asyncio.run(client().create(messages, json_output=Person)).content)
    assert asyncio.run(client().create(messages, json_output=True)).content.startswith("{")


@check("agent, and its structured output")
def agent() -> None:
    assert asyncio.run(AssistantAgent("helper", client()).run(task=TEXT)).messages[-1].content
    answer = asyncio.run(AssistantAgent("helper", client(), output_content_type=Person).run(task=TEXT))
    assert isinstance(answer.messages[-1].content, Person)


@check("tool call, plain and streamed, and an agent with a tool")
def tools() -> None:
    async def go() -> None:
        tool = FunctionTool(save_person, description="Save a person.", strict=True)
        answer = await client().create(messages, tools=[tool], tool_choice="required")
        assert answer.finish_reason == "function_calls", answer
        last = [part async for part in client().create_stream(messages, tools=[tool], tool_choice="required")][-1]
        assert last.content[0].name == "save_person"
        agent = AssistantAgent("helper", client(), tools=[save_person], model_client_stream=True)
        assert (await agent.run(task=TEXT)).messages[-1].content

    asyncio.run(go())


run()
