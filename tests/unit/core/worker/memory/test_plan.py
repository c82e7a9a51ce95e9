"""The share of the free memory that the KV cache gets, and the remedies where memory is missing."""

from types import SimpleNamespace

import pytest
import torch

from vllm_mp.core.worker.memory import plan
from vllm_mp.core.worker.memory.plan import cache_blocks, memory_to_start

MIB = 2**20
BLOCK_SIZE = 16
CPU = torch.device("cpu")


def config_of(**parallel):
    """Return the config of a CPU engine whose requests have up to 1,600 tokens: 100 MiB of KV cache."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1600),
        cache_config=SimpleNamespace(block_size=BLOCK_SIZE, kv_cache_memory_bytes=None),
        scheduler_config=SimpleNamespace(max_num_seqs=1000),
        parallel_config=SimpleNamespace(**{"data_parallel_size": 1, "ranks_per_node": 1, **parallel}),
    )


@pytest.mark.parametrize(
    ("free", "limit", "given"),
    [
        (4000, 4096, 1000),
        (4000, 500, 500),
        (300, 4096, 101),
        (300, 90, 101),
    ],
    ids=["a quarter of the free memory", "the limit", "one request in half of it", "one request beyond the limit"],
)
def test_cache_on_a_cpu_gets_its_share_of_the_free_memory(free, limit, given, monkeypatch):
    monkeypatch.setattr(plan, "available_memory", lambda: free * MIB)
    monkeypatch.setattr(plan, "_CPU_CACHE_LIMIT", limit * MIB)
    assert cache_blocks(config_of(), CPU, MIB // BLOCK_SIZE) == given


@pytest.mark.parametrize(
    ("cores", "free", "share"), [(1, 200, "half of the free memory"), (2, 400, "half of the free memory / 2")]
)
def test_request_that_needs_more_than_half_of_the_free_memory_is_refused(cores, free, share, monkeypatch):
    monkeypatch.setattr(plan, "available_memory", lambda: free * MIB)
    with pytest.raises(ValueError) as caught:
        cache_blocks(config_of(data_parallel_size=cores), CPU, MIB // BLOCK_SIZE)
    assert str(caught.value) == (
        f"no space for the cache: max_model_len=1600 needs {101 * MIB:,} bytes of KV cache, {share} gives "
        f"{100 * MIB:,}, enough for 1584 tokens; set kv_cache_memory_bytes higher or max_model_len to at most 1584"
    )


def test_a_device_without_memory_to_start_is_an_error_with_remedies():
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="some/model", dtype="bfloat16"),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=256),
    )
    with pytest.raises(ValueError) as caught, memory_to_start(config):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    assert str(caught.value) == (
        "no memory on the device to start model='some/model' in bfloat16 with gpu_memory_utilization=0.9, "
        "max_num_batched_tokens=2048 and max_num_seqs=256: CUDA out of memory. Tried to allocate 20 GiB; end other "
        "processes on the device, lower these options, or use a smaller model"
    )
