"""A core that cannot start for lack of memory names the remedies."""

from types import SimpleNamespace

import pytest
import torch

from vllm_mp.core.worker.memory.plan import memory_to_start


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
