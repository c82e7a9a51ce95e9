"""The projections that every model here is made of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import PackedLinear, pack_linear


class Linear(nn.Module):
    """`x @ weight.T + bias`, allocated without the initialisation that `nn.Linear` spends start-up time on.

    `weight` [out_size, in_size]; `bias` [out_size] or None.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None
        self._packed: PackedLinear | None = None

    def pack(self, quantization: str | None) -> None:
        """Keep the weights, which are there, only as the device's product reads them; see `NativeModel.pack`."""
        self._packed = pack_linear(self.weight, self.bias, quantization)
        if self._packed is not None:
            del self.weight, self.bias

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias."""
        return self.weight, self.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) if self._packed is None else self._packed(x)


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
