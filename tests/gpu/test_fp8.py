"""Weights and cache in 8-bit floats on the GPU, compared with kernels/reference.py on the CPU."""

import pytest
import torch
from support.float8_reference import in_float8
from support.gpu_device import DEVICE, ON_DEVICE

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.kernels import ops, reference
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy
from vllm_mp.testing.random_models import CONFIGS, PROMPT_LENGTHS, random_prompts, save_random_model

pytestmark = [
    *ON_DEVICE,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="this GPU has no 8-bit floats",
    ),
]

PRODUCT_ERROR = 5e-3
"""Of a product, relative to its norm; tests/kernels/test_float8_sums.py justifies it."""
NEAR_TIE = {"float32": 0.5, "bfloat16": 1.5}
"""Logits range over seven. A difference in a last bit may round to another 8-bit float."""


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_rows", [0, 64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(0, 64, 64), (1, 1024, 4096), (16, 2048, 1024), (33, 512, 1040), (64, 192, 300), (200, 1024, 2048), (300, 64, 72)],
)
def test_products_equal_those_on_the_cpu(rows, outputs, inputs, has_bias, block_rows, dtype):
    x = torch.randn(rows, inputs).to(dtype)
    groups = -(-inputs // 128) if block_rows else 1
    weight = reference.to_float8(100 * torch.randn(outputs, inputs))
    scale = 0.01 * torch.rand(outputs // (block_rows or 1), groups) + 0.01
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    got = ops.linear(*(None if part is None else part.to(DEVICE) for part in (x, weight, bias, scale)))
    expected = reference.linear(x.float(), weight, bias, scale)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert (got.cpu().float() - expected).norm() <= PRODUCT_ERROR * expected.norm()


@pytest.mark.parametrize("rows", [1, 40, 200])
@pytest.mark.parametrize("block_rows", [0, 128])
def test_long_sums_of_positive_products_keep_their_bits(rows, block_rows):
    x = torch.rand(rows, 8192).bfloat16()
    weight = reference.to_float8(100 * torch.rand(256, 8192))
    scale = torch.full((256 // (block_rows or 1), 64 if block_rows else 1), 0.01)
    got = ops.linear(*(part.to(DEVICE) for part in (x, weight)), None, scale.to(DEVICE))
    expected = reference.linear(x.float(), weight, None, scale)
    assert (got.cpu().float() - expected).norm() <= PRODUCT_ERROR * expected.norm()


@pytest.mark.skipif(DEVICE != "cuda", reason="only CUDA has graphs")
@pytest.mark.parametrize("rows", [1, 24, 96])
@pytest.mark.parametrize("block_rows", [0, 128])
def test_products_can_be_captured_and_replayed(rows, block_rows):
    weight = reference.to_float8(100 * torch.randn(512, 1024)).to(DEVICE)
    scale = torch.rand(512 // (block_rows or 1), 8 if block_rows else 1).to(DEVICE) + 0.5
    x = torch.randn(rows, 1024, device=DEVICE).bfloat16()
    ops.linear(x, weight, None, scale)  # compiles, which a capture does not allow
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weight, None, scale)
    x.copy_(torch.randn(rows, 1024) * 3)
    graph.replay()
    expected = reference.linear(x.float().cpu(), weight.cpu(), None, scale.cpu())
    assert (out.cpu().float() - expected).norm() <= PRODUCT_ERROR * expected.norm()


@pytest.mark.parametrize("dtype", NEAR_TIE)
def test_answers_agree_with_transformers_with_the_same_roundings(dtype, tmp_path):
    with one_thread():
        model = save_random_model(CONFIGS["llama"], tmp_path)
        reference_model = in_float8(model.to(getattr(torch, dtype)).float())
        with running_engine(
            tmp_path,
            skip_tokenizer_init=True,
            device=DEVICE,
            num_threads=1,
            dtype=dtype,
            max_model_len=128,
            quantization="fp8",
            kv_cache_dtype="fp8",
        ) as engine:
            assert engine.vllm_config.device_config.device == DEVICE
            assert_engine_is_greedy(engine, reference_model, random_prompts(PROMPT_LENGTHS), 16, NEAR_TIE[dtype])
