"""Mixtures of experts whose weights the C++ kernels read: 16 or 8 bits, and the same logits in any batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.paged_steps import run_in_chunks

from vllm_mp.core.models import build_model
from vllm_mp.core.models.experts import ExpertMLP, _sigmoid
from vllm_mp.core.weights.loader import load_weights
from vllm_mp.kernels.cpu.library import library
from vllm_mp.model_config.registry import read_architecture
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(library() is None, reason="the kernels are not built"),
]
MIXTURES = ["mixtral", "qwen2-moe", "qwen3-moe", "granite-moe"]
PROMPTS = random_prompts((40, 1, 24, 33))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = build_model(read_architecture(json.loads((folder / "config.json").read_text())), dtype, "cpu")
    load_weights(model, folder, "auto", 0)
    return model


def logits(model: Any, prompts: list[list[int]] = PROMPTS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return run_in_chunks(model, prompts, block_size=4, dtype=dtype)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_packed_experts_give_about_the_same_logits_and_leave_no_other_copy(name, quantization, tmp_path):
    save_random_model(CONFIGS[name], tmp_path)
    model = load(tmp_path)
    expected = torch.cat(logits(model))
    model.pack(quantization, torch.float32)
    got = torch.cat(logits(model))
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    if quantization is None:
        assert errors.max() < 1e-5
    else:
        assert 1e-3 < errors.median() < 0.08  # a token whose rows are rounded may choose another expert
    layers = [layer.mlp for layer in model.decoder.layers if isinstance(layer.mlp, ExpertMLP)]
    assert layers
    assert not [parameter for layer in layers for parameter in layer.parameters()]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_logits_of_a_mixture_are_batch_invariant(name, quantization, tmp_path):
    save_random_model(CONFIGS[name], tmp_path)
    model = load(tmp_path, torch.bfloat16)
    model.pack(quantization, torch.bfloat16)
    together = logits(model, PROMPTS, torch.bfloat16)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits(model, [prompt], torch.bfloat16)[0], expected)


def test_gate_of_the_shared_expert_is_batch_invariant():
    x = 5 * torch.randn(500, 1)
    together = _sigmoid(x)
    torch.testing.assert_close(together, torch.sigmoid(x))
    assert torch.equal(torch.cat([_sigmoid(row) for row in x.split(3)]), together)
    assert _sigmoid(x.bfloat16()).dtype == torch.bfloat16
