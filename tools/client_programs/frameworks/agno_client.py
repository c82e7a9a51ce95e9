"""Agno, with its classes for servers with OpenAI's API and for vLLM."""

import pydantic
from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from agno.models.vllm import VLLM
from checks import BASE_URL, KEY, MODEL, TEXT, check, run


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)


MODELS = {
    "OpenAILike": lambda: OpenAILike(id=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=100),
    "VLLM": lambda: VLLM(id=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=100),
}
for name, make in MODELS.items():

    @check(f"{name}: agent, plain and streamed")
    def plain(make=make) -> None:
        agent = Agent(model=make())
        assert agent.run(TEXT).content
        events = list(agent.run(TEXT, stream=True))
        assert "".join(event.content or "" for event in events if event.event == "RunContent")

    @check(f"{name}: structured output")
    def structured(make=make) -> None:
        assert isinstance(Agent(model=make(), output_schema=Person).run(TEXT).content, Person)


run()
