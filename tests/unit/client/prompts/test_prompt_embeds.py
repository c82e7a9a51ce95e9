"""Embeddings that callers give as prompts: packed as they are, or refused before anything is sent."""

import asyncio
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from vllm_mp import AsyncEngineArgs, SamplingParams
from vllm_mp.client.prompts import embeddings as prompt_embeds
from vllm_mp.client.prompts.embeddings import pack_prompt_embeds
from vllm_mp.client.prompts.prompt import TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.request import GenerationRequest, digest_of
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.testing.random_models import CONFIGS, SIZES, save_config
from vllm_mp.validation.embeds_validation import check_prompt_embeds

HIDDEN = SIZES["hidden_size"]
VALUES = np.random.default_rng(0).standard_normal((6, HIDDEN)).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The configuration of a model that takes embeddings and computes in float16."""
    folder = save_config(CONFIGS["llama"], tmp_path_factory.mktemp("model"))
    arguments = AsyncEngineArgs(
        str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="float16", enable_prompt_embeds=True
    )
    return arguments.create_engine_config().model_config


def pack(value, model, limit=None, max_tokens=100, **params):
    return asyncio.run(pack_prompt_embeds(value, limit, max_tokens, SamplingParams(**params), model))


@pytest.mark.parametrize("inline_bytes", [0, 2**20], ids=["in a thread", "inline"])
def test_tensors_and_arrays_of_every_dtype_keep_their_values(model, monkeypatch, inline_bytes):
    monkeypatch.setattr(prompt_embeds, "_INLINE_BYTES", inline_bytes)
    tensor = torch.from_numpy(VALUES)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = tensor.to(dtype).requires_grad_()
        packed = pack(given, model)
        assert (packed.dtype, packed.num_tokens) == (str(dtype).removeprefix("torch."), 6)
        assert torch.equal(torch.frombuffer(bytearray(packed.data), dtype=dtype).view(6, HIDDEN), given)
    assert pack(VALUES, model).data == pack(tensor, model).data == VALUES.tobytes()
    assert pack(VALUES.astype(">f4"), model).data == VALUES.tobytes()
    assert pack(np.asfortranarray(VALUES), model).data == pack(tensor.t().contiguous().t(), model).data
    assert pack(tensor.unsqueeze(0), model).data == VALUES.tobytes(), "a batch of one prompt"
    assert pack(VALUES, model, limit=2).data == VALUES[-2:].tobytes()


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (VALUES.tolist(), TypeError, r"a torch tensor or a NumPy array \[num_tokens, hidden_size\], got list"),
        (VALUES.astype(np.float64), TypeError, "must be of float32, float16, bfloat16, got float64; convert it"),
        (torch.zeros(2, HIDDEN, dtype=torch.int64), TypeError, "got int64; convert it"),
        (VALUES[0], ValueError, rf"must be \[num_tokens, hidden_size\], got \[{HIDDEN}\]"),
        (np.zeros((2, 3, HIDDEN), np.float32), ValueError, rf"got \[2, 3, {HIDDEN}\]"),
        (VALUES[:, :-1], ValueError, rf"must be \[num_tokens, {HIDDEN}\].*got \[6, {HIDDEN - 1}\]"),
        (VALUES[:0], ValueError, "the prompt is empty; give prompt_embeds of at least one token"),
        (np.zeros((2, 0), np.float32), ValueError, rf"must be \[num_tokens, {HIDDEN}\].*got \[2, 0\]"),
        (np.broadcast_to(np.float32(0), (50, 2**20)), ValueError, "at most 58720256 bytes, got 209715200; shorten"),
    ],
    ids=["list", "float64", "integers", "1 dim", "batch", "width", "empty", "no columns", "bytes"],
)
def test_other_values_are_refused_with_the_reason(model, value, kind, why):
    with pytest.raises(kind, match=f"prompt_embeds.*{why}|^{why}"):
        pack(value, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_with_their_row(model, dtype, value):
    embeds = torch.zeros(3, HIDDEN, dtype=dtype)
    embeds[1, 5] = value
    with pytest.raises(ValueError, match=r"must be finite in float16, the model's dtype, got -?(nan|inf) in row 1"):
        pack(embeds, model)


def test_value_that_overflows_in_the_dtype_of_the_model_is_refused(model):
    embeds = np.full((1, HIDDEN), 65504, np.float32)
    assert pack(embeds, model).num_tokens == 1
    with pytest.raises(ValueError, match="finite in float16, the model's dtype, got 70000"):
        pack(np.full((1, HIDDEN), 70000, np.float32), model)
    largest = torch.full((1, HIDDEN), torch.finfo(torch.bfloat16).max)
    assert pack(largest, msgspec.structs.replace(model, dtype="bfloat16")).num_tokens == 1


def test_more_rows_than_fit_are_refused_before_they_are_copied(model):
    with pytest.raises(TooManyTokensError, match="101 tokens"):
        pack(np.broadcast_to(np.float32(0), (101, HIDDEN)), model)


def test_engine_without_the_option_refuses_embeddings_and_names_it(model):
    with pytest.raises(ValueError, match="needs an engine with enable_prompt_embeds=True"):
        pack(VALUES, msgspec.structs.replace(model, enable_prompt_embeds=False))


def test_prompt_logprobs_of_embeddings_are_refused(model):
    with pytest.raises(ValueError, match="prompt_logprobs must be None with prompt_embeds"):
        pack(VALUES, model, prompt_logprobs=1)


@pytest.mark.parametrize(
    "embeds",
    [
        PromptEmbeds("float64", 1, bytes(8 * HIDDEN)),
        PromptEmbeds("float32", 0, b""),
        PromptEmbeds("float32", -1, bytes(4 * HIDDEN)),
        PromptEmbeds("float32", 2, bytes(4 * HIDDEN)),
        PromptEmbeds("float16", 1, bytes(2 * HIDDEN - 1)),
    ],
    ids=["dtype", "empty", "negative", "short", "odd"],
)
def test_core_refuses_embeddings_whose_parts_disagree(model, embeds):
    with pytest.raises(ValueError, match="prompt"):
        check_prompt_embeds(embeds, SamplingParams(), model)


def test_prompt_has_either_token_ids_or_embeddings():
    parsed = parse_prompt({"prompt_embeds": VALUES, "prompt": "said", "cache_salt": "mine"})
    assert parsed[:4] == ("said", None, "mine", VALUES)
    for other in ({"prompt_token_ids": [1]}, {}):
        with pytest.raises(ValueError, match="prompt_embeds and prompt_token_ids; give one of them"):
            parse_prompt({"prompt_embeds": VALUES, **other}, None if other else [1])


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_prompt_of_embeddings_may_say_that_none_of_its_tokens_is_read_as_an_id(kind):
    mask = kind([False] * 6)
    parsed = parse_prompt({"prompt_embeds": VALUES, "prompt_token_ids": [7] * 6, "prompt_is_token_ids": mask})
    assert (parsed.token_ids, parsed.embeds is VALUES) == (None, True)
    assert parse_prompt({"prompt_embeds": VALUES, "prompt_is_token_ids": mask}).embeds is VALUES


@pytest.mark.parametrize(
    ("fields", "kind", "why"),
    [
        ({"prompt_is_token_ids": [False, True]}, NotImplementedError, r"\[1\] is True: .* give the embeddings of all"),
        ({"prompt_is_token_ids": [False]}, ValueError, "must have a bool for each of 2 prompt_token_ids, got 1"),
        ({"prompt_is_token_ids": [0, 1]}, TypeError, r"must be a list of bool, got \[0, 1\]"),
        ({"prompt_is_token_ids": False}, TypeError, "must be a list of bool, got False"),
        ({"prompt_is_token_ids": [False] * 2, "prompt_embeds": None}, ValueError, "prompt_embeds; leave it out"),
    ],
    ids=["mixed", "short", "numbers", "bool", "no embeddings"],
)
def test_prompt_of_both_token_ids_and_embeddings_is_refused_by_the_field_that_mixes_them(fields, kind, why):
    with pytest.raises(kind, match=f"^prompt_is_token_ids.*{why}"):
        parse_prompt({"prompt_embeds": VALUES, "prompt_token_ids": [1, 2], **fields})


def test_requests_with_other_embeddings_are_not_equal():
    def request(data):
        return GenerationRequest("id", None, [0], b"", SamplingParams(seed=1), 0.0, prompt_embeds=data)

    first, other = PromptEmbeds("float32", 1, b"abcd"), PromptEmbeds("float32", 1, b"abce")
    assert digest_of(request(first)) == digest_of(request(PromptEmbeds("float32", 1, b"abcd")))
    assert len({digest_of(request(embeds)) for embeds in (first, other, None)}) == 3


def test_client_packs_arrays_without_torch(model):
    code = (
        "import asyncio, sys, msgspec, numpy as np\n"
        "from vllm_mp import SamplingParams\n"
        "from vllm_mp.config import ModelConfig\n"
        "from vllm_mp.client.prompts.embeddings import pack_prompt_embeds\n"
        "model = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelConfig)\n"
        f"value = np.zeros((2, {HIDDEN}), np.float16)\n"
        "packed = asyncio.run(pack_prompt_embeds(value, None, 9, SamplingParams(), model))\n"
        "assert packed.num_tokens == 2 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], input=msgspec.json.encode(model), check=True, timeout=60)
