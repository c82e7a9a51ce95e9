"""Mixtures of experts on the C++ kernels."""

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.block_linear import BlockLinear, can_read
from vllm_mp.kernels.cpu.library import GATE_ACTIVATIONS, CBlockLinear, CExperts, CLinear, Library
from vllm_mp.kernels.cpu.packed import Arena, PackedLinear, can_pack

ExpertBlocks = Sequence[Sequence[BlockWeight]]
"""For each expert, the parts of a matrix in block types, one below another."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts and of their router."""

    router: Tensor
    """[num_experts, hidden]"""
    gate_up: Tensor | ExpertBlocks
    """[num_experts, 2 * inner, hidden], gate before up"""
    down: Tensor | ExpertBlocks
    """[num_experts, hidden, inner]"""
    num_chosen: int
    """The number of experts that compute a token."""
    normalizes_weights: bool
    """True: the router's weights of a token's experts are divided by their sum."""
    rounds_weights: bool
    """True: the router's weights are rounded to the dtype of the rows."""
    shared_gate: Tensor | None = None
    """[1, hidden]: the sigmoid of its product weighs the MLP that computes all tokens; None: there is no such MLP."""


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
        self.interface = CExperts(*addresses, len(self._products[0]), GATE_ACTIVATIONS[activation])
        self._pointer = ctypes.byref(self.interface)
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

    @property
    def num_weights(self) -> int:
        """The number of weights of an expert."""
        first_products = (products[0].interface for products in self._products)
        return sum(product.inputs * product.outputs for product in first_products)


def can_compute(
    gate_up: Tensor | ExpertBlocks, down: Tensor | ExpertBlocks, activation: str, dtype: torch.dtype
) -> bool:
    """Tell whether the kernels compute experts with these weights, for rows of `dtype`."""
    return activation in GATE_ACTIVATIONS and all(
        can_pack(matrices[0])
        if isinstance(matrices, Tensor)
        else can_read([part for parts in matrices for part in parts], dtype)
        for matrices in (gate_up, down)
    )


def pack(
    library: Library, gate_up: Tensor, down: Tensor, activation: str, quantization: str | None, arena: Arena
) -> PackedExperts:
    """Copy weights that `can_compute` allows into `arena`; see `ops.pack_experts`."""
    return PackedExperts(
        library,
        [PackedLinear(library, weight, None, quantization, is_pair=True, arena=arena) for weight in gate_up],
        [PackedLinear(library, weight, None, quantization, arena=arena) for weight in down],
        activation,
        gate_up.dtype,
    )


def from_blocks(
    library: Library, gate_up: ExpertBlocks, down: ExpertBlocks, activation: str, dtype: torch.dtype, arena: Arena
) -> PackedExperts:
    """Keep weights that `can_compute` allows, or rewrite them in `arena`; see `ops.block_experts`."""
    return PackedExperts(
        library,
        [BlockLinear(library, parts, None, dtype, is_pair=True, is_of_experts=True, arena=arena) for parts in gate_up],
        [BlockLinear(library, parts, None, dtype, is_of_experts=True, arena=arena) for parts in down],
        activation,
        dtype,
    )
