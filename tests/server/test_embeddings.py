"""The endpoint /v1/embeddings: the vectors of `encode`, in the order of the inputs, and errors that name the input."""

import asyncio
import base64
import contextlib

import httpx
import numpy as np
import pytest
import torch

from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions

TEXTS = ["A cat sits on the mat.", "Stock prices fell today.", "A kitten rests on a rug."]


@contextlib.asynccontextmanager
async def serving(engine, **options):
    """A client of an application in this process with these options."""
    transport = httpx.ASGITransport(build_app(engine, ServerOptions(**options)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def post(engine, path="/v1/embeddings", headers=None, **body):
    async def ask():
        async with serving(engine) as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(ask())


def vectors(engine, **body):
    answer = post(engine, **body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def encoded(engine, prompts):
    async def encode():
        return [output.outputs.data async for prompt in _each(prompts) async for output in engine.encode(prompt)]

    async def _each(prompts):
        for prompt in prompts:
            yield prompt

    return asyncio.run(encode())


@pytest.mark.essential
def test_vectors_are_those_of_encode_in_the_order_of_the_inputs(encoder):
    expected = np.stack(encoded(encoder, TEXTS))
    actual = np.float32(vectors(encoder, input=TEXTS))
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert actual[0] @ actual[2] > 0.5 > actual[0] @ actual[1]


def test_base64_is_the_vector_in_little_endian_float32(encoder):
    [as_floats] = vectors(encoder, input=TEXTS[0])
    [as_base64] = vectors(encoder, input=TEXTS[0], encoding_format="base64")
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(as_base64), "<f4"), np.float32(as_floats))


@pytest.mark.parametrize("embed_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("endianness", ["native", "little", "big"])
def test_base64_has_the_type_and_the_order_of_bytes_that_the_request_names(encoder, embed_dtype, endianness):
    [as_floats] = vectors(encoder, input=TEXTS[0])
    form = {"encoding_format": "base64", "embed_dtype": embed_dtype, "endianness": endianness}
    [as_base64] = vectors(encoder, input=TEXTS[0], **form)
    unit = np.uint32 if embed_dtype == "float32" else np.uint16
    order = {"native": "=", "little": "<", "big": ">"}[endianness]
    units = np.frombuffer(base64.b64decode(as_base64), np.dtype(unit).newbyteorder(order)).astype(unit)
    tensor = torch.from_numpy(units).view(getattr(torch, embed_dtype))
    torch.testing.assert_close(tensor, torch.tensor(as_floats).to(tensor.dtype), atol=0, rtol=0)


def test_type_and_order_of_bytes_do_not_change_numbers(encoder):
    plain = vectors(encoder, input=TEXTS[0])
    assert vectors(encoder, input=TEXTS[0], embed_dtype="float16", endianness="big") == plain


def test_token_ids_are_taken_as_they_are(encoder):
    ids = encoder.get_tokenizer()(TEXTS)["input_ids"]
    texts = vectors(encoder, input=TEXTS)
    np.testing.assert_allclose(vectors(encoder, input=ids), texts, atol=2e-6)
    np.testing.assert_allclose(vectors(encoder, input=ids[0]), texts[:1], atol=2e-6)


def test_usage_counts_the_tokens_of_all_inputs(encoder):
    ids = encoder.get_tokenizer()(TEXTS)["input_ids"]
    usage = post(encoder, input=TEXTS).json()["usage"]
    assert usage == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}


def test_dimensions_and_truncation_apply_to_each_input(encoder):
    short = vectors(encoder, input=TEXTS, dimensions=32, truncate_prompt_tokens=4)
    assert [len(vector) for vector in short] == [32] * 3
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-5)
    usage = post(encoder, input=TEXTS, truncate_prompt_tokens=4).json()["usage"]
    assert usage["prompt_tokens"] == 12


