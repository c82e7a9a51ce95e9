"""The engine on the GPU agrees with transformers on the CPU, and its operations agree with those on the CPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from support.gpu_device import DEVICE, ON_DEVICE
from torch import Tensor

from vllm_mp import SamplingParams
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.kernels import ops
from vllm_mp.testing.attention_steps import paged_metadata
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy, num_preemptions
from vllm_mp.testing.random_models import (
    CONFIGS,
    NATIVE,
    PROMPT_LENGTHS,
    WHOLE_PROMPTS,
    random_prompts,
    save_random_model,
    scarce_blocks,
)

pytestmark = ON_DEVICE

NUM_TOKENS = 24
PROMPTS = random_prompts(PROMPT_LENGTHS)
DTYPES = [torch.float32, torch.bfloat16]
RELATIVE_ERROR = {torch.float32: 5e-5, torch.bfloat16: 1e-2}
BFLOAT16_NEAR_TIE = 0.5
"""Even transformers' logits of these models, which range over seven, are off by up to 0.3 in bfloat16."""


@pytest.fixture(scope="module", autouse=True)
def _no_tf32():
    """Compute float32 without TF32, in this process and in the cores that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        patch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", raising=False)
        torch.set_float32_matmul_precision("highest")
        yield


def running(folder, **options):
    return running_engine(folder, skip_tokenizer_init=True, device=DEVICE, num_threads=1, **options)


@pytest.fixture(scope="module", params=NATIVE)
def random_model(request, tmp_path_factory):
    """The configuration of an architecture, the folder of a model, and the same model of transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    config = CONFIGS[request.param]
    with one_thread():
        yield config, folder, save_random_model(config, folder)


def test_answers_alone_and_batched_agree_with_transformers(random_model):
    _, folder, reference = random_model
    with running(folder, **WHOLE_PROMPTS) as engine:
        assert engine.vllm_config.device_config.device == DEVICE
        assert_engine_is_greedy(engine, reference, PROMPTS, NUM_TOKENS)


def test_answers_with_chunks_and_preemption_agree_with_transformers(random_model):
    config, folder, reference = random_model
    with running(folder, **scarce_blocks(config)) as engine:
        assert_engine_is_greedy(engine, reference, PROMPTS, NUM_TOKENS)
        assert num_preemptions(engine) > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_answers_stay_near_the_rounded_model_in_float32(name, tmp_path):
    with one_thread():
        reference = copy.deepcopy(save_random_model(CONFIGS[name], tmp_path)).bfloat16().float()
        with running(tmp_path, **{**WHOLE_PROMPTS, "dtype": "bfloat16"}) as engine:
            assert_engine_is_greedy(engine, reference, PROMPTS, NUM_TOKENS, BFLOAT16_NEAR_TIE)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


def random_tensor(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def on_device(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.to(DEVICE)
    if isinstance(values, tuple):
        return type(values)(*map(on_device, values)) if hasattr(values, "_fields") else tuple(map(on_device, values))
    return values


def as_float32(values: Any) -> Any:
    if isinstance(values, Tensor) and values.is_floating_point():
        return values.float()
    return tuple(map(as_float32, values)) if type(values) is tuple else values


def assert_same(operation: Any, *inputs: Any, dtype: torch.dtype) -> None:
    """Assert that `operation` on the device is as close to float32 on the CPU as `dtype` allows."""
    got = operation(*on_device(inputs))
    expected = operation(*map(as_float32, inputs))
    for ours, reference in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, expected)), strict=True):
        assert ours.dtype == dtype
        assert ours.device.type == DEVICE
        error = (ours.cpu().double() - reference.double()).norm() / reference.double().norm()
        assert error < RELATIVE_ERROR[dtype], f"{operation} is {error:.1e} off"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [48, 1024, 4096])
def test_norms_and_activations_agree_with_the_cpu(dim, dtype):
    x, residual = random_tensor(2, 33, dim, dtype=dtype).unbind()
    weight, bias = random_tensor(2, dim, dtype=dtype).unbind()
    assert_same(lambda *args: ops.rms_norm(*args, 1e-5), x, weight, dtype=dtype)
    assert_same(lambda *args: ops.add_rms_norm(*args, 1e-5), x, residual, weight, dtype=dtype)
    assert_same(lambda *args: ops.layer_norm(*args, 1e-5), x, weight, bias, dtype=dtype)
    assert_same(ops.silu_and_mul, x, dtype=dtype)
    for activation in ops.ACTIVATIONS.values():
        assert_same(activation, x, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 8), (32, 8, 128), (16, 16, 64)])
def test_rotary_agrees_with_the_cpu(heads, kv_heads, head_dim, dtype):
    positions = torch.tensor([3, 0, 4095, 7, 511])
    angles = torch.outer(torch.arange(4096.0), 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    q, k = random_tensor(5, heads, head_dim, dtype=dtype), random_tensor(5, kv_heads, head_dim, dtype=dtype)
    assert_same(ops.rotary, q, k, positions, table, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_fills_the_same_cells_as_on_the_cpu(dtype):
    k, v = random_tensor(2, 3, 2, 8, dtype=dtype).unbind()
    caches = [torch.zeros(4, 4, 2, 8, dtype=dtype, device=device) for device in ("cpu", "cpu", DEVICE, DEVICE)]
    cells = torch.tensor([9, 0, 14])
    ops.write_kv(k, v, *caches[:2], cells)
    ops.write_kv(*on_device((k, v)), *caches[2:], cells.to(DEVICE))
    assert torch.equal(caches[0], caches[2].cpu())
    assert torch.equal(caches[1], caches[3].cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows", [[(1, 37)], [(1, 1), (1, 700), (1, 3), (1, 64)], [(5, 5), (20, 333)], [(1, 40), (9, 50)]]
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 8), (32, 8, 128), (4, 4, 80)])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (16, None), (16, 3.0)])
def test_paged_attention_agrees_with_the_cpu(rows, heads, kv_heads, head_dim, window, soft_cap, dtype):
    block_size = 16
    num_blocks = 64
    order = torch.randperm(num_blocks).tolist()
    tables = [[order.pop() for _ in range(-(-context // block_size))] for _, context in rows]
    q = random_tensor(sum(queries for queries, _ in rows), heads, head_dim, dtype=dtype)
    k_cache, v_cache = random_tensor(2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype).unbind()
    metadata = paged_metadata(rows, tables, block_size, "cpu")

    def attention(*args: Any) -> Tensor:
        return ops.paged_attention(*args, head_dim**-0.5, window, soft_cap)

    assert_same(attention, q, k_cache, v_cache, metadata, dtype=dtype)


def test_sampler_draws_the_same_tokens_as_on_the_cpu():
    knobs = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}]
    batch = Batch(64, 8, 4, eos_token_ids=[3])
    for i in range(64):
        params = SamplingParams(temperature=0.7 * (i % 3), seed=i, min_tokens=2 * (i % 2), **knobs[i % len(knobs)])
        tokens = np.array([1, 2], np.int32)
        batch.add(Request(0, i, f"request-{i}", params, tokens, 2, 8, (0, i)), np.arange(1, 2, dtype=np.int32))
    logits = 3 * random_tensor(64, 1000, dtype=torch.float32)
    expected = Sampler(batch, torch.device("cpu")).sample(logits.clone(), batch.order)
    got = Sampler(batch, torch.device(DEVICE)).sample(logits.to(DEVICE), batch.order)
    assert got.device.type == DEVICE
    assert got.tolist() == expected.tolist()
