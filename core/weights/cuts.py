"""Which tensors of a checkpoint a stage holds, and which part of each a rank of the stage holds.

The linear layers of each family say by which of their dimensions they are cut (`model_config/linear_layers.py`). If it
is their inputs, their outputs are summed over the ranks, so rank 0 alone has their bias.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from vllm_mp.kernels.ops import FLOAT8_GROUP, BlockWeight, Factors
from vllm_mp.model_config.architecture import NativeArchitecture, Shard
from vllm_mp.model_config.families.registry import linear_layers
from vllm_mp.model_config.linear_layers import HEADS, KV_HEADS, LinearLayer, Range

_NORMS_OF_ALL_HEADS: Final = {"q_norm": LinearLayer("q_norm", HEADS), "k_norm": LinearLayer("k_norm", KV_HEADS)}
"""The weights of norms over all heads, which are cut as the layers whose outputs they normalize."""


def is_of_stage(name: str, arch: NativeArchitecture) -> bool:
    """Return whether the stage of `arch` holds the tensor `name` of a checkpoint, or may refuse it as unexpected."""
    stage = arch.stage
    if stage is None:
        return True
    family = linear_layers(arch)
    if (number := family.number_of(name)) is not None:
        return stage.first <= number < stage.last or number >= stage.num_layers
    module = name.split(".")[-2] if "." in name else ""
    if module in family.of_first_stage:
        return stage.is_first
    return stage.is_last or module not in family.of_last_stage


def cut_tensors(
    tensors: Iterable[tuple[str, Tensor | BlockWeight]], shard: Shard | None
) -> Iterator[tuple[str, Tensor | BlockWeight]]:
    """Yield each tensor of a checkpoint as the rank of `shard` holds it; whole tensors without a shard.

    Tensors that are mapped from a file stay mapped, so that only the rank's part of them is read. Raises ValueError,
    naming the tensor and the remedy, if it is quantized in groups that lie across a border between ranks.
    """
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        layer = None if shard is None else _layer_of(module, shard)
        if shard is None or layer is None:
            yield name, tensor
        else:
            yield name, _part(name, kind, tensor, layer, shard)


def cut_factors(part: str, factors: Factors | None, shard: Shard | None) -> Factors | None:
    """Return the factors of a LoRA adapter for the linear layer called `part` as the rank of `shard` holds them."""
    layer = None if shard is None else _layer_of(part, shard)
    if factors is None or shard is None or layer is None:
        return factors
    if layer.by_inputs:
        return Factors(_along(factors.a, 1, layer.shared.ranges(shard, factors.a.shape[1])), factors.b)
    return Factors(factors.a, _along(factors.b, 0, layer.shared.ranges(shard, factors.b.shape[0])))


def _layer_of(module: str, shard: Shard) -> LinearLayer | None:
    """Return the linear layer `module`, whose tensors are cut; None if every rank holds them whole."""
    norm = _NORMS_OF_ALL_HEADS.get(module.rpartition(".")[2]) if shard.whole.norms_all_heads else None
    return norm or linear_layers(shard.whole).find(module)


def _part(name: str, kind: str, tensor: Tensor | BlockWeight, layer: LinearLayer, shard: Shard) -> Tensor | BlockWeight:
    if isinstance(tensor, BlockWeight):
        total = tensor.inputs if layer.by_inputs else tensor.outputs
        return _block_part(name, tensor, layer, layer.shared.ranges(shard, total))
    if kind == "bias" and layer.by_inputs:
        return tensor if shard.rank == 0 else torch.zeros_like(tensor)
    if kind == "weight_scale_inv":
        return _scale_part(name, tensor, layer, shard)
    if tensor.dim() == 0 or kind.endswith("_scale"):
        return tensor
    dimension = int(layer.by_inputs != layer.is_transposed) if tensor.dim() == 2 else 0
    return _along(tensor, dimension, layer.shared.ranges(shard, tensor.shape[dimension]))


def _along(tensor: Tensor, dimension: int, ranges: Sequence[Range]) -> Tensor:
    parts = [tensor.narrow(dimension, first, last - first) for first, last in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _scale_part(name: str, scale: Tensor, layer: LinearLayer, shard: Shard) -> Tensor:
    """Return the part of the scales [outputs / 128, inputs / 128] of a matrix of 8-bit floats."""
    dimension = int(layer.by_inputs)
    total = scale.shape[dimension] * FLOAT8_GROUP
    ranges = layer.shared.ranges(shard, total)
    if any(border % FLOAT8_GROUP for pair in ranges for border in pair):
        raise ValueError(
            f"{name}: a rank would hold a part of a group of {FLOAT8_GROUP} weights with one scale; lower "
            "tensor_parallel_size"
        )
    return _along(scale, dimension, [(first // FLOAT8_GROUP, last // FLOAT8_GROUP) for first, last in ranges])


def _block_part(name: str, weight: BlockWeight, layer: LinearLayer, ranges: Sequence[Range]) -> BlockWeight:
    """Return the rows or the columns `ranges` of a matrix in a block type; rows of one range stay where they lie."""
    kind = weight.type
    if not layer.by_inputs:
        return BlockWeight(_along(weight.data, 0, ranges), kind, weight.inputs, weight.release)
    ((first, last),) = ranges
    if first % kind.weights or last % kind.weights:
        raise ValueError(
            f"{name} in {kind.name} has blocks of {kind.weights} weights, which a rank with {last - first} inputs "
            "would cut; lower tensor_parallel_size, or use a file in a type with blocks of 32 weights"
        )
    begin, end = (border // kind.weights * kind.num_bytes for border in (first, last))
    part = weight.data[:, begin:end].contiguous()
    if weight.release is not None:
        weight.release()
    return BlockWeight(part, kind, last - first)
