"""The free memory of host and device, and the share of it that the KV cache gets."""

import contextlib
from collections.abc import Iterator

import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.lora.targets import num_bytes
from vllm_mp.kernels import ops
from vllm_mp.machine.host_memory import host_memory
from vllm_mp.model_config.architecture import NativeArchitecture

_CPU_CACHE_LIMIT = 4 * 2**30
"""Most bytes that the KV cache gets on a CPU, unless a request of `max_model_len` or the config needs more."""


def cache_blocks(config: VllmConfig, device: torch.device, token_bytes: int, graph_bytes: int = 0) -> int:
    """Return the number of KV blocks to allocate, the padding block included. The weights must be loaded.

    `token_bytes` are the bytes of one token over all layers. If they are 0, as for an encoder, the result is the
    largest number of blocks that requests can use. `graph_bytes` stay free on a CUDA device for the graphs that are
    captured later. Raises ValueError if a single request of `max_model_len` tokens does not fit, or if the host does
    not have the memory that the config asks for.
    """
    model, cache = config.model_config, config.cache_config
    block_bytes = token_bytes * cache.block_size
    request_blocks = -(-model.max_model_len // cache.block_size)
    needed = (request_blocks + 1) * block_bytes
    useful = request_blocks * config.scheduler_config.max_num_seqs
    if not block_bytes:
        return useful + 1
    if cache.kv_cache_memory_bytes is not None:
        memory, source = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        memory, source = (
            max(0, _remaining_cuda_memory(cache.gpu_memory_utilization, device) - graph_bytes),
            "gpu_memory_utilization",
        )
    else:
        parallel = config.parallel_config
        num_shares = parallel.data_parallel_size * parallel.ranks_per_node  # cores and ranks load together
        free = available_memory() // num_shares
        memory = max(min(_CPU_CACHE_LIMIT, free // 4), min(needed, free // 2))
        source = "half of the free memory" if num_shares == 1 else f"half of the free memory / {num_shares}"
    blocks = min(memory // block_bytes, useful + 1)
    if blocks < request_blocks + 1:
        fits = max(0, blocks - 1) * cache.block_size
        raise ValueError(
            f"no space for the cache: max_model_len={model.max_model_len} needs "
            f"{needed:,} bytes of KV cache, {source} gives {memory:,}, enough for "
            f"{fits} tokens; set kv_cache_memory_bytes higher or max_model_len to at most {fits}"
            if fits
            else f"no space for the cache: {source} gives {memory:,} bytes, one block of {cache.block_size} "
            f"tokens takes {block_bytes:,}; set kv_cache_memory_bytes to at least {needed:,}"
        )
    if device.type == "cpu" and blocks * block_bytes > available_memory():
        raise ValueError(
            f"kv_cache_memory_bytes={memory:,} exceeds the free memory of {available_memory():,} bytes; lower it"
        )
    return int(blocks)


def cache_dtype(config: VllmConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV cache of a model in `dtype`."""
    return {"fp8": ops.FLOAT8, "int8": torch.int8}.get(config.cache_config.cache_dtype, dtype)


def check_adapter_memory(
    config: VllmConfig, arch: NativeArchitecture, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if the device has no space for the LoRA adapters that `config` allows for a model of `arch`.

    They are allocated before the KV cache, which gets its share of what remains.
    """
    assert config.lora_config is not None
    limits = config.lora_config
    needed = num_bytes(arch, limits.max_loras, limits.max_lora_rank, dtype.itemsize)
    free = free_cuda_memory(device) if device.type == "cuda" else available_memory()
    if needed > free:
        raise ValueError(
            f"no space for LoRA adapters: max_loras={limits.max_loras} of max_lora_rank={limits.max_lora_rank} take "
            f"{needed:,} bytes, and {free:,} are free; lower one of them"
        )


@contextlib.contextmanager
def memory_to_start(config: VllmConfig) -> Iterator[None]:
    """Turn an error of missing device memory inside the `with` block into a ValueError with the remedies."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        raise ValueError(
            f"no memory on the device to start model={model.model!r} in {model.dtype} with "
            f"gpu_memory_utilization={cache.gpu_memory_utilization:g}, "
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} and max_num_seqs={scheduler.max_num_seqs}: "
            f"{error}; end other processes on the device, lower these options, or use a smaller model"
        ) from error


def available_memory() -> int:
    """Return the bytes of host memory that can be allocated without swapping, within the limit of the control group."""
    return host_memory().available


def free_cuda_memory(device: torch.device) -> int:
    """Return the free bytes of the device's memory."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _remaining_cuda_memory(utilization: float, device: torch.device) -> int:
    """Return the bytes of the core's share of the device that remain beside the weights and the largest step."""
    free, total = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(0, int(total * utilization) - (total - free) + reserve - peak)
