"""smolagents: an agent that calls a tool."""

from checks import BASE_URL, KEY, MODEL, TEXT, check, run
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


model = OpenAIServerModel(MODEL, api_base=BASE_URL, api_key=KEY, max_tokens=100)


@check("a call of the model")
def call() -> None:
    assert model([{"role": "user", "content": [{"type": "text", "text": TEXT}]}]).content


@check("agent with a tool")
def agent() -> None:
    caller = ToolCallingAgent([get_weather], model, max_steps=2, verbosity_level=0)
    assert caller.run("How is the weather in Bern?") is not None


run()
