"""Filling a model's parameters from the tensors of a checkpoint."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

MAX_LISTED = 8
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class CheckpointMismatchError(ValueError):
    """The tensors of a checkpoint are not the ones that the model needs."""


def fill(
    destinations: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    prefix: str,
    ignored: Callable[[str], bool],
    tied: tuple[str, str] | None,
) -> None:
    """Copy each checkpoint tensor into the parameter, or the part of a fused one, that has its name.

    `destinations` maps names without the optional `prefix` to the views they fill, in the checkpoint's shape;
    the copy casts to the parameter's dtype. Tensors for which `ignored(name)` is true are skipped. With `tied
    = (alias, target)` the alias may be absent, and when it is present must equal the target.
    Raises CheckpointMismatchError naming what is missing, unexpected, misshapen or of a dtype that is not
    float.
    """
    filled: set[str] = set()
    problems: list[str] = []
    alias: Tensor | None = None
    for full_name, tensor in tensors:
        name = full_name.removeprefix(prefix)
        if ignored(name):
            continue
        is_alias = tied is not None and name == tied[0]
        destination = destinations.get(tied[1] if tied and is_alias else name)
        if destination is None:
            problems.append(f"unexpected {full_name}")
        elif tensor.shape != destination.shape:
            problems.append(f"{full_name} has shape {list(tensor.shape)}, not {list(destination.shape)}")
            filled.add(name)
        elif tensor.dtype not in FLOAT_DTYPES:
            problems.append(f"{full_name} has dtype {tensor.dtype}, not a 16, 32 or 64-bit float")
            filled.add(name)
        elif is_alias:
            alias = tensor
        else:
            destination.copy_(tensor)
            filled.add(name)
    if tied is not None and alias is not None:
        target = destinations[tied[1]]
        if tied[1] not in filled:
            target.copy_(alias)
            filled.add(tied[1])
        elif not torch.equal(target, alias.to(device=target.device, dtype=target.dtype)):
            problems.append(f"{tied[0]} differs from {tied[1]} although the configuration ties them")
    problems += [f"missing {name}" for name in destinations if name not in filled]
    if problems:
        raise CheckpointMismatchError(listed(problems))


def listed(problems: Sequence[str]) -> str:
    """What is wrong with a checkpoint, in one sentence of bounded length."""
    more = len(problems) - MAX_LISTED
    named = "; ".join(problems[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
    return f"the checkpoint does not fit the model: {named}"
