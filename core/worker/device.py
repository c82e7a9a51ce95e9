"""The choice of device, dtype, step size, overlap, attention and threads. The config gets all but the threads."""

import logging
from typing import Any

import torch

from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.kernels import attention_backends
from vllm_mp.kernels.cpu.library import library
from vllm_mp.machine.cpu_info import multiplies_bfloat16
from vllm_mp.machine.host_cpus import (
    bind_process,
    bind_to,
    cpu_share,
    default_threads,
    describe,
    pci_numa_node,
    usable_cpus,
)
from vllm_mp.model_config.architecture import NativeArchitecture

logger = logging.getLogger(__name__)

_STEP_TOKENS, _CPU_STEP_TOKENS = 2048, 512
_CHEAP_TOKENS, _CPU_CHEAP_TOKENS = 256, 32
_FLOAT8_CAPABILITY = (8, 9)
"""The lowest CUDA compute capability with 8-bit floats."""
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def prepare_device(config: VllmConfig, rank: int = 0) -> tuple[torch.device, torch.dtype, int]:
    """Return the device of a rank, the dtype of weights and activations, and the number of threads; complete `config`.

    It also limits the CPUs of this process; the caller limits the threads. Raises ValueError if the device or the CPUs
    cannot be used as the configuration asks.
    """
    device = choose_device(config, rank)
    check_float8(config, device)
    check_int8_cache(config, device)
    dtype = choose_dtype(config, device)
    choose_step_size(config, device)
    choose_overlap(config, device)
    return device, dtype, choose_threads(config, rank)


