"""Each native model, run in random chunks over a scattered paged cache, against the transformers model."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM as HubModel
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from vllm_mp.architecture import Architecture
from vllm_mp.core.models import build_model
from vllm_mp.core.weights import load_weights
from vllm_mp.kernels.ops import AttentionMetadata

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 128}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=2.0, original_max_position_embeddings=64)
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama-linear": LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama-dynamic": LlamaConfig(**SIZES, **rope("dynamic", factor=4.0)),
    "llama-llama3": LlamaConfig(**SIZES, **LLAMA3),
    "llama-yarn": LlamaConfig(**SIZES, **YARN),
    "llama-yarn-untruncated": LlamaConfig(
        **SIZES,
        **rope("yarn", factor=2.0, original_max_position_embeddings=64, truncate=False, attention_factor=0.8),
    ),
    "mistral-windowed": MistralConfig(**SIZES, sliding_window=9),
    "mistral-unwindowed": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windowed": Qwen2Config(**SIZES, **WINDOWED, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-windowed": Qwen3Config(
        **SIZES, **WINDOWED, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gpt2": GPT2Config(**GPT2_SIZES),
    "gpt2-scaled": GPT2Config(
        **GPT2_SIZES, n_inner=64, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False
    ),
}


def save_random_model(config: PreTrainedConfig, folder: Path) -> nn.Module:
    """A transformers model with every parameter random, norms and biases too, saved under `folder`."""
    torch.manual_seed(0)
    model = HubModel.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def load_ours(folder: Path) -> tuple[Architecture, nn.Module]:
    arch = Architecture.from_hf_config(json.loads((folder / "config.json").read_text()))
    model = build_model(arch, torch.float32, "cpu")
    load_weights(model, folder, "auto", 0)
    return arch, model


@torch.inference_mode()
def run_in_chunks(arch: Architecture, model: Any, prompts: list[list[int]], block_size: int) -> list[Tensor]:
    """Logits of every token of every prompt, from steps that advance each by a random number of tokens."""
    chance = random.Random(0)
    blocks_per_row = -(-max(map(len, prompts)) // block_size)
    blocks = list(range(blocks_per_row * len(prompts) + 2))
    chance.shuffle(blocks)
    tables = [blocks[row * blocks_per_row : (row + 1) * blocks_per_row] for row in range(len(prompts))]
    shape = (len(blocks), block_size, arch.num_kv_heads, arch.head_dim)
    # What no row has written is NaN: reading it would show.
    caches = [tuple(torch.full(shape, float("nan")) for _ in "kv") for _ in range(arch.num_layers)]
    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        step = [
            (row, min(chance.choice([1, 1, 2, 7, 30]), len(prompt) - done[row]))
            for row, prompt in enumerate(prompts)
            if done[row] < len(prompt) and chance.random() < 0.8
        ]
        if not step:
            continue
        step.sort(key=lambda item: item[1] > 1)
        positions = [done[row] + i for row, count in step for i in range(count)]
        owners = [row for row, count in step for _ in range(count)]
        pairs = list(zip(owners, positions, strict=True))
        seq_lens = [done[row] + count for row, count in step]
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, *itertools.accumulate(count for _, count in step)], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor([tables[row] for row, _ in step], dtype=torch.int32),
            slot_mapping=torch.tensor([tables[r][p // block_size] * block_size + p % block_size for r, p in pairs]),
            query_lens=[count for _, count in step],
            host_seq_lens=seq_lens,
            num_decodes=sum(count == 1 for _, count in step),
            max_seq_len=max(seq_lens),
        )
        ids = torch.tensor([prompts[row][position] for row, position in pairs])
        hidden = model.forward(ids, torch.tensor(positions), caches, metadata)
        parts = model.compute_logits(hidden).split(metadata.query_lens)
        for (row, count), part in zip(step, parts, strict=True):
            logits[row].append(part)
            done[row] += count
    return [torch.cat(parts) for parts in logits]


def assert_same_logits(theirs: Any, folder: Path) -> None:
    arch, ours = load_ours(folder)
    chance = random.Random(1)
    prompts = [[chance.randrange(arch.vocab_size) for _ in range(length)] for length in (61, 1, 24, 100, 33)]
    for prompt, got in zip(prompts, run_in_chunks(arch, ours, prompts, block_size=4), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_paged_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    assert_same_logits(save_random_model(CONFIGS[name], tmp_path), tmp_path)


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GPT2Config])
def test_defaults_are_those_of_the_transformers_class(kind: type[PreTrainedConfig]) -> None:
    sizes = GPT2_SIZES if kind is GPT2Config else SIZES
    sizes = {key: value for key, value in sizes.items() if key not in ("head_dim", "num_key_value_heads")}
    if kind is not LlamaConfig and kind is not GPT2Config:
        sizes["num_attention_heads"] = 32  # a multiple of the classes' default of 8 or 32 KV heads
        sizes["hidden_size"] = 64
    filled = {**kind(**sizes).to_dict(), "architectures": None}
    bare = {"model_type": kind.model_type, **sizes}
    assert Architecture.from_hf_config(bare) == Architecture.from_hf_config(filled)


def test_gpt2_hub_file_without_prefix_and_with_mask_buffers(tmp_path: Path) -> None:
    theirs = save_random_model(GPT2Config(**GPT2_SIZES), tmp_path)
    assert isinstance(theirs, GPT2LMHeadModel)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(3)}
    tensors |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file(tensors, path)
    assert_same_logits(theirs, tmp_path)
