"""LlamaIndex through its class for servers with OpenAI's API."""

import pydantic
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: JOBS


def save_person(name: str, job: JOBS) -> str:
    """Save a person."""
    return "saved"


llm = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_tokens=100
)


@check("chat and stream")
def chat() -> None:
    messages = [ChatMessage(role="user", content=TEXT)]
    assert llm.chat(messages).message.content
    assert "".join(part.delta or "" for part in llm.stream_chat(messages))


@check("completion")
def completion() -> None:
    plain = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=False, max_tokens=8)
    assert plain.complete("Once upon a time").text


@check("structured output")
def structured() -> None:
    assert llm.as_structured_llm(Person).complete(TEXT).raw.job in ("baker", "teacher")


@check("tool call")
def tools() -> None:
    tool = FunctionTool.from_defaults(save_person)
    answer = llm.chat_with_tools([tool], TEXT, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "save_person"


run()
