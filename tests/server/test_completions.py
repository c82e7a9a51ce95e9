"""The endpoint /v1/completions, with OpenAI's own client and a real model."""

import asyncio

import httpx
import msgspec
import openai
import pytest

from vllm_mp.server.http.event_stream import TEXT_MARK, TextEvent, encode_event
from vllm_mp.server.openai.completions import CompletionChoice, CompletionResponse

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
GREEDY = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.essential
def test_stream_brings_the_text_and_the_usage_of_a_single_response(client):
    whole = client.completions.create(prompt=PROMPT, max_tokens=8, **GREEDY)
    chunks = list(
        client.completions.create(
            prompt=PROMPT, max_tokens=8, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_prompts_have_choices_of_their_own_in_their_order(client):
    prompts = [PROMPT, "1 2 3 4"]
    alone = [client.completions.create(prompt=prompt, max_tokens=4, **GREEDY) for prompt in prompts]
    together = client.completions.create(prompt=prompts, max_tokens=4, **GREEDY)
    assert [choice.text for choice in together.choices] == [answer.choices[0].text for answer in alone]
    assert [choice.index for choice in together.choices] == [0, 1]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    pieces = ["", ""]
    for chunk in client.completions.create(prompt=prompts, max_tokens=4, stream=True, **GREEDY):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [answer.choices[0].text for answer in alone]


def test_token_ids_give_the_same_completion_as_their_text(client, server):
    ids = server.post("/tokenize", {"prompt": PROMPT})[1]["tokens"]
    by_text = client.completions.create(prompt=PROMPT, max_tokens=4, extra_body={"return_token_ids": True}, **GREEDY)
    by_ids = client.completions.create(prompt=ids, max_tokens=4, **GREEDY)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_text.choices[0].model_extra["prompt_token_ids"] == ids
    answer_ids = by_text.choices[0].model_extra["token_ids"]
    assert server.post("/detokenize", {"tokens": answer_ids})[1]["prompt"] == by_text.choices[0].text


@pytest.mark.essential
def test_n_completions_with_a_seed_are_repeatable(client):
    sampled = {"temperature": 1, "top_p": 1, "extra_body": {"top_k": 50}}
    runs = [
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, n=3, seed=7, **sampled) for _ in range(2)
    ]
    texts = [[choice.text for choice in run.choices] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert runs[0].usage.completion_tokens == 18


def test_n_completions_of_several_prompts_are_numbered_in_the_order_of_the_prompts(client):
    request = {"model": MODEL, "prompt": [PROMPT, "1 2 3 4"], "n": 2, "max_tokens": 4, "temperature": 1, "seed": 7}
    whole = client.completions.create(**request)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    pieces = [""] * 4
    for chunk in client.completions.create(stream=True, **request):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
    assert pieces == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_with_the_logprobs_of_its_tokens(client, stream):
    request = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 2, **GREEDY}
    plain = client.completions.create(**request).choices[0]
    answer = client.completions.create(echo=True, stream=stream, **request)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    assert text == PROMPT + plain.text
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert "".join(tokens) == text
    assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens
    assert values[0] is None
    assert all(value <= 0 for value in values[1:])
    assert values[-3:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-3)
    for value, top in zip(plain.logprobs.token_logprobs, plain.logprobs.top_logprobs, strict=True):
        assert len(top) == 2
        assert max(top.values()) == value  # greedy


@pytest.mark.parametrize("limit", [{"max_tokens": 0}, {"extra_body": {"max_completion_tokens": 0}}])
def test_echo_without_tokens_scores_a_given_text(client, limit):
    request = {"prompt": PROMPT + " Paris", "logprobs": 1, "echo": True, **GREEDY}
    scored = client.completions.create(**limit, **request)
    longer = client.completions.create(max_tokens=1, **request)
    assert scored.choices[0].text == PROMPT + " Paris"
    assert scored.usage.completion_tokens == 0
    values = longer.choices[0].logprobs.token_logprobs[:-1]
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(values[1:], abs=1e-3)


def test_stop_string_ends_the_text_before_it(client):
    whole = client.completions.create(prompt=PROMPT, max_tokens=12, **GREEDY).choices[0].text
    stop = whole[5:8]
    cut = client.completions.create(prompt=PROMPT, max_tokens=12, stop=stop, **GREEDY).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    assert cut.model_extra["stop_reason"] == stop


def test_logit_bias_and_allowed_tokens_decide_the_token(client, server):
    [rome] = server.post("/tokenize", {"prompt": " Rome"})[1]["tokens"]
    biased = client.completions.create(prompt=PROMPT, max_tokens=2, logit_bias={str(rome): 100}, **GREEDY)
    allowed = client.completions.create(prompt=PROMPT, max_tokens=2, extra_body={"allowed_token_ids": [rome]}, **GREEDY)
    assert biased.choices[0].text == allowed.choices[0].text == " Rome Rome"


def test_continuous_usage_counts_the_tokens_so_far(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": PROMPT, "max_tokens": 4, "stream": True, "stream_options": options, "ignore_eos": True, **GREEDY}
    lines = httpx.post(server.url + "/v1/completions", json=body).text.split("\n\n")
    usages = [msgspec.json.decode(line.removeprefix("data: "))["usage"] for line in lines[:-2]]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0] >= 1, counts[-1]) == (True, 4)
    assert lines[-2:] == ["data: [DONE]", ""]


def test_asynchronous_client_streams_many_completions_at_once(server):
    async def collect(client, prompt):
        stream = await client.completions.create(prompt=prompt, max_tokens=6, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*[collect(client, f"{number} and") for number in range(8)])
            alone = [await collect(client, f"{number} and") for number in (0, 7)]
        return together, alone

    together, alone = asyncio.run(run())
    assert [together[0], together[7]] == alone


def test_errors_are_the_exceptions_of_the_client(client):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature must be in") as wrong:
        client.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"


def test_served_model_is_listed_and_can_be_retrieved(client):
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).model_extra["max_model_len"] == 512
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize("text", ["plain", 'quote " and \\', "\n\t\0", "é ☕ \U0001f600", "</script>\u2028"])
def test_event_of_a_text_has_the_bytes_of_the_whole_encoding(text):
    def response(text):
        return CompletionResponse(
            id='cmpl-"x"', created=1, model="m☕", choices=[CompletionChoice(index=3, text=text)], usage=None
        )

    event = TextEvent(response(TEXT_MARK)).encode(text)
    assert event == encode_event(response(text))
    assert msgspec.json.decode(event.removeprefix(b"data: "))["choices"][0]["text"] == text
