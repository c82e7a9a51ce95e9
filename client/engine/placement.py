"""Which CPUs and which GPU each of several cores on this machine gets."""

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.host_cpus import divide_cpus


def config_of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """Return the configuration of the core `rank` of an engine with `config`; the same object with one core.

    A core on CPUs is bound to its share of those that `cpus` names, or of all that this process may use; without
    `num_threads` it has a thread for each. A core on GPUs uses the device with the index `rank`.
    """
    size = config.parallel_config.data_parallel_size
    if size == 1 and rank == 0:
        return config
    device = config.device_config
    cpus = divide_cpus(device.cpus, rank % size, size)
    return msgspec.structs.replace(
        config,
        parallel_config=msgspec.structs.replace(config.parallel_config, data_parallel_rank=rank),
        device_config=msgspec.structs.replace(device, cpus=cpus) if device.device != "cuda" else device,
    )
