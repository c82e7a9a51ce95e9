"""litellm, which other programs use to reach providers."""

import litellm
from checks import BASE_URL, KEY, MODEL, TEXT, URL, check, run

MESSAGES = [{"role": "user", "content": TEXT}]
TOOL = {
    "type": "function",
    "function": {
        "name": "save_person",
        "parameters": {
            "type": "object",
            "properties": {"job": {"enum": ["baker", "teacher"]}},
            "required": ["job"],
            "additionalProperties": False,
        },
    },
}
litellm.suppress_debug_info = True


@check("chat as openai and as hosted_vllm")
def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(
            f"{provider}/{MODEL}", MESSAGES, api_base=BASE_URL, api_key=KEY, max_tokens=8, drop_params=False
        )
        assert answer.choices[0].message.content


@check("chat, streamed")
def streamed() -> None:
    stream = litellm.completion(f"openai/{MODEL}", MESSAGES, api_base=BASE_URL, api_key=KEY, max_tokens=8, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream)


@check("tool call")
def tools() -> None:
    answer = litellm.completion(
        f"hosted_vllm/{MODEL}",
        MESSAGES,
        api_base=BASE_URL,
        api_key=KEY,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=200,
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "save_person"


@check("text completion")
def completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Once", api_base=BASE_URL, api_key=KEY, max_tokens=8
    )
    assert answer.choices[0].text


@check("embeddings")
def embeddings() -> None:
    answer = litellm.embedding(f"openai/{MODEL}", ["a", "b"], api_base=BASE_URL, api_key=KEY)
    assert len(answer.data) == 2


@check("rerank as hosted_vllm")
def rerank() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query="bread", documents=["a baker", "a car"], api_base=URL, api_key=KEY
    )
    assert len(answer.results) == 2


@check("Anthropic's API")
def anthropic() -> None:
    answer = litellm.completion(f"anthropic/{MODEL}", MESSAGES, api_base=URL, api_key=KEY, max_tokens=8)
    assert answer.choices[0].message.content


run()
