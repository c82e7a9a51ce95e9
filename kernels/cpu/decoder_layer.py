"""A decoder layer of the Llama family as one call of the C++ kernels."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vllm_mp.kernels.cpu.attention import c_step
from vllm_mp.kernels.cpu.library import CDecoderLayer, CHeads, Library
from vllm_mp.kernels.cpu.packed import PackedLinear, can_pack
from vllm_mp.kernels.reference import AttentionMetadata


class LayerWeights(NamedTuple):
    """What a decoder layer is made of. A projection is (weight [out, in], bias [out] or None)."""

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_proj: tuple[Tensor, Tensor | None]
    o_proj: tuple[Tensor, Tensor | None]
    gate_up_proj: tuple[Tensor, Tensor | None]
    down_proj: tuple[Tensor, Tensor | None]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    window: int | None


class FusedDecoderLayer(nn.Module):
    """Computes what the modules do of which the weights are; the interface is that of `llama.DecoderLayer`."""

    def __init__(self, library: Library, weights: LayerWeights, quantization: str | None) -> None:
        super().__init__()
        self._dtype = weights.qkv_proj[0].dtype
        self._run = library.function("decoder_layer", self._dtype)
        qkv = PackedLinear(library, *weights.qkv_proj, quantization)
        o = PackedLinear(library, *weights.o_proj, quantization)
        gate_up = PackedLinear(library, *weights.gate_up_proj, quantization, is_pair=True)
        down = PackedLinear(library, *weights.down_proj, quantization)
        norms = [
            None if norm is None else norm.detach().clone()
            for norm in (weights.input_norm, weights.post_attention_norm, weights.q_norm, weights.k_norm)
        ]
        self._kept = (qkv, o, gate_up, down, norms)
        """The memory that the interface points to."""
        heads = CHeads(
            queries=weights.num_heads,
            keys=weights.num_kv_heads,
            key_dim=weights.head_dim,
            value_dim=weights.head_dim,
            window=weights.window or 0,
            scale=weights.scale,
            soft_cap=0.0,
        )
        self._interface = CDecoderLayer(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *(part.interface for part in (qkv, o, gate_up, down)),
            heads,
            down.interface.inputs,
            weights.eps,
        )
        self._pointer = ctypes.byref(self._interface)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """`x` is what the layer before has yet to add to `residual`; returns the same pair, which it overwrites."""
        is_first = residual is None
        if residual is None:
            residual = torch.empty_like(x)
        k_cache, v_cache = kv_cache
        step = c_step(metadata, k_cache.shape[1])
        self._run(
            self._pointer,
            ctypes.byref(step),
            is_first,
            x.data_ptr(),
            residual.data_ptr(),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            torch.get_num_threads(),
        )
        return x, residual


def can_fuse(weights: LayerWeights) -> bool:
    """Whether the kernels take such a layer."""
    projections = (weights.qkv_proj, weights.o_proj, weights.gate_up_proj, weights.down_proj)
    return weights.head_dim % 2 == 0 and all(can_pack(weight) for weight, _ in projections)
