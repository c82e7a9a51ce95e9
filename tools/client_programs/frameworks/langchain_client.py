"""LangChain with its OpenAI and Anthropic packages."""

import pydantic
from checks import BASE_URL, JOBS, KEY, MODEL, TEXT, URL, check, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

chat = ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, max_tokens=100)


class Person(pydantic.BaseModel):
    """What is known of a person."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=120)
    job: JOBS


@tool
def save_person(name: str, job: JOBS) -> str:
    """Save a person."""
    return "saved"


@check("invoke and stream")
def plain() -> None:
    messages = [SystemMessage("Answer in a word."), HumanMessage(TEXT)]
    assert chat.invoke(messages).content
    assert "".join(part.content for part in chat.stream(messages))


@check("structured output by schema and by function")
def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert chat.with_structured_output(Person, method=method).invoke(TEXT).job in ("baker", "teacher")


@check("tool call, and its result")
def tools() -> None:
    called = chat.bind_tools([save_person], tool_choice="any", parallel_tool_calls=False).invoke(TEXT)
    (call,) = called.tool_calls
    result = save_person.invoke(call)
    assert chat.bind_tools([save_person]).invoke([HumanMessage(TEXT), called, result])


@check("embeddings")
def embeddings() -> None:
    embedder = OpenAIEmbeddings(base_url=BASE_URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    assert len(embedder.embed_documents(["a", "b"])) == 2


@check("responses API")
def responses() -> None:
    assert ChatOpenAI(base_url=BASE_URL, api_key=KEY, model=MODEL, use_responses_api=True).invoke(TEXT).text


@check("Anthropic's API")
def anthropic() -> None:
    own = ChatAnthropic(base_url=URL, api_key=KEY, model=MODEL, max_tokens=100)
    assert own.invoke(TEXT).text
    called = own.bind_tools([save_person], tool_choice="any").invoke(TEXT)
    assert called.tool_calls[0]["name"] == "save_person"


run()
