"""Mixtures of experts on the C++ kernels."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.kernels.cpu.decoder import GATE_ACTIVATIONS
from vllm_mp.kernels.cpu.library import CBlockLinear, CExperts, CLinear, Library
from vllm_mp.kernels.cpu.packed import Arena, PackedLinear

ExpertBlocks = Sequence[Sequence[BlockWeight]]
"""For each expert, the parts of a matrix in block types, one below another."""


class PackedExperts:
    """The weighted sums of the outputs of each token's experts. Results are batch-invariant."""

    def __init__(
        self,
        library: Library,
        gate_up: Iterable[PackedLinear | BlockLinear],
        down: Iterable[PackedLinear | BlockLinear],
        activation: str,
        dtype: torch.dtype,
    ) -> None:
        """Keep the products of each expert, gate and up with `is_pair`; `activation` is one of `GATE_ACTIVATIONS`."""
        self._products = [list(gate_up), list(down)]
        """Owners of memory that `_matrices` points to."""
        is_packed = isinstance(self._products[0][0], PackedLinear)
        kind: Any = CLinear if is_packed else CBlockLinear
        self._matrices = [
            (kind * len(products))(*(product.interface for product in products)) for products in self._products
        ]
        addresses = map(ctypes.addressof, self._matrices)
        self._pointer = ctypes.byref(CExperts(*addresses, len(self._products[0]), GATE_ACTIVATIONS[activation]))
        self._run = library.function("experts" if is_packed else "block_experts", dtype)

    def __call__(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor) -> Tensor:
        """Return `ops.experts` of these weights."""
        x, expert_ids, router_weights = x.contiguous(), expert_ids.contiguous(), router_weights.contiguous()
        out = torch.empty_like(x)
        self._run(
            self._pointer,
            x.data_ptr(),
            len(x),
            expert_ids.data_ptr(),
            router_weights.data_ptr(),
            expert_ids.shape[1],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def pack(library: Library, gate_up: Tensor, down: Tensor, activation: str, quantization: str | None) -> PackedExperts:
    """Copy weights that `can_pack` allows; see `ops.pack_experts`."""
    arena = Arena()
    return PackedExperts(
        library,
        [PackedLinear(library, weight, None, quantization, is_pair=True, arena=arena) for weight in gate_up],
        [PackedLinear(library, weight, None, quantization, arena=arena) for weight in down],
        activation,
        gate_up.dtype,
    )


def from_blocks(
    library: Library, gate_up: ExpertBlocks, down: ExpertBlocks, activation: str, dtype: torch.dtype
) -> PackedExperts:
    """Keep weights that `can_read` allows; see `ops.block_experts`."""
    return PackedExperts(
        library,
        [BlockLinear(library, parts, None, dtype, is_pair=True) for parts in gate_up],
        [BlockLinear(library, parts, None, dtype) for parts in down],
        activation,
        dtype,
    )
