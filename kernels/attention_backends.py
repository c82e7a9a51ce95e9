"""The backends of paged attention, and the choice among them for a model on a device."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vllm_mp.kernels import flash, reference
from vllm_mp.kernels.attention_metadata import PagedAttention
from vllm_mp.kernels.cpu import attention as cpu_attention
from vllm_mp.kernels.cpu.library import DTYPES, Library, library
from vllm_mp.kernels.triton import available as triton
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE

logger = logging.getLogger(__name__)

AUTO, TRITON, FLASH, TORCH, CPU = "auto", "triton", "flash_attn", "torch", "cpu"
INT8 = "int8"

KVShapes = Sequence[tuple[tuple[int, int], tuple[int, int]]]
"""For each layer: the number and size of the heads of keys, and of values."""


class AttentionBackend(NamedTuple):
    """One way to compute paged attention."""

    name: str
    attend: PagedAttention
    """Computes `ops.paged_attention`; `core.models.attention.bind_attention` gives it to the layers of a model."""
    captures: bool = False
    """True: a step of decodes can be captured in a CUDA graph, because attention reads no length on the host."""
    isolates: bool = False
    """True: keys and values that are not finite never affect the queries of earlier tokens of their prefill.

    Otherwise `AttentionMetadata.isolates` asks for it, at the cost of time."""
    decode_splits: Sequence[int] = ()
    """A value of `AttentionMetadata.decode_splits` for each set of kernels that decodes of short contexts may need.

    A step without a graph may need any of them, so they are compiled at the start.
    """


class Case(NamedTuple):
    """The conditions under which attention is computed."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: str
    """"auto" for the model's dtype, "fp8", or on a CPU "int8"."""
    block_size: int
    kv_shapes: KVShapes
    """Empty for an encoder, which has no cache."""


def choose(wanted: str, case: Case) -> AttentionBackend:
    """Return the backend called `wanted` or, for "auto", the first that supports `case`.

    Raises ValueError, naming the option, its value, the reason and the remedy, if `wanted` does not support `case`.
    """
    if wanted != AUTO:
        try:
            return _BACKENDS[wanted](case)
        except LookupError as error:
            raise ValueError(f"attention_backend={wanted!r}: {error.args[0]}; or leave it 'auto'") from error
    for name, make in _BACKENDS.items():
        try:
            return make(case)
        except LookupError as error:
            if name == FLASH and case.device.type == "cuda" and flash.is_installed():
                logger.warning("FlashAttention is installed but cannot be used: %s", error.args[0])
    raise AssertionError("torch supports every case")


def _flash(case: Case) -> AttentionBackend:
    """FlashAttention computes the prefills, in 16 bits; Triton or torch computes the decodes."""
    if case.device.type != "cuda":
        raise LookupError("it needs a CUDA device, and the device is 'cpu'; set device='cuda'")
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise LookupError(f"it takes float16 and bfloat16, and the model has {_name(case.dtype)}; set dtype='bfloat16'")
    if case.cache_dtype not in (AUTO, _name(case.dtype)):
        raise LookupError(f"it does not support kv_cache_dtype={case.cache_dtype!r}; set that to 'auto'")
    if not case.kv_shapes:
        raise LookupError("the model is an encoder, which has no paged cache; set 'torch'")
    for (_, key_dim), (_, value_dim) in case.kv_shapes:
        if key_dim != value_dim or key_dim > flash.MAX_HEAD_DIM or key_dim % 8:
            raise LookupError(
                f"it takes heads of a multiple of 8 elements up to {flash.MAX_HEAD_DIM}, the same for keys and values, "
                f"and the model has {key_dim} for keys and {value_dim} for values; set 'triton'"
            )
    prefill = flash.load(torch.cuda.get_device_capability(case.device), case.block_size)
    kernels = triton.operations(case.device.type)
    fallback: PagedAttention = reference.paged_attention if kernels is None else kernels.paged_attention
    attend = functools.partial(flash.paged_attention, prefill, fallback)
    if kernels is None:
        return AttentionBackend(FLASH, attend)
    from vllm_mp.kernels.triton.attention.decode import DECODE_SPLITS

    return AttentionBackend(FLASH, attend, captures=True, decode_splits=DECODE_SPLITS)


def _triton(case: Case) -> AttentionBackend:
    if not case.kv_shapes:
        raise LookupError("the model is an encoder, which has no paged cache; set 'torch'")
    if case.cache_dtype == INT8:
        raise LookupError("it does not support kv_cache_dtype='int8'; set that to 'auto'")
    kernels = triton.operations(case.device.type)
    if kernels is None:
        where = "install triton" if case.device.type == "cuda" else "it is for CUDA devices; set device='cuda'"
        raise LookupError(f"Triton cannot be used on {case.device.type!r}: {where}")
    from vllm_mp.kernels.triton.attention.backend import takes_heads
    from vllm_mp.kernels.triton.attention.decode import DECODE_SPLITS

    isolates = all(takes_heads(key_dim, value_dim) for (_, key_dim), (_, value_dim) in case.kv_shapes)
    is_compiled = case.device.type == "cuda"
    return AttentionBackend(
        TRITON,
        kernels.paged_attention,
        captures=is_compiled,
        isolates=isolates,
        decode_splits=DECODE_SPLITS if is_compiled else (),
    )


def _cpu(case: Case) -> AttentionBackend:
    kernels = _cpp_kernels(case)
    if kernels is None:
        raise LookupError(
            "it needs a build of the C++ kernels for CPUs, and a decoder in float32 or bfloat16 with heads of an even "
            "size; set device='cpu', dtype='float32' and kv_cache_dtype='auto' or 'int8'"
        )
    return AttentionBackend(CPU, functools.partial(cpu_attention.attend, kernels))


def _torch(case: Case) -> AttentionBackend:
    if _cpp_kernels(case) is not None:
        raise LookupError(
            f"on this CPU C++ kernels compute whole layers; set {KERNELS_VARIABLE}=none in the environment"
        )
    return AttentionBackend(TORCH, reference.paged_attention, isolates=not case.kv_shapes)


def _cpp_kernels(case: Case) -> Library | None:
    """Return the C++ kernels if they compute attention in this case."""
    takes = (
        case.device.type == "cpu"
        and case.dtype in DTYPES
        and case.cache_dtype in (AUTO, INT8)
        and bool(case.kv_shapes)
        and all(key_dim % 2 == 0 for (_, key_dim), _ in case.kv_shapes)
    )
    return library() if takes else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_BACKENDS: dict[str, Callable[[Case], AttentionBackend]] = {
    FLASH: _flash,
    TRITON: _triton,
    CPU: _cpu,
    TORCH: _torch,
}
"""The backends in order of preference; each function raises LookupError if it does not support the case."""
