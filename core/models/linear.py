"""The projection that every model here is made of."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """`x @ weight.T + bias`, allocated without the initialisation that `nn.Linear` spends start-up time on.

    `weight` [out_size, in_size]; `bias` [out_size] or None.
    """

    def __init__(self, in_size: int, out_size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
