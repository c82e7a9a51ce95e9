"""The projections of the native models."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.models.checkpoint import FLOAT_DTYPES, AnyDestination, Destination, Rows
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import BlockWeight, pack_linear
from vllm_mp.model_config.quantization import Fp8Scales


class Linear(nn.Module):
    """`x @ weight.T + bias`, allocated without the initialisation that `nn.Linear` spends start-up time on.

    `weight` [out_size, in_size]; `bias` [out_size] or None. With `fp8` the weights are allocated as `ops.FLOAT8`, and
    `weight_scale` has the form that `ops.fp8_linear` takes; without `fp8` it is None.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: int | Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Scales | None = None,
    ) -> None:
        """Allocate; `out_sizes` is the number of outputs, or one number for each projection that is fused here."""
        super().__init__()
        self._out_sizes = [out_sizes] if isinstance(out_sizes, int) else list(out_sizes)
        self._fp8 = fp8
        self._at: dict[str, Any] = {"dtype": dtype, "device": device}
        """Dtype and device of what the projection multiplies."""
        self._in_size = in_size
        out_size = sum(self._out_sizes)
        weight = torch.empty(out_size, in_size, dtype=ops.FLOAT8 if fp8 else dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None
        self.weight_scale: nn.Parameter | None = None
        if fp8:
            # Each fused projection starts a block of its own, so a scale covers only as many rows as divide all sizes.
            self._rows = math.gcd(ops.FLOAT8_GROUP, *self._out_sizes) if fp8 == "block" else 1
            groups = -(-in_size // ops.FLOAT8_GROUP) if fp8 == "block" else 1
            scale = torch.empty(out_size // self._rows, groups, dtype=torch.float32, device=device)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self._blocks: dict[int, BlockWeight] = {}
        """The weights in block types, by the number of the fused projection."""
        self._packed: ops.AnyLinear | None = None
        self._adapters: ops.AnyAdapterStack | None = None
        """None if no adapter can be loaded."""

    def destinations(self, names: Sequence[str]) -> dict[str, AnyDestination]:
        """Map the checkpoint names of the fused projections, which are called `names`, to the rows that they fill."""
        places: dict[str, AnyDestination] = {}
        for i, (name, rows) in enumerate(zip(names, torch.split(self.weight, self._out_sizes), strict=True)):
            places[f"{name}.weight"] = Rows(rows, functools.partial(self._blocks.__setitem__, i))
        if self.bias is not None:
            for name, rows in zip(names, torch.split(self.bias, self._out_sizes), strict=True):
                places[f"{name}.bias"] = rows
        if self.weight_scale is not None:
            scales = torch.split(self.weight_scale, [size // self._rows for size in self._out_sizes])
            for name, scale in zip(names, scales, strict=True):
                weight = places[f"{name}.weight"]
                assert isinstance(weight, Rows)
                places |= self._fp8_destinations(name, weight.tensor, scale)
        return places

    def _fp8_destinations(self, name: str, weight: Tensor, scale: Tensor) -> dict[str, AnyDestination]:
        """Map the checkpoint names of one projection to its rows `weight` and `scale`."""
        if self._fp8 == "channel":

            def quantize(tensor: Tensor) -> None:
                quantized, scales = ops.quantize_rows(tensor.to(weight.device), 1)
                weight.copy_(quantized)
                scale.copy_(scales)

            return {f"{name}.weight": Destination([weight.shape], FLOAT_DTYPES, quantize)}
        places: dict[str, AnyDestination] = {f"{name}.weight": Destination([weight.shape], [ops.FLOAT8], weight.copy_)}
        if self._fp8 == "block":
            blocks = [-(-len(weight) // ops.FLOAT8_GROUP), scale.shape[1]]

            def spread(tensor: Tensor) -> None:
                scale.copy_(tensor.repeat_interleave(ops.FLOAT8_GROUP // self._rows, 0)[: len(scale)])

            places[f"{name}.weight_scale_inv"] = Destination([blocks], FLOAT_DTYPES, spread)
        else:
            places[f"{name}.weight_scale"] = Destination([[], [1]], FLOAT_DTYPES, scale.copy_)
        return places

    def pack(self, quantization: str | None) -> None:
        """Keep the loaded weights only in the form that the device's product reads; see `NativeModel.pack`."""
        if self._fp8:
            return
        if self.keeps_blocks():
            self._packed = ops.block_linear(self._block_parts(), self.bias, self._at["dtype"])
        else:
            self._packed = pack_linear(self.weight, self.bias, quantization)
        if self._packed is not None:
            del self.weight, self.bias

    def keeps_blocks(self) -> bool:
        """Tell whether all weights are in block types. If only a part of them is, dequantize that part."""
        if 0 < len(self._blocks) < len(self._out_sizes):
            for i, rows in enumerate(torch.split(self.weight, self._out_sizes)):
                if block := self._blocks.pop(i, None):
                    rows.copy_(block.dequantized())
        return bool(self._blocks)

    def _block_parts(self) -> list[BlockWeight]:
        return [block for _, block in sorted(self._blocks.items())]

    @property
    def parts(self) -> tuple[Tensor | Sequence[BlockWeight], Tensor | None]:
        """Weight and bias, as `ops.LayerWeights` has them."""
        return self._block_parts() if self.keeps_blocks() else self.weight, self.bias

    def make_adapter_stack(self, num_slots: int, max_rank: int) -> ops.AnyAdapterStack:
        """Return memory for adapters of this projection, in the form that it reads; call it after `pack`."""
        if self._packed is not None:
            self._adapters = self._packed.adapter_stack(self._out_sizes, num_slots, max_rank)
        else:
            self._adapters = ops.AdapterStack(self._in_size, self._out_sizes, num_slots, max_rank, **self._at)
        return self._adapters

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        """Return the product; `adapter_slots` as in `AttentionMetadata`."""
        adapters = self._adapters
        if self._packed is not None:
            packed: Any = self._packed  # its adapter stack has the form that it reads
            out: Tensor = packed(x, None, adapters, adapter_slots)
            return out
        if self.weight_scale is not None:
            out = ops.fp8_linear(x, self.weight, self.weight_scale, self.bias)
        else:
            out = F.linear(x, self.weight, self.bias)
        if isinstance(adapters, ops.AdapterStack) and adapter_slots is not None:
            ops.add_adapters(out, x, adapter_slots, adapters.a, adapters.b, adapters.part_sizes)
        return out


class VocabularyHead(nn.Module):
    """The projection to logits; `weight` [vocab_size, hidden_size] may be the weight of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self._packed: ops.AnyLinear | None = None

    def replace(self, weight: BlockWeight) -> None:
        """Take `weight` instead of a copy to `self.weight`."""
        self._packed = ops.block_linear([weight], None, self.weight.dtype)
        del self.weight

    def pack(self, quantization: str | None) -> None:
        """Pack as `Linear.pack` does; an embedding that shares the weight keeps it."""
        if self._packed is None:
            self._packed = pack_linear(self.weight, None, quantization)
            if self._packed is not None:
                del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] for `hidden` [n, hidden_size]: float32 if packed, else the model's dtype."""
        return F.linear(hidden, self.weight) if self._packed is None else self._packed(hidden, torch.float32)

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return `ops.argmax` of the logits of `hidden` [n, hidden_size]; packed weights fuse the two."""
        return ops.argmax(self(hidden)) if self._packed is None else self._packed.argmax(hidden)


def make_adapter_stacks(projections: Iterable[Linear], num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
    """Return memory for adapters of each projection."""
    return [projection.make_adapter_stack(num_slots, max_rank) for projection in projections]


def pack_projections(model: nn.Module, quantization: str | None) -> None:
    """Pack every projection in `model`."""
    for module in model.modules():
        if isinstance(module, Linear | VocabularyHead):
            module.pack(quantization)
