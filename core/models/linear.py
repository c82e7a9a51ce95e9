"""The projections that every model here is made of."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.models.loading import FLOAT_DTYPES, Destination
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import PackedLinear, pack_linear
from vllm_mp.model_config.quantization import Fp8Scales


class Linear(nn.Module):
    """`x @ weight.T + bias`, allocated without the initialisation that `nn.Linear` spends start-up time on.

    `weight` [out_size, in_size]; `bias` [out_size] or None. With `fp8` the weights are `ops.FLOAT8` from the start, and
    `weight_scale` is as `ops.fp8_linear` takes it; None otherwise.
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
        """`out_sizes`: the number of outputs, or of those of each of the projections that are computed together."""
        super().__init__()
        self._out_sizes = [out_sizes] if isinstance(out_sizes, int) else list(out_sizes)
        self._fp8 = fp8
        out_size = sum(self._out_sizes)
        weight = torch.empty(out_size, in_size, dtype=ops.FLOAT8 if fp8 else dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None
        self.weight_scale: nn.Parameter | None = None
        if fp8:
            # Blocks begin anew in each part: one that ends within a block leaves scales for fewer rows than these.
            self._rows = math.gcd(ops.FLOAT8_GROUP, *self._out_sizes) if fp8 == "block" else 1
            groups = -(-in_size // ops.FLOAT8_GROUP) if fp8 == "block" else 1
            scale = torch.empty(out_size // self._rows, groups, dtype=torch.float32, device=device)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self._packed: PackedLinear | None = None

    def destinations(self, names: Sequence[str]) -> dict[str, Tensor | Destination]:
        """What the tensors of a checkpoint fill whose projections, of the `out_sizes`, have these names."""
        places: dict[str, Tensor | Destination] = {}
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                for name, rows in zip(names, torch.split(parameter, self._out_sizes), strict=True):
                    places[f"{name}.{kind}"] = rows
        if self.weight_scale is not None:
            scales = torch.split(self.weight_scale, [size // self._rows for size in self._out_sizes])
            for name, scale in zip(names, scales, strict=True):
                weight = places[f"{name}.weight"]
                assert isinstance(weight, Tensor)
                places |= self._fp8_destinations(name, weight, scale)
        return places

    def _fp8_destinations(self, name: str, weight: Tensor, scale: Tensor) -> dict[str, Tensor | Destination]:
        """Of one projection with its rows of weights and of scales."""
        if self._fp8 == "channel":

            def quantize(tensor: Tensor) -> None:
                quantized, scales = ops.quantize_rows(tensor.to(weight.device), 1)
                weight.copy_(quantized)
                scale.copy_(scales)

            return {f"{name}.weight": Destination([weight.shape], FLOAT_DTYPES, quantize)}
        places: dict[str, Tensor | Destination] = {
            f"{name}.weight": Destination([weight.shape], [ops.FLOAT8], weight.copy_)
        }
        if self._fp8 == "block":
            blocks = [-(-len(weight) // ops.FLOAT8_GROUP), scale.shape[1]]

            def spread(tensor: Tensor) -> None:
                scale.copy_(tensor.repeat_interleave(ops.FLOAT8_GROUP // self._rows, 0)[: len(scale)])

            places[f"{name}.weight_scale_inv"] = Destination([blocks], FLOAT_DTYPES, spread)
        else:
            places[f"{name}.weight_scale"] = Destination([[], [1]], FLOAT_DTYPES, scale.copy_)
        return places

    def pack(self, quantization: str | None) -> None:
        """Keep the weights, which are there, only as the device's product reads them; see `NativeModel.pack`."""
        if self._fp8:
            return
        self._packed = pack_linear(self.weight, self.bias, quantization)
        if self._packed is not None:
            del self.weight, self.bias

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed(x)
        if self.weight_scale is not None:
            return ops.fp8_linear(x, self.weight, self.weight_scale, self.bias)
        return F.linear(x, self.weight, self.bias)


class VocabularyHead(nn.Module):
    """Scores over the vocabulary; `weight` [vocab_size, hidden_size] may be that of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self._packed: PackedLinear | None = None

    def pack(self, quantization: str | None) -> None:
        """As `Linear.pack`; an embedding keeps its weights."""
        self._packed = pack_linear(self.weight, None, quantization)
        if self._packed is not None:
            del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] to [n, vocab_size], in the model's dtype or, where that costs nothing, in float32."""
        return F.linear(hidden, self.weight) if self._packed is None else self._packed(hidden, torch.float32)

    def argmax(self, hidden: Tensor) -> Tensor:
        """What `ops.argmax` finds in the scores of `hidden` [n, hidden_size], without writing these down if it can."""
        return ops.argmax(self(hidden)) if self._packed is None else self._packed.argmax(hidden)


def pack_projections(model: nn.Module, quantization: str | None) -> None:
    """Pack every projection in `model`."""
    for module in model.modules():
        if isinstance(module, Linear | VocabularyHead):
            module.pack(quantization)
