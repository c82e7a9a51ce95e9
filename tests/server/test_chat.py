"""The endpoint /v1/chat/completions, with OpenAI's own client and a real model."""

import asyncio
import re

import httpx
import msgspec
import openai
import pytest

MODEL = "smollm2-135m-instruct"
GREEDY = {"model": MODEL, "temperature": 0}
MESSAGES = [{"role": "user", "content": "Name the capital of France."}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def _tokens(server, messages, **fields):
    status, answer = server.post("/tokenize", {"messages": messages, **fields})
    assert status == 200, answer
    return answer["tokens"]


@pytest.mark.essential
def test_stream_has_the_role_then_the_text_then_the_end_then_the_usage(client):
    request = {"messages": MESSAGES, "max_completion_tokens": 4, **GREEDY}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request))
    first, *middle, end, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == whole.choices[0].message.content
    assert all(chunk.choices[0].finish_reason is None for chunk in middle)
    assert end.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert end.choices[0].delta.content is None
    assert usage.choices == []
    assert usage.usage.total_tokens == whole.usage.total_tokens
    assert whole.object == "chat.completion"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_answers_have_the_role_that_the_operator_chose_unless_they_continue_a_message(in_process):
    async def roles(**fields):
        body = {"messages": [*MESSAGES, {"role": "assistant", "content": "It is"}], "max_tokens": 4, "n": 2, **fields}
        async with in_process(response_role="model") as client:
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            stream = (await client.post("/v1/chat/completions", json=body | {"stream": True})).text
        assert len(whole["choices"]) == 2
        return {choice["message"]["role"] for choice in whole["choices"]} | {*re.findall(r'"role":"(\w+)"', stream)}

    assert asyncio.run(roles()) == {"model"}
    assert asyncio.run(roles(add_generation_prompt=True)) == {"model"}
    assert asyncio.run(roles(continue_final_message=True)) == {"assistant"}
    assert asyncio.run(roles(messages=MESSAGES, add_generation_prompt=False)) == {"user"}


def test_prompt_is_the_models_chat_template(client, server):
    answer = client.chat.completions.create(messages=MESSAGES, max_tokens=1, **GREEDY)
    assert answer.usage.prompt_tokens == len(_tokens(server, MESSAGES))
    text = server.post("/detokenize", {"tokens": _tokens(server, MESSAGES)})[1]["prompt"]
    assert text.endswith("<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\n")


def test_text_parts_and_the_developer_role_are_what_a_template_knows(server):
    parts = [{"type": "text", "text": "Name the capital"}, {"type": "text", "text": "of France."}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "type": "text"}]
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name the capital\nof France."},
    ]
    assert _tokens(server, messages) == _tokens(server, plain)


def test_fields_that_change_no_answer_are_accepted(client):
    request = {"messages": MESSAGES, "max_tokens": 4, **GREEDY}
    plain = client.chat.completions.create(**request)
    request["messages"] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": MESSAGES[0]["content"], "cache_control": {"type": "ephemeral"}}],
        }
    ]
    fields = {"use_beam_search": False, "length_penalty": 1.0, "service_tier": "auto"}
    assert client.chat.completions.create(extra_body=fields, **request).choices == plain.choices


def test_history_with_tool_calls_is_answered(client):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    answer = client.chat.completions.create(messages=messages, max_tokens=2, **GREEDY)
    assert answer.usage.completion_tokens == 2


def test_continued_message_goes_on_where_it_ended(client, server):
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital of France is"}]
    text = server.post("/detokenize", {"tokens": _tokens(server, messages, continue_final_message=True)})[1]["prompt"]
    assert text.endswith("The capital of France is")
    answer = client.chat.completions.create(
        messages=messages, max_tokens=3, extra_body={"continue_final_message": True}, **GREEDY
    )
    assert answer.choices[0].message.content.startswith(" Paris")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes_and_the_most_likely_tokens(client, stream):
    answer = client.chat.completions.create(
        messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3, stream=stream, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert len(entries) == 4
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
    if not stream:
        assert "".join(entry.token for entry in entries) == answer.choices[0].message.content


def test_n_answers_stream_side_by_side(client):
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 5, "n": 2, "seed": 3}
    whole = client.chat.completions.create(**request)
    texts, ends = ["", ""], [None, None]
    for chunk in client.chat.completions.create(stream=True, **request):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = ends[choice.index] or choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]


def test_fields_without_an_effect_are_accepted(client):
    answer = client.chat.completions.create(
        messages=MESSAGES,
        max_tokens=1,
        user="x",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        tool_choice="none",
        response_format={"type": "text"},
        **GREEDY,
    )
    assert answer.usage.completion_tokens == 1


def test_token_ids_come_only_when_asked_for(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, **GREEDY}

    def chunks(**fields):
        lines = httpx.post(server.url + "/v1/chat/completions", json=body | fields).text.split("\n\n")
        return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]

    assert not any("token_ids" in str(chunk) for chunk in chunks())
    asked = chunks(return_token_ids=True)
    assert asked[0]["prompt_token_ids"] == _tokens(server, MESSAGES)
    assert sum(len(chunk["choices"][0].get("token_ids", ())) for chunk in asked) == 3
