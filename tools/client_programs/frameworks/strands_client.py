"""Strands Agents with its model for OpenAI's API."""

import pydantic
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from strands import Agent, tool
from strands.models.openai import OpenAIModel


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


@tool
def save_person(name: str, age: int) -> str:
    """Save a person.

    Args:
        name: the name
        age: the age in years
    """
    return "saved"


model = OpenAIModel(client_args={"base_url": BASE_URL, "api_key": KEY}, model_id=MODEL, params={"max_tokens": 100})


@check("agent")
def plain() -> None:
    result = Agent(model=model, callback_handler=None)(TEXT)
    assert str(result)
    assert result.metrics.accumulated_usage["outputTokens"]


@check("agent with a tool")
def tools() -> None:
    agent = Agent(model=model, tools=[save_person], callback_handler=None)
    agent(TEXT)
    agent.tool.save_person(name="Anna", age=30)
    agent(TEXT)


@check("structured output")
def structured() -> None:
    result = Agent(model=model, callback_handler=None)(TEXT, structured_output_model=Person)
    assert isinstance(result.structured_output, Person)


run()
