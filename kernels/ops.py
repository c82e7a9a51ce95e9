"""The hot operations as models call them: each computes what kernels/reference.py defines.

Which implementation does it is decided here, by the device and the types of what is given, and nowhere else. On a GPU
that is Triton, where it is installed. The C++ kernels for processors give a row the same result in any company; the
torch definitions serve what neither takes.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.kernels import reference
from vllm_mp.kernels.cpu import attention as cpu_attention
from vllm_mp.kernels.cpu.decoder import FusedDecoder, LayerWeights, can_fuse
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.cpu.packed import PackedLinear, can_pack
from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, AttentionMetadata, encoder_attention
from vllm_mp.kernels.sampling import NO_PLACE, SAMPLING_FILTERS, DrawParams
from vllm_mp.kernels.triton import available as triton

__all__ = [
    "ACTIVATIONS",
    "FLOAT8",
    "FLOAT8_GROUP",
    "NO_PLACE",
    "SAMPLING_FILTERS",
    "AttentionMetadata",
    "DrawParams",
    "LayerWeights",
    "PackedLinear",
    "add_rms_norm",
    "argmax",
    "can_capture",
    "encoder_attention",
    "fp8_linear",
    "fuse_decoder",
    "gelu",
    "gelu_tanh",
    "isolates",
    "layer_norm",
    "pack_linear",
    "paged_attention",
    "quantize_rows",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "sample",
    "silu_and_mul",
    "write_kv",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.rms_norm`."""
    normed: Tensor = _operations(x).rms_norm(x, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.add_rms_norm`."""
    normed: tuple[Tensor, Tensor] = _operations(x).add_rms_norm(x, residual, weight, eps)
    return normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `reference.layer_norm`."""
    normed: Tensor = _operations(x).layer_norm(x, weight, bias, eps)
    return normed


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """See `reference.rotary`."""
    rotated: tuple[Tensor, Tensor] = _operations(q).rotary(q, k, positions, cos_sin_cache)
    return rotated


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cell_mapping: Tensor) -> None:
    """See `reference.write_kv`."""
    _operations(k).write_kv(k, v, k_cache, v_cache, cell_mapping)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cell_mapping: Tensor,
) -> Tensor:
    """See `reference.rotary_write_kv`."""
    rotated: Tensor = _operations(q).rotary_write_kv(q, k, v, positions, cos_sin_cache, k_cache, v_cache, cell_mapping)
    return rotated


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """See `reference.paged_attention`."""
    if metadata.attend is not None:
        return metadata.attend(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    if cpu_attention.can_attend(q, k_cache, v_cache) and (kernels := library()):
        return cpu_attention.attend(kernels, q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    attended: Tensor = _operations(q).paged_attention(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    return attended


def isolates(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether a prefill's queries are kept from later tokens that are not finite in these caches without being asked.

    Where they are not, `metadata.isolates` asks `paged_attention` for it, at the cost of time.
    """
    kernels = triton.operations(k_cache.device.type)
    return kernels is not None and bool(kernels.isolates(k_cache, v_cache))


def silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    product: Tensor = _operations(x).silu_and_mul(x)
    return product


def gelu(x: Tensor) -> Tensor:
    """See `reference.gelu`."""
    activated: Tensor = _operations(x).gelu(x)
    return activated


def gelu_tanh(x: Tensor) -> Tensor:
    """See `reference.gelu_tanh`."""
    activated: Tensor = _operations(x).gelu_tanh(x)
    return activated


# Keyed by the name that a Hugging Face configuration gives the function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def argmax(scores: Tensor) -> Tensor:
    """See `kernels.sampling.argmax`."""
    places: Tensor = _operations(scores).argmax(scores)
    return places


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.sample`."""
    tokens: Tensor = _operations(logits).sample(logits, params)
    return tokens


def quantize_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """See `reference.quantize_rows`."""
    quantized: tuple[Tensor, Tensor] = _operations(x).quantize_rows(x, num_groups)
    return quantized


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.fp8_linear`."""
    product: Tensor = _operations(x).fp8_linear(x, weight, scale, bias)
    return product


def pack_linear(weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear | None:
    """`x @ weight.T + bias` with a copy of the weights as the product reads them; None where torch serves.

    With `quantization` "int8" the weights are of 8 bits and the rows of `x` are made so, where their size allows.
    Raises ValueError where nothing computes that.
    """
    kernels = library() if can_pack(weight) else None
    if kernels is None and quantization is not None:
        raise ValueError(
            f"quantization={quantization!r} is computed by the C++ kernels on CPUs, which are not there or do not take "
            f"a matrix {list(weight.shape)} of {weight.dtype} on {weight.device}; leave it out"
        )
    return None if kernels is None else PackedLinear(kernels, weight, bias, quantization)


def fuse_decoder(
    layers: Iterable[LayerWeights], norm: Tensor, eps: float, quantization: str | None = None
) -> nn.Module | None:
    """A decoder in one piece, with a copy of the weights; None where its operations are called one by one.

    Each of the `layers`, which are alike, is asked for when the one before has been copied.
    """
    iterator = iter(layers)
    first = next(iterator)
    kernels = library() if can_fuse(first) else None
    if kernels is None:
        return None
    return FusedDecoder(kernels, itertools.chain([first], iterator), norm, eps, quantization)


def can_capture(device: torch.device) -> bool:
    """Whether decodes on `device` can be captured in a graph: Triton's attention can, torch's reads on the host."""
    return device.type == "cuda" and triton.operations(device.type) is not None


def _operations(x: Tensor) -> Any:
    """The module whose functions compute what `x` is given to."""
    return triton.operations(x.device.type) or reference
