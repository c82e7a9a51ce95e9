"""CrewAI with its own client for OpenAI's API."""

import pydantic
from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


def model(**more) -> LLM:
    return LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=KEY, max_tokens=100, **more)


@tool
def save_person(name: str, age: int) -> str:
    """Save a person."""
    return "saved"


@check("a call of the model, plain and streamed")
def plain() -> None:
    for stream in (False, True):
        assert model(stream=stream).call(TEXT)


@check("structured output")
def structured() -> None:
    answer = model().call(TEXT, response_model=Person)
    print()  # CrewAI leaves its line without an end
    assert isinstance(answer, Person)


@check("crew")
def crew() -> None:
    agent = Agent(role="Helper", goal="Help", backstory="You help.", llm=model(), max_iter=1)
    task = Task(description=TEXT, expected_output="a word", agent=agent)
    assert Crew(agents=[agent], tasks=[task]).kickoff().raw


@check("crew with a tool")
def crew_tool() -> None:
    agent = Agent(role="Helper", goal="Help", backstory="You help.", llm=model(), tools=[save_person], max_iter=2)
    task = Task(description=TEXT, expected_output="a word", agent=agent)
    assert Crew(agents=[agent], tasks=[task]).kickoff().raw


run()
