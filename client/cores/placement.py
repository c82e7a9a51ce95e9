"""Which CPUs and which GPUs each of several cores on this machine gets."""

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.machine.host_cpus import divide_cpus

_NVIDIA_DRIVER = Path("/dev/nvidiactl")


def config_of_place(config: VllmConfig, slot: int) -> VllmConfig:
    """Return the configuration of the core in `slot` of an engine with `config`; the same object with one core.

    A core on CPUs is bound to its share of those that `cpus` names, or of all that this process may use; without
    `num_threads` it has a thread for each. A core on GPUs uses as many devices as it has ranks, from the index
    `slot` times that number on.
    """
    size = config.parallel_config.data_parallel_size
    if size == 1 and slot == 0:
        return config
    device = config.device_config
    if device.device == "cpu" or (device.device == "auto" and not _has_gpu()):
        device = msgspec.structs.replace(device, cpus=divide_cpus(device.cpus, slot % size, size))
    parallel = msgspec.structs.replace(config.parallel_config, data_parallel_rank=slot)
    return msgspec.structs.replace(config, parallel_config=parallel, device_config=device)


def _has_gpu() -> bool:
    """Return whether there is a GPU, as far as the client sees, which does not load torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return _NVIDIA_DRIVER.exists() and visible not in ("", "-1")


def free_place(taken: Collection[int]) -> int:
    """Return the lowest core slot that is not `taken`."""
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
