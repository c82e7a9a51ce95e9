"""The ranks that compute each layer together, as a model sees them."""

import torch
from torch import Tensor, nn


class RankGroup:
    """The operations in which all ranks of a group take part; this class is the group of a single rank.

    All ranks must call the same operations in the same order, with tensors of the same shape and dtype on the device of
    their rank. Every rank gets the same result to the bit, so that all continue with the same hidden states.
    """

    rank = 0
    size = 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' `x`; may overwrite `x`."""
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the ranks' `x` in the order of ranks on rank 0; on other ranks the list is empty."""
        return [x]

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the `x` of rank 0; may overwrite the `x` of other ranks."""
        return x

    def minimum(self, value: int) -> int:
        """Return the smallest of the ranks' values, which must fit in 63 bits."""
        return value

    def close(self) -> None:
        """Release what the group holds; no operation may follow."""


ALONE = RankGroup()
"""The group of a core that computes the whole model."""


class RankModule(nn.Module):
    """A module that computes a share of its result, and calls `group` to complete it.

    `group` is `ALONE` until `bind_group` replaces it.
    """

    group: RankGroup

    def __init__(self) -> None:
        super().__init__()
        self.group = ALONE


def bind_group(model: nn.Module, group: RankGroup) -> None:
    """Let every `RankModule` of `model` call `group`; called once, after the weights are loaded."""
    for module in model.modules():
        if isinstance(module, RankModule):
            module.group = group


def minimum_of(group: RankGroup, value: int, device: torch.device) -> int:
    """Return the smallest value of the ranks by means of `group.sum`: each rank fills its own slot."""
    values = torch.zeros(group.size, dtype=torch.int64, device=device)
    values[group.rank] = value
    return int(group.sum(values).min())
