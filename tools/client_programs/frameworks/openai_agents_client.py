"""openai-agents: an agent calls a function, and another one answers from the result, through both endpoints."""

from typing import Literal

import agents
import openai
from checks import BASE_URL, KEY, MODEL, check, run

agents.set_tracing_disabled(True)


@agents.function_tool
def get_weather(city: Literal["Bern", "Basel"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def converse(kind: type) -> None:
    served = kind(model=MODEL, openai_client=openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY))
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    caller = agents.Agent(
        name="caller",
        model=served,
        tools=[get_weather],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    called = agents.Runner.run_sync(caller, "How is the weather in Bern?")
    assert called.final_output.startswith("sunny in ")
    speaker = agents.Agent(name="speaker", model=served, model_settings=agents.ModelSettings(max_tokens=60))
    question = {"role": "user", "content": "Say it in a sentence."}
    assert agents.Runner.run_sync(speaker, [*called.to_input_list(), question]).final_output


for model_class in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
    check(model_class.__name__)(lambda kind=model_class: converse(kind))

run()
