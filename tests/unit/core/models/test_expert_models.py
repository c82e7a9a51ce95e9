"""Mixtures of experts whose weights the C++ kernels read: 16 or 8 bits, and the same logits in any batch."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.covering import covering
from support.paged_steps import run_in_chunks

from vllm_mp.core.models import build_model
from vllm_mp.core.models.experts import _sigmoid
from vllm_mp.core.models.llama import Decoder
from vllm_mp.core.models.loader import load_weights
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.decoder import FusedDecoder
from vllm_mp.kernels.cpu.library import library
from vllm_mp.model_config.families.registry import read_architecture
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


CASES = covering(MIXTURES, [None, "int8"], [True, False])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """Returns the folder of a random model."""

    @functools.cache
    def saved(name: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(name)
        save_random_model(CONFIGS[name], folder)
        return folder

    return saved


@pytest.fixture
def is_fused(request, monkeypatch) -> bool:
    """Whether the layers are computed in one call, as in a process without other ranks, or operation by operation."""
    if not request.param:
        monkeypatch.setattr(ops, "can_fuse", lambda layer, options: False)
    return request.param


@pytest.mark.parametrize(("name", "quantization", "is_fused"), CASES, indirect=["is_fused"])
def test_packed_experts_give_about_the_same_logits_and_leave_no_other_copy(name, quantization, is_fused, folder_of):
    model = load(folder_of(name))
    expected = torch.cat(logits(model))
    model.pack(quantization, torch.float32)
    assert isinstance(model.decoder, FusedDecoder) == is_fused
    got = torch.cat(logits(model))
    errors = (got - expected).norm(dim=1) / expected.norm(dim=1)
    if quantization is None:
        assert errors.max() < 1e-5
    else:
        assert 1e-3 < errors.median() < 0.08  # a token whose rows are rounded may choose another expert
    left = [name for name, parameter in model.decoder.named_parameters() if parameter.dim() > 1]
    assert not left


@pytest.mark.parametrize(("name", "quantization", "is_fused"), CASES, indirect=["is_fused"])
def test_logits_of_a_mixture_are_batch_invariant(name, quantization, is_fused, folder_of):
    model = load(folder_of(name), torch.bfloat16)
    model.pack(quantization, torch.bfloat16)
    together = logits(model, PROMPTS, torch.bfloat16)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert torch.equal(logits(model, [prompt], torch.bfloat16)[0], expected)


def test_mixture_with_experts_of_a_size_that_no_kernel_takes_is_computed_by_operation():
    config = {**CONFIGS["qwen2-moe"].to_dict(), "moe_intermediate_size": 39, "architectures": ["Qwen2MoeForCausalLM"]}
    arch = read_architecture(config)
    assert arch.experts is not None
    assert not arch.experts.layers[0]  # so the first layer could be fused
    model = build_model(arch, torch.float32, "cpu")
    fill_with_dummy_weights(model, 0)
    expected = torch.cat(logits(model))
    model.pack(None, torch.float32)
    assert isinstance(model.decoder, Decoder)
    torch.testing.assert_close(torch.cat(logits(model)), expected)


def test_gate_of_the_shared_expert_is_batch_invariant():
    x = 5 * torch.randn(500, 1)
    together = _sigmoid(x)
    torch.testing.assert_close(together, torch.sigmoid(x))
    assert torch.equal(torch.cat([_sigmoid(row) for row in x.split(3)]), together)
    assert _sigmoid(x.bfloat16()).dtype == torch.bfloat16
