"""The LoRA adapters of one projection in the memory of the device (Hu et al. 2021)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Factors(NamedTuple):
    """What an adapter adds to the product of a linear layer: `b @ (a @ x)`."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], multiplied by the adapter's scale


class AdapterStack(nn.Module):
    """A and B of the adapters of one projection, in slots, as torch and Triton read them.

    The projection may fuse several parts, such as q, k and v, each with factors of its own. A slot that was never
    loaded holds zeros.
    """

    a: Tensor  # [num_slots, parts, max_rank, inputs]
    b: Tensor  # [num_slots, max_rank, outputs]

    def __init__(
        self,
        inputs: int,
        part_sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate; `part_sizes` has the number of outputs of each part."""
        super().__init__()
        self.part_sizes = list(part_sizes)
        shape_a = (num_slots, len(self.part_sizes), max_rank, inputs)
        shape_b = (num_slots, max_rank, sum(self.part_sizes))
        self.register_buffer("a", torch.zeros(shape_a, dtype=dtype, device=device))
        self.register_buffer("b", torch.zeros(shape_b, dtype=dtype, device=device))

    def load(self, slot: int, parts: Sequence[Factors | None]) -> None:
        """Replace what `slot` holds with the factors of each part; None leaves the part as it is in the model."""
        self.a[slot].zero_()
        self.b[slot].zero_()
        for part, (factors, of_b) in enumerate(zip(parts, torch.split(self.b[slot], self.part_sizes, 1), strict=True)):
            if factors is not None:
                rank = len(factors.a)
                self.a[slot, part, :rank] = factors.a
                of_b[:rank] = factors.b.T
