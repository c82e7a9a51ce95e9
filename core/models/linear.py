"""The projections of the native models."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mp.core.weights.block_matrix import BlockMatrix, projection_type
from vllm_mp.core.weights.checkpoint import FLOAT_DTYPES, Destination
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import pack_linear
from vllm_mp.model_config.quantization import BlockSource, Fp8Scales


class Packable(nn.Module):
    """A module whose weights have a form of their own for the device's products."""

    def pack(self, quantization: str | None) -> None:
        """Keep the loaded weights only in the form that the device's products read; see `NativeModel.pack`."""
        raise NotImplementedError


class Linear(Packable):
    """`x @ weight.T + bias`, allocated without the initialisation that `nn.Linear` spends start-up time on.

    `weight` [out_size, in_size]; `bias` [out_size] or None. With `fp8` the weights are allocated as `ops.FLOAT8`, and
    `weight_scale` has the form that `ops.linear` takes; without `fp8` it is None. With `blocks` there is no
    `weight`, but a `BlockMatrix`.
    """

    def __init__(
        self,
        in_size: int,
        out_sizes: int | Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Scales | None = None,
        *,
        blocks: BlockSource | None = None,
    ) -> None:
        """Allocate; `out_sizes` is the number of outputs, or one number for each projection that is fused here."""
        super().__init__()
        self._out_sizes = [out_sizes] if isinstance(out_sizes, int) else list(out_sizes)
        self._fp8 = fp8
        self._at: dict[str, Any] = {"dtype": dtype, "device": device}
        """Dtype and device of what the projection multiplies."""
        self._in_size = in_size
        out_size = sum(self._out_sizes)
        self.blocks: BlockMatrix | None = None
        if blocks is not None:
            self.blocks = BlockMatrix(in_size, self._out_sizes, projection_type(in_size, blocks))
        else:
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
        self._packed: Any = None
        self._adapters: Any = None
        """Memory for adapters in the form that the product takes; None if no adapter can be loaded."""

    def destinations(self, names: Sequence[str]) -> dict[str, Tensor | Destination]:
        """Map the checkpoint names of the fused projections, which are called `names`, to the rows that they fill."""
        destinations: dict[str, Tensor | Destination] = {}
        if self.blocks is not None:
            destinations |= {f"{name}.weight": self.blocks.destination(part) for part, name in enumerate(names)}
        for kind, parameter in (("weight", None if self.blocks else self.weight), ("bias", self.bias)):
            if parameter is not None:
                for name, rows in zip(names, torch.split(parameter, self._out_sizes), strict=True):
                    destinations[f"{name}.{kind}"] = rows
        if self.weight_scale is not None:
            scales = torch.split(self.weight_scale, [size // self._rows for size in self._out_sizes])
            for name, scale in zip(names, scales, strict=True):
                weight = destinations[f"{name}.weight"]
                assert isinstance(weight, Tensor)
                destinations |= self._fp8_destinations(name, weight, scale)
        return destinations

    def transposed_destination(self) -> Tensor | Destination:
        """Return the destination of a weight [in_size, out_size] of a projection without fused parts."""
        return self.weight.t() if self.blocks is None else self.blocks.transposed_destination()

    def _fp8_destinations(self, name: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor | Destination]:
        """Map the checkpoint names of one projection to its rows `weight` and `scale`."""
        if self._fp8 == "channel":

            def quantize(tensor: Tensor) -> None:
                quantized, scales = ops.quantize_rows(tensor.to(weight.device), 1)
                weight.copy_(quantized)
                scale.copy_(scales)

            return {f"{name}.weight": Destination([weight.shape], FLOAT_DTYPES, quantize)}
        destinations: dict[str, Tensor | Destination] = {
            f"{name}.weight": Destination([weight.shape], [ops.FLOAT8], weight.copy_)
        }
        if self._fp8 == "block":
            blocks = [-(-len(weight) // ops.FLOAT8_GROUP), scale.shape[1]]

            def spread(tensor: Tensor) -> None:
                scale.copy_(tensor.repeat_interleave(ops.FLOAT8_GROUP // self._rows, 0)[: len(scale)])

            destinations[f"{name}.weight_scale_inv"] = Destination([blocks], FLOAT_DTYPES, spread)
        else:
            destinations[f"{name}.weight_scale"] = Destination([[], [1]], FLOAT_DTYPES, scale.copy_)
        return destinations

    def pack(self, quantization: str | None) -> None:
        if self._fp8:
            return
        if self.blocks is not None:
            self._packed = ops.block_linear(self.blocks.parts, self.bias, self._at["dtype"])
            self.blocks.give_up()
            return
        self._packed = pack_linear(self.weight, self.bias, quantization)
        if self._packed is not None:
            del self.weight, self.bias

    @property
    def parts(self) -> tuple[Any, Tensor | None]:
        """Weight, or its parts in block types, and bias; call it before `pack`."""
        return (self.blocks.parts if self.blocks else self.weight), self.bias

    def make_adapter_stack(self, num_slots: int, max_rank: int) -> ops.AnyAdapterStack:
        """Return memory for adapters of this projection, in the form that it reads; call it after `pack`."""
        stack: ops.AnyAdapterStack
        if self._packed is not None:
            stack = self._packed.adapter_stack(self._out_sizes, num_slots, max_rank)
        else:
            stack = ops.AdapterStack(self._in_size, self._out_sizes, num_slots, max_rank, **self._at)
        self._adapters = stack
        return stack

    @property
    def input_groups(self) -> int | None:
        """The number of scales of a row of `ops.QuantizedRows`; None if `forward` takes only a tensor."""
        if self.weight_scale is None or self._adapters is not None:
            return None
        return self.weight_scale.shape[1]

    def forward(self, x: Tensor | ops.QuantizedRows, adapter_slots: Tensor | None = None) -> Tensor:
        """Return the product; `adapter_slots` as in `AttentionMetadata`."""
        adapters = self._adapters
        out: Tensor
        if self._packed is not None:
            out = self._packed(x, None, adapters, adapter_slots)
            return out
        out = ops.linear(x, self.weight, self.bias, self.weight_scale)
        if isinstance(x, ops.QuantizedRows):
            return out
        if isinstance(adapters, ops.AdapterStack) and adapter_slots is not None:
            ops.add_adapters(out, x, adapter_slots, adapters.a, adapters.b, adapters.part_sizes)
        return out


def make_adapter_stacks(projections: Iterable[Linear], num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
    """Return memory for adapters of each projection."""
    return [projection.make_adapter_stack(num_slots, max_rank) for projection in projections]


def pack_projections(model: nn.Module, quantization: str | None) -> None:
    """Pack every projection in `model`, and its experts."""
    for module in model.modules():
        if isinstance(module, Packable):
            module.pack(quantization)
