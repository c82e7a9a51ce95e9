"""The Python client of OpenAI."""

import asyncio

import openai
import pydantic
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, check, run

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": TEXT}]


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: JOBS


@check("models")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@check("completion")
def completion() -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, logprobs=2)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.token_logprobs) == 8


@check("chat, streamed with usage")
def streamed_chat() -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, stream=True, stream_options=options
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts)
    assert last.usage.completion_tokens == 8


@check("fields of other providers")
def unknown_fields() -> None:
    extra = {"num_ctx": 512, "keep_alive": "5m", "provider": {"order": ["x"]}, "cache_prompt": True}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, verbosity="low", extra_body=extra
    )
    assert answer.choices[0].message.content


@check("structured output, parsed")
def parsed() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Person, max_tokens=100)
    assert answer.choices[0].message.parsed.job in ("baker", "teacher")


@check("tool call")
def tool_call() -> None:
    tool = openai.pydantic_function_tool(Person)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=200, parallel_tool_calls=False
    )
    (call,) = answer.choices[0].message.tool_calls
    Person.model_validate_json(call.function.arguments)


@check("tool call, streamed")
def streamed_tool_call() -> None:
    tool = openai.pydantic_function_tool(Person)
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=200, parallel_tool_calls=False
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments.age >= 0


@check("tools, automatic choice")
def automatic_tools() -> None:
    tool = openai.pydantic_function_tool(Person)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="auto", max_tokens=200
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


@check("response, streamed and parsed")
def responses() -> None:
    with client.responses.stream(model=MODEL, input=TEXT, text_format=Person, max_output_tokens=100) as stream:
        final = stream.get_final_response()
    assert final.output_parsed.age >= 0


@check("embeddings")
def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["a", "b"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) > 100


@check("asynchronous chat")
def asynchronous() -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as own:
            calls = [own.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4) for _ in range(8)]
            assert all(answer.choices[0].message.content for answer in await asyncio.gather(*calls))

    asyncio.run(ask())


run()
