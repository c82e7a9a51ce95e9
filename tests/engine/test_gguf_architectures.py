"""GGUF files of architectures without a native module give the same logits as transformers with the same file."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.paged_steps import run_in_chunks
from support.tiny_gguf import rewrite_tensors, write_random_gguf, write_tiny_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Starcoder2Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.weights import gguf_to_safetensors
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy

pytestmark = pytest.mark.usefixtures("forked_cores")

SIZES = {
    "vocab_size": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "starcoder2": Starcoder2Config(**SIZES),
}
PROMPTS = [[3, 4, 5, 9, 7, 8], [10], [11, 3, 6] * 15]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))


def load_theirs(path: Path):
    """Load the file with transformers."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()


def load_ours(path: Path):
    """Convert and load the file as the core does."""
    config = AsyncEngineArgs(model=str(path)).create_engine_config().model_config
    return load_model(config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_converted_file_gives_the_logits_of_transformers(architecture, tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, architecture, CONFIGS[architecture])
    with one_thread():
        theirs, ours = load_theirs(path), load_ours(path)
        for prompt, got in zip(PROMPTS, run_in_chunks(ours, PROMPTS, block_size=4), strict=True):
            with torch.inference_mode():
                torch.testing.assert_close(got, theirs(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_file_of_an_architecture_without_native_module_is_served(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "starcoder2", CONFIGS["starcoder2"])
    with one_thread(), running_engine(path, skip_tokenizer_init=True, device="cpu", max_model_len=128) as engine:
        assert_engine_is_greedy(engine, load_theirs(path), PROMPTS, 16)


def test_error_names_the_tensor_that_a_file_lacks(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_random_gguf(path, "starcoder2", CONFIGS["starcoder2"], omitted="blk.1.ffn_up")
    with pytest.raises(
        ValueError, match=r"tiny\.gguf: architecture 'starcoder2': no tensor for model\.layers\.1\.mlp\.c_fc"
    ):
        load_ours(path)


@pytest.mark.slow
def test_error_names_the_tensor_that_the_architecture_does_not_have(tmp_path):
    write_random_gguf(tmp_path / "plain.gguf", "starcoder2", CONFIGS["starcoder2"])

    def with_more(tensor):
        yield tensor
        if tensor[0] == "output_norm.weight":
            for name, data in (("blk.0.attn_rot_embd.weight", 1.0), ("blk.0.ffn_gate.bias", 0.0), *strange):
                yield name, np.full(96, data, np.float32), gguf.GGMLQuantizationType.F32

    strange = []
    rewrite_tensors(tmp_path / "plain.gguf", tmp_path / "harmless.gguf", with_more)
    load_ours(tmp_path / "harmless.gguf")
    strange = [("blk.1.attn_sinks.weight", 1.0), ("blk.1.ffn_gate.bias", 1.0)]
    rewrite_tensors(tmp_path / "plain.gguf", tmp_path / "strange.gguf", with_more)
    with pytest.raises(
        ValueError,
        match=r"strange\.gguf: architecture 'starcoder2': blk\.1\.attn_sinks\.weight is a tensor that "
        r"Starcoder2ForCausalLM does not have \(and 1 more\)",
    ):
        load_ours(tmp_path / "strange.gguf")


@pytest.mark.slow
def test_encoder_decoder_is_refused_by_name(tmp_path):
    write_tiny_gguf(tmp_path / "t5.gguf", architecture="t5")
    with pytest.raises(ValueError, match=r"t5\.gguf: architecture 't5': .*T5Config"):
        load_ours(tmp_path / "t5.gguf")


def completed(config, path, architecture, metadata, tensors):
    """Return `config` with the values that a file of this content has and that transformers does not read."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.array(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf_to_safetensors._complete(config, gguf.GGUFReader(path), architecture)
    return config


def test_sizes_that_transformers_does_not_read_come_from_the_file(tmp_path):
    metadata = {
        "context_length": 99,
        "attention.key_length": 24,
        "attention.sliding_window": 7,
        "expert_feed_forward_length": 40,
        "rope.freq_base": 999.0,
    }
    config = completed(Starcoder2Config(**SIZES), tmp_path / "a.gguf", "starcoder2", metadata, {})
    assert (config.max_position_embeddings, config.sliding_window) == (99, 7)
    assert config.rope_parameters["rope_theta"] == 999.0
    assert not hasattr(config, "head_dim")
    config = completed(Qwen2MoeConfig(**SIZES), tmp_path / "b.gguf", "qwen2moe", metadata, {})
    assert (config.moe_intermediate_size, config.shared_expert_intermediate_size) == (40, 5632)


def test_rotary_scaling_of_llama_3_is_read_from_the_tensor_that_llama_cpp_writes(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = LlamaConfig(**SIZES, head_dim=128, rope_parameters={**scaling, "rope_theta": 5e5})
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](scaled, "cpu")[0].numpy()
    factors = 5e5 ** (-np.arange(64) / 64) / frequencies
    plain = LlamaConfig(**SIZES, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = completed(plain, tmp_path / "a.gguf", "llama", {}, {"rope_freqs.weight": factors})
    assert config.rope_parameters == {**scaled.rope_parameters, "factor": pytest.approx(8.0)}
    plain.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        completed(plain, tmp_path / "b.gguf", "llama", {}, {"rope_freqs.weight": np.linspace(1, 3, 64)})


def test_rotary_scaling_is_read_from_the_file(tmp_path):
    long = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": [2.0] * 8}
    metadata = {"rope.scaling.original_context_length": 64}
    phi = completed(Phi3Config(**SIZES, pad_token_id=0), tmp_path / "a.gguf", "phi3", metadata, long)
    assert phi.original_max_position_embeddings == 64
    assert {**phi.rope_parameters, "rope_theta": 0} == {
        "rope_type": "longrope",
        "rope_theta": 0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    gemma = completed(Gemma3TextConfig(**SIZES), tmp_path / "b.gguf", "gemma3", linear, {})
    assert gemma.rope_parameters["full_attention"]["factor"] == 8.0
    assert gemma.rope_parameters["sliding_attention"]["rope_type"] == "default"
    with pytest.raises(ValueError, match=r"'strange'.*linear, yarn"):
        completed(Gemma3TextConfig(**SIZES), tmp_path / "c.gguf", "gemma3", {"rope.scaling.type": "strange"}, {})
