"""The real `openai` client against a real server: what it sends is understood, and what it gets has its types."""

import asyncio
import contextlib
import itertools

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from vllm_mp.server.app import build_app
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.options import ServerOptions

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "The capital of France is"
LONG = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
"""Parameters of a completion that runs until it is aborted."""


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client):
    [model] = client.models.list().data
    return model.id


@contextlib.asynccontextmanager
async def async_client(server):
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def aborted(server):
    """Return the number of requests that were aborted so far."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("vllm_mp:aborted_requests_total")]
    return float(line.split()[-1])


def num_live(server):
    """Return the number of requests in the core."""
    status = server.get("/core_status")[1]
    return status["num_running"] + status["num_waiting"]


@contextlib.contextmanager
def aborts(server, count):
    """Check that the block has `count` requests aborted, and that they leave the core."""
    before = aborted(server)
    yield
    server.wait_for(lambda: aborted(server) >= before + count)
    server.wait_for(lambda: num_live(server) == 0)


def test_models_are_listed_and_found_by_name(client, model):
    found = client.models.retrieve(model)
    assert (found.id, found.object, found.owned_by) == (model, "model", "vllm_mp")


def test_completion_and_its_stream_are_the_same_text(client, model):
    whole = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0)
    chunks = list(client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
    assert "Paris" in whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.essential
def test_chat_and_its_stream_are_the_same_answer(client, model):
    whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    with client.chat.completions.stream(
        model=model, messages=QUESTION, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        streamed = stream.get_final_completion()
    assert "Paris" in whole.choices[0].message.content
    assert streamed.choices[0].message.content == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert streamed.usage.total_tokens == whole.usage.total_tokens


def test_chat_has_the_log_probabilities_that_were_asked_for(client, model):
    [choice] = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=3, logprobs=True, top_logprobs=2
    ).choices
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_completions_of_several_prompts_keep_their_order(client, model):
    prompts = ["The capital of France is", "The capital of Italy is"]
    several = client.completions.create(model=model, prompt=prompts, max_tokens=4, temperature=0).choices
    alone = [client.completions.create(model=model, prompt=prompt, max_tokens=4, temperature=0) for prompt in prompts]
    assert [choice.text for choice in several] == [completion.choices[0].text for completion in alone]
    assert [choice.index for choice in several] == [0, 1]


def test_response_and_its_stream_are_the_same_answer(client, model):
    whole = client.responses.create(model=model, input=QUESTION, temperature=0)
    with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert "Paris" in whole.output_text
    assert "".join(deltas) == streamed.output_text == whole.output_text
    assert streamed.status == whole.status == "completed"
    assert streamed.usage.total_tokens == whole.usage.total_tokens


def test_response_goes_on_with_the_turns_that_are_sent_back(client, model):
    first = client.responses.create(model=model, input=QUESTION, temperature=0)
    second = client.responses.create(
        model=model,
        input=[*QUESTION, *first.output, {"role": "user", "content": "And of Italy?"}],
        instructions="Answer in one sentence.",
        temperature=0,
    )
    assert "Rome" in second.output_text


def test_response_has_the_log_probabilities_that_were_asked_for(client, model):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3, "temperature": 0}
    response = client.responses.create(model=model, input=QUESTION, **asked)
    [part] = response.output[0].content
    assert response.incomplete_details.reason == "max_output_tokens"
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = client.responses.create(model=model, input=QUESTION, stream=True, **asked)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry.logprob for event in deltas for entry in event.logprobs] == pytest.approx(
        [entry.logprob for entry in part.logprobs], abs=1e-4
    )


def test_embeddings_are_the_same_in_both_encodings(client, model):
    texts = ["one", "two words"]
    decoded = client.embeddings.create(model=model, input=texts)  # the client asks for base64
    plain = client.embeddings.create(model=model, input=texts, encoding_format="float")
    np.testing.assert_allclose(
        [item.embedding for item in decoded.data], [item.embedding for item in plain.data], atol=1e-6
    )
    assert decoded.usage.prompt_tokens == plain.usage.prompt_tokens > 0


def test_async_client_streams_many_answers_at_once(server, model):
    async def answer(client, number):
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=number, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask():
        async with async_client(server) as client:
            response = client.responses.create(model=model, input=QUESTION, max_output_tokens=5, temperature=0)
            vectors = client.embeddings.create(model=model, input=PROMPT)
            return await asyncio.gather(*[answer(client, number) for number in range(1, 6)], response, vectors)

    *answers, response, vectors = asyncio.run(ask())
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(answers))
    assert response.output_text == answers[-1]
    assert len(vectors.data) == 1


def test_raw_and_streaming_responses_show_the_headers(client, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2}
    raw = client.completions.with_raw_response.create(**body, extra_headers={"X-Request-Id": "my-id"})
    assert raw.headers["x-request-id"] == "my-id"
    assert raw.parse().id == "cmpl-my-id"
    assert raw.parse()._request_id == "my-id"
    with client.completions.with_streaming_response.create(**body, stream=True) as streaming:
        lines = [line for line in streaming.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda client, model: client.completions.create(model=model, prompt="a", temperature=-1), "temperature"),
        (lambda client, model: client.chat.completions.create(model=model, messages=[]), "messages"),
        (lambda client, model: client.responses.create(model=model, input="a", previous_response_id="resp_1"),
         "previous_response_id"),
        (lambda client, model: client.embeddings.create(model=model, input=""), "input"),
        (lambda client, model: client.chat.completions.create(
            model=model, messages=QUESTION, tools=[{"type": "function", "function": {"name": "a b"}}]),
         "tools[0].function.name"),
        (lambda client, model: client.chat.completions.create(
            model=model, messages=QUESTION, response_format={"type": "json"}), "response_format.type"),
    ],
)  # fmt: skip
def test_wrong_request_is_a_bad_request_error_with_its_field(client, model, call, param):
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, model)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_unknown_names_are_not_found_errors(client, model):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert model in caught.value.message
    for call in (
        lambda: client.models.retrieve("gpt-9"),
        lambda: client.responses.retrieve("resp_1"),
        lambda: client.responses.delete("resp_1"),
        lambda: client.files.list(),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_refused_stream_raises_before_its_first_event(client, model):
    # Gateways recognize a prompt that is too long by OpenAI's words or by its code.
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is") as caught:
        client.completions.create(model=model, prompt=[5] * 100_000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_timeout_of_the_client_aborts_its_request(server, client, model):
    with aborts(server, 1), pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(model=model, prompt=PROMPT, **LONG)


def test_closed_stream_aborts_its_request(server, client, model):
    for create in (
        lambda: client.completions.create(model=model, prompt=PROMPT, stream=True, **LONG),
        lambda: client.responses.create(
            model=model, input=QUESTION, stream=True, max_output_tokens=4000, extra_body={"ignore_eos": True}
        ),
    ):
        with aborts(server, 1), create() as stream:
            next(iter(stream))


@pytest.mark.essential
def test_cancelled_task_aborts_its_request(server, model):
    async def ask():
        async with async_client(server) as client:
            task = asyncio.create_task(client.completions.create(model=model, prompt=PROMPT, **LONG))
            await asyncio.to_thread(server.wait_for, lambda: num_live(server) > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with aborts(server, 1):
        asyncio.run(ask())


def in_process_client(app):
    """Return a client of an application in this process."""
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
    return AsyncOpenAI(base_url="http://localhost/v1", api_key="wrong", max_retries=0, http_client=transport)


def test_wrong_key_is_an_authentication_error(replay_engine):
    app = build_app(replay_engine, ServerOptions(api_key=("right",)))

    async def ask():
        async with in_process_client(app) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
            return await client.with_options(api_key="right").models.list()

    assert len(asyncio.run(ask()).data) == 1


def test_full_server_is_a_rate_limit_error_and_a_stopping_server_an_internal_one(replay_engine):
    admission = Admission(1)
    app = build_app(replay_engine, ServerOptions(), admission)

    async def ask():
        async with in_process_client(app) as client:
            model = (await client.models.list()).data[0].id
            async with admission.admit(1):
                for call in (client.completions.create(model=model, prompt="a"),
                             client.responses.create(model=model, input="a"),
                             client.embeddings.create(model=model, input="a")):  # fmt: skip
                    with pytest.raises(openai.RateLimitError) as caught:
                        await call
                    assert int(caught.value.response.headers["retry-after"]) > 0
            # A client that repeats the request gets its answer when there is room again.
            answer = await client.with_options(max_retries=2).completions.create(model=model, prompt="a", max_tokens=2)
            assert answer.usage.completion_tokens == 2
            admission.refuse("stops")
            with pytest.raises(openai.InternalServerError) as stopped:
                await client.completions.create(model=model, prompt="a")
            assert stopped.value.status_code == 503

    asyncio.run(ask())
