"""What the core runs on: device, type of weights, threads and memory for the cache."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from vllm_mp.config import VllmConfig
from vllm_mp.kernels import attention_backends

logger = logging.getLogger(__name__)

_CPU_CACHE_LIMIT = 4 * 2**30
_STEP_TOKENS, _CPU_STEP_TOKENS = 2048, 512
_FLOAT8_CAPABILITY = (8, 9)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_device(config: VllmConfig) -> torch.device:
    """The device that `device_config` asks for, written back to it; raises ValueError if it is not there."""
    wanted = config.device_config.device
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValueError(
            "device='cuda': PyTorch finds no CUDA device; set device='cpu', or check the driver and that the "
            "installed torch is a CUDA build"
        )
    config.device_config.device = "cuda" if wanted == "auto" and has_cuda else wanted.replace("auto", "cpu")
    return torch.device(config.device_config.device)


def choose_dtype(config: VllmConfig, device: torch.device) -> torch.dtype:
    """The type of weights and activations, written back to `model_config`."""
    model = config.model_config
    if model.dtype == "auto":
        checkpoint = model.architecture.dtype
        if device.type == "cpu":
            model.dtype = "bfloat16" if _cpu_multiplies_bfloat16() else "float32"
        elif checkpoint in ("float16", "bfloat16"):
            model.dtype = checkpoint
        else:
            model.dtype = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    return _DTYPES[model.dtype]


def check_float8(config: VllmConfig, device: torch.device) -> None:
    """Raises ValueError where 8-bit floats are asked for and the device has none; a CPU computes them, slowly."""
    model = config.model_config
    wanted = [f"the weights of {model.model} (FP8)"] if model.quantization == "fp8" else []
    if config.cache_config.cache_dtype == "fp8":
        wanted.append("kv_cache_dtype='fp8'")
    if not wanted:
        return
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FLOAT8_CAPABILITY:
            raise ValueError(
                f"{' and '.join(wanted)}: 8-bit floats need a GPU of compute capability 8.9 or above, and "
                f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; leave out the option, or "
                "use the model in bfloat16"
            )
    else:
        logger.warning("%s: 8-bit floats are computed one by one on a CPU, which is slow", " and ".join(wanted))


def choose_step_size(config: VllmConfig, device: torch.device) -> None:
    """Write the most tokens of a step to `scheduler_config`, unless it was given.

    A step has at least a token for every request, and without chunked prefill a whole prompt. All decodes wait for the
    prompts that are read in the same step; on a CPU more than `_CPU_STEP_TOKENS` at a time make them no faster.
    """
    scheduler = config.scheduler_config
    if not scheduler.max_num_batched_tokens:
        usual = _CPU_STEP_TOKENS if device.type == "cpu" else _STEP_TOKENS
        whole_prompt = 0 if scheduler.enable_chunked_prefill else config.model_config.max_model_len
        scheduler.max_num_batched_tokens = max(usual, scheduler.max_num_seqs, whole_prompt)


def choose_overlap(config: VllmConfig, device: torch.device) -> None:
    """Write to `scheduler_config` whether steps overlap, unless it was said: where the host is not the device."""
    scheduler = config.scheduler_config
    if scheduler.async_scheduling is None:
        scheduler.async_scheduling = device.type != "cpu"


def choose_attention(
    config: VllmConfig, device: torch.device, dtype: torch.dtype, kv_shapes: attention_backends.KVShapes
) -> attention_backends.AttentionBackend:
    """What computes attention over caches of these shapes, its name written to `attention_config`.

    Raises ValueError where what was asked for does not serve.
    """
    cache, attention = config.cache_config, config.attention_config
    case = attention_backends.Case(device, dtype, cache.cache_dtype, cache.block_size, kv_shapes)
    backend = attention_backends.choose(attention.backend, case)
    attention.backend = backend.name
    return backend


def set_threads(config: VllmConfig) -> None:
    """Give the CPU kernels the configured number of threads, or one for each core that may be used."""
    torch.set_num_threads(config.device_config.num_threads or len(os.sched_getaffinity(0)))


def cache_blocks(config: VllmConfig, device: torch.device, token_bytes: int, graph_bytes: int = 0) -> int:
    """How many KV blocks to allocate, the padding block included; to be called with the weights loaded.

    `token_bytes` is what one token takes over all layers; where it is nothing, as with an encoder, there are as many
    blocks as can be of use. `graph_bytes` are kept free on a CUDA device for the graphs that are made afterwards.
    Raises ValueError when a single request of `max_model_len` tokens would not fit.
    """
    model, cache = config.model_config, config.cache_config
    block_bytes = token_bytes * cache.block_size
    request_blocks = -(-model.max_model_len // cache.block_size)
    useful = request_blocks * config.scheduler_config.max_num_seqs
    if not block_bytes:
        return useful + 1
    if cache.kv_cache_memory_bytes is not None:
        memory, source = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        memory, source = (
            max(0, _room_on_cuda(cache.gpu_memory_utilization, device) - graph_bytes),
            "gpu_memory_utilization",
        )
    else:
        memory, source = min(_CPU_CACHE_LIMIT, available_memory() // 4), "a quarter of the free memory"
    blocks = min(memory // block_bytes, useful + 1)
    if blocks < request_blocks + 1:
        fits = max(0, blocks - 1) * cache.block_size
        raise ValueError(
            f"no space for the cache: max_model_len={model.max_model_len} needs "
            f"{(request_blocks + 1) * block_bytes:,} bytes of KV cache, {source} gives {memory:,}, enough for "
            f"{fits} tokens; set kv_cache_memory_bytes higher or max_model_len to at most {fits}"
            if fits
            else f"no space for the cache: {source} gives {memory:,} bytes, one block of {cache.block_size} "
            f"tokens takes {block_bytes:,}; set kv_cache_memory_bytes to at least "
            f"{(request_blocks + 1) * block_bytes:,}"
        )
    if device.type == "cpu" and blocks * block_bytes > available_memory():
        raise ValueError(
            f"kv_cache_memory_bytes={memory:,} is more than the {available_memory():,} bytes of memory that are free; "
            "lower it"
        )
    return int(blocks)


@contextlib.contextmanager
def memory_to_start(config: VllmConfig) -> Iterator[None]:
    """Makes a ValueError, with the remedies, of a device that has no memory for what is loaded and allocated inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        raise ValueError(
            f"no memory on the device to start model={model.model!r} in {model.dtype} with "
            f"gpu_memory_utilization={cache.gpu_memory_utilization:g}, "
            f"max_num_batched_tokens={scheduler.max_num_batched_tokens} and max_num_seqs={scheduler.max_num_seqs}: "
            f"{error}; end what else runs on the device, lower these, or take a smaller model"
        ) from error


def _cpu_multiplies_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def available_memory() -> int:
    """Bytes of host memory that can be taken without swapping, within the limit of the control group."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), (group / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - int(used)))


def free_cuda_memory(device: torch.device) -> int:
    """Bytes of the device that nobody has taken."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def _room_on_cuda(utilization: float, device: torch.device) -> int:
    """Bytes that weights and the largest step leave of the share of the device that the core may use."""
    free, total = torch.cuda.mem_get_info(device)
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return max(0, int(total * utilization) - (total - free) + reserve - peak)
