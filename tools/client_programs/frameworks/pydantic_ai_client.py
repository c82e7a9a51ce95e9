"""pydantic-ai: a result by a call and by a JSON schema, through both endpoints."""

import pydantic
import pydantic_ai
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, check, run
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

PROVIDER = OpenAIProvider(base_url=BASE_URL, api_key=KEY)


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: JOBS


def person(kind: type, output: type) -> None:
    served = kind(MODEL, provider=PROVIDER, settings={"max_tokens": 300, "parallel_tool_calls": False})
    assert pydantic_ai.Agent(served, output_type=output(Person)).run_sync(TEXT).output.age >= 0


for model_class in (OpenAIChatModel, OpenAIResponsesModel):
    for form in (pydantic_ai.ToolOutput, pydantic_ai.NativeOutput):
        check(f"{model_class.__name__}, {form.__name__}")(lambda a=model_class, b=form: person(a, b))

run()
