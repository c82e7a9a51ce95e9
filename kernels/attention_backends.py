"""What may compute paged attention, and which of these does it for a model on a device."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_mp.kernels import flash, ops, reference
from vllm_mp.kernels.cpu.library import DTYPES, VARIABLE, library
from vllm_mp.kernels.triton import available as triton

logger = logging.getLogger(__name__)

AUTO, TRITON, FLASH, TORCH, CPU = "auto", "triton", "flash_attn", "torch", "cpu"

KVShapes = Sequence[tuple[tuple[int, int], tuple[int, int]]]
"""Of each layer: heads of keys and their size, heads of values and their size."""


class Backend(NamedTuple):
    """One way to compute attention."""

    name: str
    attend: Callable[..., Tensor] | None = None
    """For `AttentionMetadata.attend`; None: what `ops.paged_attention` does of itself."""
    captures: bool = True
    """Decodes can be captured in a graph as far as this is concerned."""

    def isolates(self, k_cache: Tensor, v_cache: Tensor) -> bool:
        """See `ops.isolates`."""
        return self.attend is None and ops.isolates(k_cache, v_cache)


class Case(NamedTuple):
    """What attention is to be computed of."""

    device: torch.device
    dtype: torch.dtype
    cache_dtype: str
    """"auto" for that of the model, or "fp8"."""
    block_size: int
    kv_shapes: KVShapes
    """Empty for an encoder, which has no cache."""


def choose(wanted: str, case: Case) -> Backend:
    """The backend called `wanted`, or, where that is "auto", the first that serves.

    Raises ValueError, naming the option, its value, the reason and the remedy, where the one that is wanted does not.
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
                logger.warning("FlashAttention is installed and does not serve: %s", error.args[0])
    raise AssertionError("torch serves everything")


def _flash(case: Case) -> Backend:
    """For 16 bits; Triton or torch computes the decodes."""
    if case.device.type != "cuda":
        raise LookupError("it needs a CUDA device, and the device is 'cpu'; set device='cuda'")
    if case.dtype not in (torch.float16, torch.bfloat16):
        raise LookupError(f"it takes float16 and bfloat16, and the model has {_name(case.dtype)}; set dtype='bfloat16'")
    if case.cache_dtype not in (AUTO, _name(case.dtype)):
        raise LookupError(f"it is not for kv_cache_dtype={case.cache_dtype!r}; set that to 'auto'")
    if not case.kv_shapes:
        raise LookupError("the model is an encoder, which has no paged cache")
    for (_, key_dim), (_, value_dim) in case.kv_shapes:
        if key_dim != value_dim or key_dim > flash.MAX_HEAD_DIM or key_dim % 8:
            raise LookupError(
                f"it takes heads of a multiple of 8 elements up to {flash.MAX_HEAD_DIM}, the same of keys and values, "
                f"and the model has {key_dim} of keys and {value_dim} of values; set 'triton'"
            )
    attend = flash.load(torch.cuda.get_device_capability(case.device), case.block_size)
    return Backend(FLASH, functools.partial(flash.paged_attention, attend, ops.paged_attention))


def _triton(case: Case) -> Backend:
    if not case.kv_shapes:
        raise LookupError("the model is an encoder, which has no paged cache")
    if triton.operations(case.device.type) is None:
        where = "install vllm-mp[cuda]" if case.device.type == "cuda" else "it is for CUDA devices; set device='cuda'"
        raise LookupError(f"Triton does not serve on {case.device.type!r}: {where}")
    return Backend(TRITON)


def _cpu(case: Case) -> Backend:
    if not _has_cpp(case):
        raise LookupError(
            "the C++ kernels are for CPUs, where they have been built, with float32 or bfloat16 in the cache too"
        )
    return Backend(CPU)


def _torch(case: Case) -> Backend:
    if case.kv_shapes and _has_cpp(case):
        raise LookupError(f"on this CPU C++ kernels compute whole layers; set {VARIABLE}=none in the environment")
    return Backend(TORCH, reference.paged_attention, captures=False)


def _has_cpp(case: Case) -> bool:
    has_types = case.dtype in DTYPES and case.cache_dtype == AUTO
    return case.device.type == "cpu" and has_types and bool(case.kv_shapes) and library() is not None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_BACKENDS: dict[str, Callable[[Case], Backend]] = {
    FLASH: _flash,
    TRITON: _triton,
    CPU: _cpu,
    TORCH: _torch,
}
"""The preferred ones first; each raises LookupError where it does not serve."""