def test_vector_is_not_scaled_when_normalization_is_off(encoder):
    [scaled] = vectors(encoder, input=TEXTS[0])
    [plain] = vectors(encoder, input=TEXTS[0], normalize=False)
    assert abs(np.linalg.norm(plain) - 1) > 0.01
    np.testing.assert_allclose(np.float32(plain) / np.linalg.norm(plain), scaled, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", []]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a", [1.5]]}, "input[1][0]"),
        ({"input": ["a", [10**9]]}, "input[1]"),
        ({"input": ["a", [10**30]]}, "input[1]"),
        ({"input": ["a", [5] * 10_000]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10_000}, "dimensions"),
        ({"input": "a", "pooling_type": "max"}, "pooling_type"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype"),
        ({"input": "a", "endianness": "middle"}, "endianness"),
        ({"input": "a", "priority": 2}, "priority"),
    ],
)
def test_wrong_field_is_refused_by_its_path(encoder, body, param):
    answer = post(encoder, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_nul_bytes_are_text_like_any_other(encoder):
    assert len(vectors(encoder, input="a\0b")) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/completions", {"prompt": "Hello"}),
    ],
)
def test_encoder_that_is_asked_for_text_says_that_it_makes_embeddings(encoder, path, body):
    answer = post(encoder, path, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "generates no text; call encode() for its embeddings, or ask /v1/embeddings" in error["message"]


def test_failed_input_leaves_no_request_of_its_batch_behind(encoder):
    async def ask():
        async with serving(encoder) as client:
            answer = await client.post("/v1/embeddings", json={"input": [*["a " * 200] * 50, [10**9]]})
            assert answer.status_code == 400
            assert await encoder.get_num_unfinished_requests() == 0

    asyncio.run(ask())


def test_client_that_leaves_aborts_all_its_inputs(encoder):
    async def ask():
        await encoder.pause_generation("keep")
        async with serving(encoder) as client:
            task = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a"] * 20}))
            while await encoder.get_num_unfinished_requests() < 20:  # noqa: ASYNC110, because nothing announces it
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
        assert await encoder.get_num_unfinished_requests() == 0
        await encoder.resume_generation()

    asyncio.run(ask())


def test_decoder_gives_vectors_too(llm):
    [expected] = encoded(llm, TEXTS[:1])
    np.testing.assert_allclose(np.float32(vectors(llm, input=TEXTS[:1]))[0], expected, atol=2e-6)


CONVERSATION = [{"role": "user", "content": "Where is the cat?"}, {"role": "assistant", "content": "On the"}]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user: Where is the cat?\nassistant: On the\n"),
        ({"add_generation_prompt": True}, "user: Where is the cat?\nassistant: On the\nassistant:"),
        ({"continue_final_message": True}, "user: Where is the cat?\nassistant: On the"),
    ],
    ids=["whole", "answer", "continued"],
)
@pytest.mark.parametrize("add_special_tokens", [None, True])
def test_conversation_has_the_vector_of_the_text_that_the_chat_template_makes_of_it(
    llm, fields, text, add_special_tokens
):
    [expected] = vectors(llm, input=text, add_special_tokens=bool(add_special_tokens))
    body = {"messages": CONVERSATION, "chat_template": TEMPLATE, "add_special_tokens": add_special_tokens, **fields}

    async def ask():
        async with serving(llm, trust_request_chat_template=True) as client:
            return [await client.post(path, json=body) for path in ("/v1/embeddings", "/pooling")]

    embedding, pooled = (answer.json()["data"][0] for answer in asyncio.run(ask()))
    np.testing.assert_allclose(embedding["embedding"], expected, atol=2e-6)
    np.testing.assert_allclose(pooled["data"], expected, atol=2e-6)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eHg="}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": CONVERSATION}, "messages", "the model has no chat template"),
        ({"messages": CONVERSATION, "input": "a"}, "messages", "input and messages; give one of them"),
        ({"messages": [CONVERSATION]}, "messages[0]", "expected `object`, got `array`"),
        ({"messages": CONVERSATION, "chat_template": "{{ 1 }}"}, "chat_template", "does not run"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "image"),
        ({}, "input", "the field input is missing; add it, or messages"),
    ],
    ids=["no template", "both", "batch", "template", "image", "neither"],
)
def test_conversation_that_has_no_vector_is_refused_by_field(encoder, body, param, said):
    answer = post(encoder, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_unknown_field_is_ignored_unless_the_request_is_strict(encoder):
    fields = {"input": "a", "keep_alive": "5m"}
    assert post(encoder, **fields).status_code == 200
    strict = post(encoder, headers={"Prefer": "handling=strict"}, **fields)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "keep_alive")
