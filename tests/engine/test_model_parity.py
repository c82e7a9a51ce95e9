"""Each native model, run in random chunks over a scattered paged cache, gives the logits of transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paged_steps import run_in_chunks
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vllm_mp.core.models import build_model
from vllm_mp.core.models.loader import load_weights
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.random_models import CONFIGS, GPT2_SIZES, SIZES, random_prompts, save_random_model


def load_ours(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    arch = read_architecture(json.loads((folder / "config.json").read_text()))
    model = build_model(arch, dtype, "cpu")
    load_weights(model, folder, "auto", 0)
    return model


def assert_same_logits(theirs: Any, folder: Path) -> None:
    ours = load_ours(folder)
    prompts = random_prompts((61, 1, 24, 100, 33))
    for prompt, got in zip(prompts, run_in_chunks(ours, prompts, block_size=4), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_from_chunks_over_a_paged_cache_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert_same_logits(save_random_model(CONFIGS[name], tmp_path), tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma2", "gemma3", "phi3-partial", "granite", "olmo2", "mixtral", "qwen2-moe"]
)
def test_bfloat16_logits_are_as_exact_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    rounded = save_random_model(CONFIGS[name], tmp_path).bfloat16()
    rounded.set_attn_implementation("eager")
    exact = copy.deepcopy(rounded).float()
    ours: Any = load_ours(tmp_path, torch.bfloat16)
    ours.pack(None, torch.bfloat16)
    prompts = random_prompts((61, 24, 100, 33))
    chunks = run_in_chunks(ours, prompts, block_size=4, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected, theirs = (
            torch.cat([model(torch.tensor([prompt])).logits[0].float() for prompt in prompts])
            for model in (exact, rounded)
        )
    assert (torch.cat(chunks) - expected).norm() < 1.2 * (theirs - expected).norm()


@pytest.mark.parametrize(
    "kind",
    [
        LlamaConfig,
        MistralConfig,
        Qwen2Config,
        Qwen3Config,
        Gemma2Config,
        Gemma3TextConfig,
        Phi3Config,
        GraniteConfig,
        Olmo2Config,
        MixtralConfig,
        Qwen2MoeConfig,
        Qwen3MoeConfig,
        GraniteMoeConfig,
        GPT2Config,
    ],
)
def test_fields_absent_from_config_json_get_the_defaults_of_transformers(kind: type[PreTrainedConfig]) -> None:
    sizes = GPT2_SIZES if kind is GPT2Config else SIZES
    sizes = {key: value for key, value in sizes.items() if key not in ("head_dim", "num_key_value_heads")}
    if kind not in (LlamaConfig, Phi3Config, GraniteConfig, GraniteMoeConfig, Olmo2Config, GPT2Config):
        sizes["num_attention_heads"] = 32  # a multiple of 4, 8, 16 and 32, the defaults for the KV heads
        sizes["hidden_size"] = 64
    padding = {"pad_token_id": 0} if kind is Phi3Config else {}  # its default is outside a small vocabulary
    filled = {**kind(**sizes, **padding).to_dict(), "architectures": None}
    bare = {"model_type": kind.model_type, **sizes}
    assert read_architecture(bare) == read_architecture(filled)


def test_gpt2_file_of_the_hub_without_prefix_and_with_mask_buffers_is_read(tmp_path: Path) -> None:
    theirs = save_random_model(GPT2Config(**GPT2_SIZES), tmp_path)
    assert isinstance(theirs, GPT2LMHeadModel)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(3)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file(tensors, path)
    assert_same_logits(theirs, tmp_path)


def test_text_part_of_a_checkpoint_of_texts_and_images_is_read(tmp_path: Path) -> None:
    theirs = save_random_model(CONFIGS["gemma3"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    text = theirs.config.to_dict()
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        renamed["vision_tower.vision_model.post_layernorm.bias"] = torch.ones(3)
        renamed["model.multi_modal_projector.mm_input_projection_weight"] = torch.ones(3, 3)
        save_file(renamed, tmp_path / "model.safetensors")
        assert_same_logits(theirs, tmp_path)


def test_fields_of_the_text_part_have_the_defaults_of_transformers() -> None:
    bare = {"text_config": {"hidden_size": 64, "num_hidden_layers": 12}, "model_type": "gemma3"}
    assert read_architecture(bare) == read_architecture(Gemma3Config(**bare).to_dict() | {"architectures": None})
