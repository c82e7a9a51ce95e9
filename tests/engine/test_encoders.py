"""Encoders in a real core: a real sentence encoder, and a small random model of each family."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.pooling_parity import TOLERANCE, assert_pooled, hidden_states, params_of, vector, vectors
from support.random_encoders import BERT, DISTILBERT, random_encoder
from support.random_encoders import PROMPTS as RANDOM_PROMPTS
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from vllm_mp import EngineGenerateError, PoolingParams, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import eventually, greedy, is_empty, running_engine
from vllm_mp.testing.prompts import PROMPTS

pytestmark = pytest.mark.usefixtures("forked_cores")

BATCH = [*PROMPTS[:29], "long " * 400]
CONTEXT = 256


@pytest.fixture(scope="module")
def reference(minilm):
    return AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return AutoTokenizer.from_pretrained(minilm)


def test_pooling_is_configured_by_the_folder_of_the_model(encoder):
    config = encoder.model_config
    assert (config.pooling.pooling_type, config.pooling.normalize, config.max_model_len) == ("mean", True, CONTEXT)


@pytest.mark.essential
@pytest.mark.parametrize("concurrent", [True, False], ids=["together", "alone"])
def test_vectors_equal_those_of_the_published_pipeline(encoder, reference, tokenizer, concurrent):
    outputs = vectors(encoder, BATCH, concurrent=concurrent, truncate_prompt_tokens=-1)
    for prompt, output in zip(BATCH, outputs, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == tokenizer(prompt, truncation=True, max_length=CONTEXT).input_ids
        assert_pooled(output, hidden_states(reference, output.prompt_token_ids), "mean")
    assert max(len(output.prompt_token_ids) for output in outputs) == CONTEXT


@pytest.mark.parametrize("fields", [{"normalize": False}, {"dimensions": 128}, {"dimensions": 7, "normalize": False}])
@pytest.mark.parametrize("pooling_type", ["mean", "cls", "last"])
def test_each_pooling_type_with_each_option_gives_the_expected_vectors(encoder, reference, pooling_type, fields):
    for output in vectors(encoder, BATCH[:4], params_of(pooling_type, **fields)):
        assert_pooled(output, hidden_states(reference, output.prompt_token_ids), pooling_type, **fields)


def test_prompts_as_token_ids_give_the_same_vectors(encoder, tokenizer):
    ids = tokenizer(PROMPTS[0]).input_ids
    of_text, *of_ids = vectors(
        encoder, [PROMPTS[0], ids, {"prompt_token_ids": ids, "prompt": "said"}, {"prompt": PROMPTS[0]}]
    )
    for output in of_ids:
        np.testing.assert_allclose(output.outputs.data, of_text.outputs.data, atol=TOLERANCE)
    assert [output.prompt for output in of_ids] == [None, "said", PROMPTS[0]]


def test_tokenizer_truncates_texts_and_token_ids_lose_their_end(encoder, tokenizer):
    text = "The quick brown fox jumps over the lazy dog"
    ids = tokenizer(text).input_ids
    (of_text,) = vectors(encoder, [text], truncate_prompt_tokens=5)
    assert of_text.prompt_token_ids == [*ids[:4], tokenizer.sep_token_id]
    (of_ids,) = vectors(encoder, [ids], PoolingParams(truncate_prompt_tokens=5))
    assert of_ids.prompt_token_ids == ids[:5]
    (whole,) = vectors(encoder, [text], PoolingParams(truncate_prompt_tokens=5), truncate_prompt_tokens=-1)
    assert whole.prompt_token_ids == ids
    with pytest.raises(ValueError, match="leave room for the tokens that the tokenizer adds, got 1"):
        vectors(encoder, [text], truncate_prompt_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("long " * CONTEXT, None, ValueError, "258 tokens.*max_model_len=256.*truncate_prompt_tokens"),
        ([], None, ValueError, "empty"),
        ([30_522], None, ValueError, r"in \[0, 30522\)"),
        ("x", PoolingParams(dimensions=385), ValueError, "dimensions must be at most 384"),
        ("x", SamplingParams(), TypeError, r"call generate\(\)"),
        ("x", {"dimensions": 3}, TypeError, "PoolingParams, got dict"),
        ("\ud800", None, ValueError, "not valid Unicode"),
        (3.5, None, TypeError, "token ids"),
    ],
)
def test_requests_that_an_encoder_cannot_run_are_refused(encoder, prompt, params, error, message):
    with pytest.raises(error, match=message):
        vectors(encoder, [prompt], params)
    assert asyncio.run(is_empty(encoder))


def test_generate_is_refused_by_an_encoder(encoder):
    async def run():
        async for _ in encoder.generate("x", greedy(3)):
            pass

    with pytest.raises(ValueError, match=r"is an encoder.*encode\(\)"):
        asyncio.run(run())


def test_core_of_an_encoder_validates_requests_that_no_client_validated(encoder):
    ids = wire.pack_ids([101, 102])
    connection = CoreConnection(encoder.cores.first.supervisor.core.connection.address)
    try:
        welcome, _ = connection.greet(10, lambda: None)
        for message in (
            wire.AddRequest(welcome.incarnation, 0, "text", ids, SamplingParams(seed=1)),
            wire.AddPooling(welcome.incarnation, 1, "long", wire.pack_ids([1] * 300), PoolingParams()),
            wire.AddPooling(welcome.incarnation, 2, "id", wire.pack_ids([-1]), PoolingParams()),
            wire.AddPooling(welcome.incarnation, 3, "half", b"123", PoolingParams()),
            wire.AddPooling(welcome.incarnation, 4, "good", ids, PoolingParams()),
        ):
            connection.send(message)
        ends, vectors = [], []
        while len(ends) < 5:
            answer = wire.decode_core_message(connection._socket.recv())
            ends += answer.finished
            vectors += answer.vectors
    finally:
        connection.close()
    assert [(end.slot, end.reason) for end in ends] == [
        (0, "error"),
        (1, "error"),
        (2, "error"),
        (3, "error"),
        (4, "stop"),
    ]
    assert "encode()" in ends[0].error
    assert "max_model_len=256" in ends[1].error
    assert [slot for slot, _ in vectors] == [4]


def test_many_prompts_share_a_step(encoder):
    async def run():
        before = (await encoder.core_status())["step"]
        await asyncio.gather(*(vector(encoder, [101, *range(2000, 2000 + i % 20), 102]) for i in range(200)))
        return (await encoder.core_status())["step"] - before

    assert asyncio.run(run()) < 60


def test_aborted_request_ends_with_an_error_that_says_so(encoder):
    async def run():
        stream = await encoder.add_request("gone", [101] * 200, PoolingParams())
        assert await encoder.get_num_unfinished_requests() == 1
        await encoder.abort("gone")
        with pytest.raises(EngineGenerateError, match="request gone was aborted"):
            await anext(stream)
        assert await encoder.get_num_unfinished_requests() == 0
        assert (await vector(encoder, "x", request_id="gone")).request_id == "gone"
        await eventually(lambda: is_empty(encoder))

    asyncio.run(run())


CLIENT = """
import asyncio, sys
from vllm_mp import AsyncEngineArgs, AsyncLLM

llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model="All-MiniLM-L6-v2", dtype="float32", device="cpu"))

async def main():
    texts = ["A plane is taking off.", "An air plane takes off.", "A man plays a large flute."]
    vectors = []
    for text in texts:
        async for output in llm.encode(text):
            vectors.append(output.outputs.data)
    assert vectors[0] @ vectors[1] > 0.8 > 0.3 > vectors[0] @ vectors[2], vectors

asyncio.run(main())
llm.shutdown()
assert "torch" not in sys.modules
"""


def test_encoder_is_found_by_its_alias_and_its_client_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


FAMILIES = {
    "bert": (BertModel, BertConfig(**BERT)),
    "bert-masked": (BertForMaskedLM, BertConfig(**BERT, type_vocab_size=1, hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "bert-pretraining": (BertForPreTraining, BertConfig(**BERT, hidden_act="relu")),
    "roberta-masked": (RobertaForMaskedLM, RobertaConfig(**BERT, hidden_act="gelu_pytorch_tanh")),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig(**BERT, pad_token_id=3)),
    "distilbert-masked": (DistilBertForMaskedLM, DistilBertConfig(**DISTILBERT, activation="gelu")),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_each_family_equal_those_of_transformers(family, tmp_path):
    model = random_encoder(*FAMILIES[family], tmp_path)
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "max_model_len": 62, "max_num_seqs": 4}
    with one_thread(), running_engine(tmp_path, **options) as engine:
        base = getattr(model, model.base_model_prefix, model)
        for concurrent in (True, False):
            for pooling_type in ("mean", "cls"):
                for output in vectors(engine, RANDOM_PROMPTS, params_of(pooling_type), concurrent):
                    assert_pooled(output, hidden_states(base, output.prompt_token_ids), pooling_type)


@pytest.mark.slow
def test_encoder_with_the_largest_options_allocates_no_kv_cache(tmp_path):
    config = BertConfig(**{**BERT, "max_position_embeddings": 8192})
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["BertModel"]}))
    options = {"skip_tokenizer_init": True, "load_format": "dummy", "kv_cache_memory_bytes": None}
    with running_engine(
        tmp_path, max_model_len=8192, max_num_seqs=65_536, max_num_batched_tokens=2**17, **options
    ) as engine:
        (output,) = vectors(engine, [[5] * 300])
        assert output.outputs.data.shape == (48,)
        assert asyncio.run(engine.core_status())["total_blocks"] == 65_536
        # More vectors in a step than fit into a message.
        outputs = vectors(engine, [[5 + i % 90] for i in range(1500)])
        assert asyncio.run(engine.core_status())["step"] < 100
        for i, output in enumerate(outputs):
            np.testing.assert_allclose(output.outputs.data, outputs[i % 90].outputs.data, atol=TOLERANCE)


def test_tensors_with_names_of_old_checkpoints_are_read(tmp_path):
    from safetensors.torch import load_file, save_file

    model = random_encoder(*FAMILIES["bert-masked"], tmp_path)
    file = tmp_path / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    assert any(name.endswith("gamma") for name in old)
    save_file({**old, "bert.embeddings.position_ids": torch.arange(66)[None]}, file, {"format": "pt"})
    with running_engine(tmp_path, skip_tokenizer_init=True, device="cpu", max_model_len=62) as engine:
        (output,) = vectors(engine, RANDOM_PROMPTS[2:3], params_of("mean"))
        assert_pooled(output, hidden_states(model.bert, output.prompt_token_ids), "mean")
