"""Products and experts with weights in block types, in torch: the definition of what the C++ kernels compute."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels import reference
from vllm_mp.kernels.adapter_stack import AdapterStack
from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.sampling import TokenMasks


class TorchBlockLinear:
    """`x @ weight.T + bias` in float32, with weights that every product dequantizes.

    The rows of the weight are those of `parts`, which may have different types.
    """

    def __init__(self, parts: Sequence[BlockWeight], bias: Tensor | None, dtype: torch.dtype) -> None:
        """Keep `parts`, which have the same number of inputs, and `bias` [outputs]; rows and results have `dtype`."""
        self._parts = parts
        self._bias = None if bias is None else bias.float()
        self._dtype = dtype

    def __call__(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        adapters: AdapterStack | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Return [..., outputs] for `x` [..., inputs]; see `PackedLinear.__call__`."""
        wide = x.float()
        out = torch.cat([F.linear(wide, part.dequantized()) for part in self._parts], -1)
        if self._bias is not None:
            out += self._bias
        if adapters is not None and adapter_slots is not None:
            a, b = adapters.a.float(), adapters.b.float()
            reference.add_adapters(out, wide, adapter_slots, a, b, adapters.part_sizes)
        return out.to(dtype or self._dtype)

    def adapter_stack(self, part_sizes: Sequence[int], num_slots: int, max_rank: int) -> AdapterStack:
        """Return memory for adapters of these weights; `part_sizes` has the number of outputs of each part."""
        weight = self._parts[0]
        return AdapterStack(weight.inputs, part_sizes, num_slots, max_rank, self._dtype, weight.data.device)

    def argmax(self, x: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Return `ops.masked_argmax` of the float32 outputs for `x` [rows, inputs]."""
        logits = self(x, torch.float32)
        if masks is not None:
            reference.apply_token_masks(logits, *masks)
        return reference.argmax(logits)


class TorchBlockExperts:
    """The experts of a layer; each expert's weights are dequantized in every step that needs them."""

    def __init__(
        self,
        gate_up: Sequence[Sequence[BlockWeight]],
        down: Sequence[Sequence[BlockWeight]],
        activate: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Keep the parts of each expert's matrices; `activate` and `dtype` as in `reference.experts`."""
        self._gate_up = [TorchBlockLinear(parts, None, dtype) for parts in gate_up]
        self._down = [TorchBlockLinear(parts, None, dtype) for parts in down]
        self._activate = activate

    def __call__(self, x: Tensor, expert_ids: Tensor, router_weights: Tensor) -> Tensor:
        """Return `ops.experts` of these weights."""

        def compute(expert: int, rows: Tensor) -> Tensor:
            return self._down[expert](self._activate(self._gate_up[expert](rows)), torch.float32)

        return reference.sum_of_experts(x, expert_ids, router_weights, compute)
