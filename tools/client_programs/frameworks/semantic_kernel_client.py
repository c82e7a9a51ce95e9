"""Semantic Kernel with its connectors for OpenAI's API."""

import asyncio
from typing import Annotated

import pydantic
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
    OpenAITextCompletion,
    OpenAITextEmbedding,
    OpenAITextPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


called: list[str] = []


class Register:
    @kernel_function(description="Save a person")
    def save_person(self, name: Annotated[str, "the name"], age: Annotated[int, "the age"]) -> str:
        called.append(name)
        return "saved"


def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url=BASE_URL, api_key=KEY)


def service() -> OpenAIChatCompletion:
    return OpenAIChatCompletion(ai_model_id=MODEL, async_client=client())


def history() -> ChatHistory:
    history = ChatHistory(system_message="Answer in a word.")
    history.add_user_message(TEXT)
    return history


@check("chat, plain and streamed")
def chat() -> None:
    async def go() -> None:
        settings = OpenAIChatPromptExecutionSettings(max_tokens=20)
        assert str(await service().get_chat_message_content(history(), settings))
        parts = [str(part) async for part in service().get_streaming_chat_message_content(history(), settings)]
        assert "".join(parts)

    asyncio.run(go())


@check("tool call, and its result")
def tools() -> None:
    async def go() -> None:
        called.clear()
        kernel = Kernel()
        kernel.add_plugin(Register(), "register")
        settings = OpenAIChatPromptExecutionSettings(
            max_tokens=100, function_choice_behavior=FunctionChoiceBehavior.Required()
        )
        await service().get_chat_message_content(history(), settings, kernel=kernel)
        assert called
        called.clear()
        async for _ in service().get_streaming_chat_message_content(history(), settings, kernel=kernel):
            pass
        assert called

    asyncio.run(go())


@check("structured output")
def structured() -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=100, response_format=Person)
    Person.model_validate_json(str(asyncio.run(service().get_chat_message_content(history(), settings))))


@check("agent")
def agent() -> None:
    settings = OpenAIChatPromptExecutionSettings(max_tokens=20)
    agent = ChatCompletionAgent(
        service=service(), name="Helper", instructions="Be short.", arguments=KernelArguments(settings=settings)
    )
    assert str(asyncio.run(agent.get_response(messages=TEXT)))


@check("completion")
def completion() -> None:
    async def go() -> None:
        service = OpenAITextCompletion(ai_model_id=MODEL, async_client=client())
        settings = OpenAITextPromptExecutionSettings(max_tokens=8)
        assert str(await service.get_text_content("Once upon a time", settings))
        assert [part async for part in service.get_streaming_text_content("Once upon a time", settings)]

    asyncio.run(go())


@check("embeddings")
def embeddings() -> None:
    vectors = asyncio.run(OpenAITextEmbedding(ai_model_id=MODEL, async_client=client()).generate_embeddings(["a", "b"]))
    assert len(vectors) == 2


run()
