"""Griptape with its drivers for OpenAI's API."""

import pydantic
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Agent
from griptape.tools import CalculatorTool


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def driver(**more) -> OpenAiChatPromptDriver:
    return OpenAiChatPromptDriver(model=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=100, **more)


@check("agent, plain and streamed")
def plain() -> None:
    for stream in (False, True):
        assert Agent(prompt_driver=driver(stream=stream)).run(TEXT).output.value


@check("agent with a tool")
def tools() -> None:
    assert Agent(prompt_driver=driver(), tools=[CalculatorTool()], max_subtasks=1).run("What is 12 * 3?").output


@check("structured output")
def structured() -> None:
    agent = Agent(prompt_driver=driver(structured_output_strategy="native"), output_schema=Person)
    assert isinstance(agent.run(TEXT).output.value, Person)


run()
