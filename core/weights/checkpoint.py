"""Copy the tensors of a checkpoint into a model's parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mp.kernels.block_weight import BlockWeight

MAX_LISTED = 8
"""The most problems that an error names."""
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class CheckpointMismatchError(ValueError):
    """Raised when the tensors of a checkpoint do not match the parameters of the model."""


class Destination(NamedTuple):
    """How to store a tensor of a checkpoint when a copy to a parameter, with a cast, is not enough."""

    shapes: Sequence[Sequence[int]]
    """The shapes that the tensor may have."""
    dtypes: Sequence[torch.dtype]
    """The dtypes that the tensor may have."""
    copy_: Callable[[Any], object]
    """Stores the tensor."""
    is_required: bool = True
    """False: the checkpoint may lack the tensor."""
    takes_blocks: bool = False
    """True: weights in block types are stored too."""


def load_checkpoint(
    destinations: Mapping[str, Tensor | Destination],
    tensors: Iterable[tuple[str, Tensor | BlockWeight]],
    *,
    prefix: str,
    ignored: Callable[[str], bool],
    tied: tuple[str, str] | None,
) -> None:
    """Copy each checkpoint tensor into the parameter, or the part of a fused one, that has its name.

    `destinations` maps names, without the optional `prefix`, to the views that they fill, in the checkpoint's shape.
    The copy casts floats of 16, 32 or 64 bits to the parameter's dtype. Tensors for which `ignored(name)` is
    true are skipped, and so are biases of zeros that the model does not have. With `tied = (alias, receiver)` the alias
    may be absent; if present it must equal the receiver.
    Raises CheckpointMismatchError naming what is missing, unexpected, misshapen or of another dtype.
    """
    filled: set[str] = set()
    problems: list[str] = []
    alias: Tensor | BlockWeight | None = None
    for full_name, tensor in tensors:
        name = full_name.removeprefix(prefix)
        if ignored(name):
            continue
        is_alias = tied is not None and name == tied[0]
        destination = destinations.get(tied[1] if tied and is_alias else name)
        if destination is None:
            # Older GPTQ checkpoints have a bias of zeros for every projection.
            if name.endswith(".bias") and isinstance(tensor, Tensor) and not tensor.any():
                continue
            problems.append(f"unexpected {full_name}")
            continue
        if isinstance(destination, Tensor):
            receiver = Destination([destination.shape], FLOAT_DTYPES, destination.copy_)
        else:
            receiver = destination
        shape = [tensor.outputs, tensor.inputs] if isinstance(tensor, BlockWeight) else list(tensor.shape)
        if shape not in map(list, receiver.shapes):
            expected = " or ".join(str(list(allowed)) for allowed in receiver.shapes)
            problems.append(f"{full_name} has shape {shape}, not {expected}")
            filled.add(name)
        elif isinstance(tensor, BlockWeight) and not receiver.takes_blocks:
            problems.append(f"{full_name} has the block type {tensor.type.name}, not floats")
            filled.add(name)
        elif isinstance(tensor, Tensor) and tensor.dtype not in receiver.dtypes:
            expected = (
                "a 16, 32 or 64-bit float"
                if receiver.dtypes is FLOAT_DTYPES
                else " or ".join(map(str, receiver.dtypes))
            )
            problems.append(f"{full_name} has dtype {tensor.dtype}, not {expected}")
            filled.add(name)
        elif is_alias:
            alias = tensor
        else:
            receiver.copy_(tensor)
            filled.add(name)
    if tied is not None and alias is not None:
        target: Any = destinations[tied[1]]
        if tied[1] not in filled:
            target.copy_(alias)
            filled.add(tied[1])
        elif isinstance(target, Tensor) and not _equal(target, alias):
            problems.append(f"{tied[0]} differs from {tied[1]} although the configuration ties them")
    for name, wanted in destinations.items():
        if name not in filled and (isinstance(wanted, Tensor) or wanted.is_required):
            problems.append(f"missing {name}")
    if problems:
        raise CheckpointMismatchError(listed(problems))


def _equal(target: Tensor, alias: Tensor | BlockWeight) -> bool:
    return isinstance(alias, Tensor) and torch.equal(target, alias.to(device=target.device, dtype=target.dtype))


def listed(problems: Sequence[str]) -> str:
    """Return the problems of a checkpoint as one sentence of bounded length."""
    more = len(problems) - MAX_LISTED
    named = "; ".join(problems[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else "")
    return f"the checkpoint does not fit the model: {named}"


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model, without the scales of quantized weights."""
    return sum(value.numel() for name, value in model.named_parameters() if not name.endswith(".weight_scale"))
