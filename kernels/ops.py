"""The hot operations as models call them: each computes what kernels/reference.py defines.

Which implementation does it is decided here, by the device and the types of what is given, and nowhere else. The C++
kernels for processors give a row the same result in any company; the torch definitions serve what they do not take.
"""

import itertools
from collections.abc import Iterable

from torch import Tensor, nn

from vllm_mp.kernels import reference
from vllm_mp.kernels.cpu import attention as cpu_attention
from vllm_mp.kernels.cpu.decoder import FusedDecoder, LayerWeights, can_fuse
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.cpu.packed import PackedLinear, can_pack
from vllm_mp.kernels.reference import (
    ACTIVATIONS,
    NO_PLACE,
    AttentionMetadata,
    add_rms_norm,
    argmax,
    encoder_attention,
    gelu,
    gelu_tanh,
    layer_norm,
    rms_norm,
    rotary,
    silu_and_mul,
    write_kv,
)

__all__ = [
    "ACTIVATIONS",
    "NO_PLACE",
    "AttentionMetadata",
    "LayerWeights",
    "PackedLinear",
    "add_rms_norm",
    "argmax",
    "encoder_attention",
    "fuse_decoder",
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary",
    "silu_and_mul",
    "write_kv",
]


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
    if cpu_attention.can_attend(q, k_cache, v_cache) and (kernels := library()):
        return cpu_attention.attend(kernels, q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    return reference.paged_attention(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)


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