def choose_device(config: VllmConfig, rank: int = 0) -> torch.device:
    """Return the device that `device_config` asks for; raises ValueError if the machine does not have it.

    Of several cores, each has as many GPUs as it has ranks, one after another, and each rank has one of them.
    """
    wanted = config.device_config.device
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ValueError(
            "device='cuda': PyTorch finds no CUDA device; set device='cpu', or check the driver and that the "
            "installed torch is a CUDA build"
        )
    config.device_config.device = "cuda" if wanted == "auto" and has_cuda else wanted.replace("auto", "cpu")
    if config.device_config.device == "cpu":
        return torch.device("cpu")
    if config.cache_config.prefix_cache_file is not None:
        raise ValueError(
            f"prefix_cache_file={config.cache_config.prefix_cache_file!r} is served on CPUs only, but the device is a "
            "GPU; leave it out, or set device='cpu'"
        )
    parallel, num_devices = config.parallel_config, torch.cuda.device_count()
    num_ranks = parallel.ranks_per_node
    index = parallel.data_parallel_rank * num_ranks + rank % num_ranks
    if index >= num_devices:
        sizes = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "nnodes")
        asked = ", ".join(f"{name}={getattr(parallel, name)}" for name in sizes)
        raise ValueError(
            f"{asked}: rank {rank} of core {parallel.data_parallel_rank} has no GPU of its own, because PyTorch finds "
            f"{num_devices}; lower them, or check CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index) if parallel.world_size > 1 else torch.device("cuda")


def choose_dtype(config: VllmConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of weights and activations.

    "auto" means bfloat16 on a CPU that computes the model in it without loss of speed, else float32; on a GPU the
    checkpoint's dtype if it has 16 bits, else bfloat16 if the GPU has it, else float16. A model whose activations may
    exceed the range of float16 gets bfloat16, or float32 where the GPU lacks that.
    """
    model = config.model_config
    exceeds_float16 = isinstance(model.architecture, NativeArchitecture) and model.architecture.exceeds_float16
    if model.dtype == "auto":
        checkpoint = model.architecture.dtype
        if device.type == "cpu":
            model.dtype = "bfloat16" if _cpu_computes_in_bfloat16(model) else "float32"
        elif checkpoint == "bfloat16" or (checkpoint == "float16" and not exceeds_float16):
            model.dtype = checkpoint
        elif torch.cuda.is_bf16_supported():
            model.dtype = "bfloat16"
        else:
            model.dtype = "float32" if exceeds_float16 else "float16"
    elif model.dtype == "float16" and exceeds_float16:
        logger.warning(
            "dtype='float16': activations of %s may exceed its range; leave it 'auto', or set 'bfloat16' or 'float32'",
            model.model,
        )
    return _DTYPES[model.dtype]


def check_float8(config: VllmConfig, device: torch.device) -> None:
    """Raise ValueError if 8-bit floats are asked for and the GPU does not have them; warn on a CPU, which is slow."""
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
        logger.warning("%s: a CPU computes 8-bit floats one by one, which is slow", " and ".join(wanted))


def check_int8_cache(config: VllmConfig, device: torch.device) -> None:
    """Raise ValueError if the KV cache shall have integers of 8 bits, which no kernel of a GPU reads."""
    if config.cache_config.cache_dtype == "int8" and device.type != "cpu":
        raise ValueError(
            "kv_cache_dtype='int8' is computed on CPUs only, and the device is a GPU; set kv_cache_dtype='fp8' if it "
            "has compute capability 8.9 or above, or leave it 'auto'"
        )


def choose_step_size(config: VllmConfig, device: torch.device) -> None:
    """Choose the maximum number of tokens of a step, unless it is given, and the number up to which tokens are cheap.

    A step has room for a token of every request and, without chunked prefill, for a whole prompt. All decodes wait for
    the prefills of the same step, so steps are no larger than speed requires: a CPU computes chunks above
    `_CPU_STEP_TOKENS` no faster per token.
    """
    scheduler = config.scheduler_config
    scheduler.num_cheap_tokens = _CPU_CHEAP_TOKENS if device.type == "cpu" else _CHEAP_TOKENS
    if not scheduler.max_num_batched_tokens:
        usual = _CPU_STEP_TOKENS if device.type == "cpu" else _STEP_TOKENS
        whole_prompt = 0 if scheduler.enable_chunked_prefill else config.model_config.max_model_len
        scheduler.max_num_batched_tokens = max(usual, scheduler.max_num_seqs, whole_prompt)


def choose_overlap(config: VllmConfig, device: torch.device) -> None:
    """Choose whether a step is launched before the tokens of the step before are known, unless it is given.

    It is if the host is not the device, except in a pipeline, whose steps overlap in another way, and with drafts,
    which follow known tokens.
    """
    scheduler = config.scheduler_config
    if scheduler.async_scheduling is None:
        is_alone = config.parallel_config.pipeline_parallel_size == 1 and config.speculative_config is None
        scheduler.async_scheduling = device.type != "cpu" and is_alone


def choose_attention(
    config: VllmConfig, device: torch.device, dtype: torch.dtype, kv_shapes: attention_backends.KVShapes
) -> attention_backends.AttentionBackend:
    """Return the backend that computes attention over caches of `kv_shapes`; write its name to `attention_config`.

    Raises ValueError if the config asks for a backend that cannot compute it.
    """
    cache, attention = config.cache_config, config.attention_config
    case = attention_backends.Case(device, dtype, cache.cache_dtype, cache.block_size, kv_shapes)
    backend = attention_backends.choose(attention.backend, case)
    attention.backend = backend.name
    return backend


def choose_threads(config: VllmConfig, rank: int = 0) -> int:
    """Bind this process to the configured CPUs, and return the configured or default number of threads.

    Of several ranks on the CPUs of a machine, each gets its share of both. Raises ValueError if the process may not use
    the CPUs.
    """
    device = config.device_config
    num_ranks = config.parallel_config.ranks_per_node if device.device == "cpu" else 1
    cpus = bind_process(device.cpus) if device.cpus else usable_cpus()
    num_threads = device.num_threads or default_threads(config.parallel_config.data_parallel_size)
    if num_ranks > 1:
        cpus = bind_to(cpu_share(cpus, rank % num_ranks, num_ranks))
        num_threads = max(1, num_threads // num_ranks)
    place = "" if device.device == "cpu" else f"on {_describe_gpu(torch.cuda.current_device())} "
    where = config.parallel_config.data_parallel_rank, rank
    logger.info("core %d, rank %d: computing %swith %d threads on %s", *where, place, num_threads, describe(cpus))
    return num_threads


def _describe_gpu(index: int) -> str:
    """Return the index and the name of a GPU, and its NUMA node if the system tells."""
    found: Any = torch.cuda.get_device_properties(index)  # its stub lacks the address
    node = pci_numa_node(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
    return f"GPU {index} ({found.name}{'' if node is None else f', NUMA node {node}'})"


def _cpu_computes_in_bfloat16(model: ModelConfig) -> bool:
    """Return whether this CPU computes the model in bfloat16 about as fast as in float32, or faster.

    A CPU that does not multiply bfloat16 does so if the weights are read in it, half the bytes of float32, by the C++
    kernels, which convert them where they multiply. Torch's own operations take many times as long there.
    """
    if multiplies_bfloat16():
        return True
    architecture = model.architecture
    if not isinstance(architecture, NativeArchitecture) or architecture.is_encoder or architecture.fp8 or model.images:
        return False
    return architecture.dtype == "bfloat16" and library() is not None
