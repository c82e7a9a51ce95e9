"""Run instructor, pydantic-ai and openai-agents against a server, and print what each of them got.

The server's chat template must know tools. The program stops with the error of the first client that fails.
"""

import argparse
from typing import Literal

import agents
import instructor
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

TEXT = "Anna is a baker, 30 years old."


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: Literal["baker", "teacher"]


def run_instructor(base_url: str, model: str) -> None:
    """Ask for a `Person` by a call, by a JSON schema, by a response, and in parts of a stream."""
    messages = [{"role": "user", "content": TEXT}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"), mode=mode)
        person = client.create(model=model, response_model=Person, messages=messages)
        print("instructor", mode.name, "|", person)
    client = instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"))
    *_, last = client.create_partial(model=model, response_model=Person, messages=messages)
    print("instructor, stream |", last)


def run_pydantic_ai(base_url: str, model: str) -> None:
    """Ask for a `Person` by a call and by a JSON schema, of both endpoints."""
    provider = OpenAIProvider(base_url=base_url, api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for output in (pydantic_ai.ToolOutput, pydantic_ai.NativeOutput):
            served = kind(model, provider=provider, settings={"max_tokens": 300, "parallel_tool_calls": False})
            agent = pydantic_ai.Agent(served, output_type=output(Person))
            print("pydantic-ai", kind.__name__, output.__name__, "|", agent.run_sync(TEXT).output)


@agents.function_tool
def get_weather(city: Literal["Bern", "Basel"]) -> str:
    """Return the weather of a city."""
    return f"sunny in {city}"


def run_openai_agents(base_url: str, model: str) -> None:
    """Let an agent call a function, and another one answer from the result, of both endpoints."""
    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        served = kind(model=model, openai_client=openai.AsyncOpenAI(base_url=base_url, api_key="none"))
        caller = agents.Agent(
            name="caller",
            model=served,
            tools=[get_weather],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        called = agents.Runner.run_sync(caller, "How is the weather in Bern?")
        speaker = agents.Agent(name="speaker", model=served, model_settings=agents.ModelSettings(max_tokens=60))
        question = {"role": "user", "content": "Say it in a sentence."}
        answer = agents.Runner.run_sync(speaker, [*called.to_input_list(), question])
        print("openai-agents", kind.__name__, "|", called.final_output, "|", answer.final_output)


def main() -> None:
    """Run the clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    args = parser.parse_args()
    for run in (run_instructor, run_pydantic_ai, run_openai_agents):
        run(args.base_url, args.model)


if __name__ == "__main__":
    main()
