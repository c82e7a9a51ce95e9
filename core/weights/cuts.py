"""Which tensors of a checkpoint a stage holds, and which part of each a rank of the stage holds.

Projections whose outputs are shared out are cut by outputs (q, k, v, gate, up), those whose inputs are shared out by
inputs (o, down). The outputs of the latter are summed over the ranks, so rank 0 alone has their bias.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from vllm_mp.kernels.ops import FLOAT8_GROUP, BlockWeight, Factors
from vllm_mp.model_config.architecture import Shard, Stage
from vllm_mp.model_config.families.registry import NATIVE_MODELS

Range = tuple[int, int]
"""First and last + 1."""


def _heads(shard: Shard, size: int) -> list[Range]:
    return [_of_heads(shard.heads, size // shard.whole.num_heads)]


def _kv_heads(shard: Shard, size: int) -> list[Range]:
    return [_of_heads(shard.kv_heads, size // shard.whole.num_kv_heads)]


def _of_heads(heads: Range, dim: int) -> Range:
    return heads[0] * dim, heads[1] * dim


def _query_key_value(shard: Shard, size: int) -> list[Range]:
    """Queries, keys and values lie one below another in one matrix."""
    arch = shard.whole
    dim = size // (arch.num_heads + 2 * arch.num_kv_heads)
    keys, values = arch.num_heads * dim, (arch.num_heads + arch.num_kv_heads) * dim
    first, last = _of_heads(shard.kv_heads, dim)
    return [_of_heads(shard.heads, dim), (keys + first, keys + last), (values + first, values + last)]


def _even(shard: Shard, size: int) -> list[Range]:
    part = size // shard.size
    return [(shard.rank * part, (shard.rank + 1) * part)]


def _gate_and_up(shard: Shard, size: int) -> list[Range]:
    """Gate and up lie one below the other in one matrix."""
    ((first, last),) = _even(shard, size // 2)
    return [(first, last), (size // 2 + first, size // 2 + last)]


def _vocabulary(shard: Shard, size: int) -> list[Range]:
    return [shard.vocabulary]


class _Cut(NamedTuple):
    """The part of a module's tensors that a rank holds."""

    ranges: Callable[[Shard, int], list[Range]]
    """Returns the rank's ranges of outputs or inputs; the argument is their number in the whole module."""
    by_inputs: bool = False
    is_transposed: bool = False
    """The weight is stored [inputs, outputs]."""


_LLAMA: Final = {
    "q_proj": _Cut(_heads),
    "k_proj": _Cut(_kv_heads),
    "v_proj": _Cut(_kv_heads),
    "qkv_proj": _Cut(_query_key_value),
    "o_proj": _Cut(_even, by_inputs=True),
    "gate_proj": _Cut(_even),
    "up_proj": _Cut(_even),
    "gate_up_proj": _Cut(_gate_and_up),
    "down_proj": _Cut(_even, by_inputs=True),
    "embed_tokens": _Cut(_vocabulary),
    "lm_head": _Cut(_vocabulary),
}
_NORMS_OF_ALL_HEADS: Final = {"q_norm": _Cut(_heads), "k_norm": _Cut(_kv_heads)}
_GPT2: Final = {
    "attn.c_attn": _Cut(_query_key_value, is_transposed=True),
    "attn.c_proj": _Cut(_even, by_inputs=True, is_transposed=True),
    "mlp.c_fc": _Cut(_even, is_transposed=True),
    "mlp.c_proj": _Cut(_even, by_inputs=True, is_transposed=True),
    "wte": _Cut(_vocabulary),
    "lm_head": _Cut(_vocabulary),
}
_BERT: Final = {
    "attention.self.query": _Cut(_heads),
    "attention.self.key": _Cut(_heads),
    "attention.self.value": _Cut(_heads),
    "attention.output.dense": _Cut(_even, by_inputs=True),
    "intermediate.dense": _Cut(_even),
    "output.dense": _Cut(_even, by_inputs=True),
    "q_lin": _Cut(_heads),
    "k_lin": _Cut(_heads),
    "v_lin": _Cut(_heads),
    "out_lin": _Cut(_even, by_inputs=True),
    "lin1": _Cut(_even),
    "lin2": _Cut(_even, by_inputs=True),
    "word_embeddings": _Cut(_vocabulary),
}
_CUTS: Final = {"llama": _LLAMA, "gpt2": _GPT2, "bert": _BERT}
"""By the module of `core/models` that runs the family, and by the end of a name in a checkpoint."""
_LAYER: Final = re.compile(r".*\b(?:layers?|h)\.(\d+)\.")
_OF_FIRST_STAGE: Final = ("embed_tokens", "lm_head", "wte", "wpe")
_OF_LAST_STAGE: Final = ("norm", "ln_f")


def is_of_stage(name: str, stage: Stage | None) -> bool:
    """Return whether `stage` holds the tensor `name` of a checkpoint, or may refuse it as unexpected."""
    if stage is None:
        return True
    if layer := _LAYER.match(name):
        return stage.first <= int(layer[1]) < stage.last or int(layer[1]) >= stage.num_layers
    module = name.split(".")[-2] if "." in name else ""
    if module in _OF_FIRST_STAGE:
        return stage.is_first
    return stage.is_last or module not in _OF_LAST_STAGE


def cut_tensors(
    tensors: Iterable[tuple[str, Tensor | BlockWeight]], shard: Shard | None
) -> Iterator[tuple[str, Tensor | BlockWeight]]:
    """Yield each tensor of a checkpoint as the rank of `shard` holds it; whole tensors without a shard.

    Tensors that are mapped from a file stay mapped, so that only the rank's part of them is read. Raises ValueError,
    naming the tensor and the remedy, if it is quantized in groups that lie across a border between ranks.
    """
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        cut = None if shard is None else _cut_of(module, shard)
        if shard is None or cut is None:
            yield name, tensor
        else:
            yield name, _part(name, kind, tensor, cut, shard)


def cut_factors(part: str, factors: Factors | None, shard: Shard | None) -> Factors | None:
    """Return the factors of a LoRA adapter for the linear layer called `part` as the rank of `shard` holds them."""
    cut = None if shard is None else _cut_of(part, shard)
    if factors is None or shard is None or cut is None:
        return factors
    if cut.by_inputs:
        return Factors(_along(factors.a, 1, cut.ranges(shard, factors.a.shape[1])), factors.b)
    return Factors(factors.a, _along(factors.b, 0, cut.ranges(shard, factors.b.shape[0])))


def _cut_of(module: str, shard: Shard) -> _Cut | None:
    """Return how the tensors of `module` are cut; None if every rank holds them whole."""
    cuts = _CUTS[NATIVE_MODELS[shard.whole.name].model.partition(":")[0]]
    if shard.whole.norms_all_heads:
        cuts = cuts | _NORMS_OF_ALL_HEADS
    path = _LAYER.sub("", module)
    return cuts.get(path) or cuts.get(path.rpartition(".")[2])


def _part(name: str, kind: str, tensor: Tensor | BlockWeight, cut: _Cut, shard: Shard) -> Tensor | BlockWeight:
    if isinstance(tensor, BlockWeight):
        total = tensor.inputs if cut.by_inputs else tensor.outputs
        return _block_part(name, tensor, cut, cut.ranges(shard, total))
    if kind == "bias" and cut.by_inputs:
        return tensor if shard.rank == 0 else torch.zeros_like(tensor)
    if kind == "weight_scale_inv":
        return _scale_part(name, tensor, cut, shard)
    if tensor.dim() == 0 or kind.endswith("_scale"):
        return tensor
    dimension = int(cut.by_inputs != cut.is_transposed) if tensor.dim() == 2 else 0
    return _along(tensor, dimension, cut.ranges(shard, tensor.shape[dimension]))


def _along(tensor: Tensor, dimension: int, ranges: Sequence[Range]) -> Tensor:
    parts = [tensor.narrow(dimension, first, last - first) for first, last in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dimension)


def _scale_part(name: str, scale: Tensor, cut: _Cut, shard: Shard) -> Tensor:
    """Return the part of the scales [outputs / 128, inputs / 128] of a matrix of 8-bit floats."""
    dimension = int(cut.by_inputs)
    total = scale.shape[dimension] * FLOAT8_GROUP
    ranges = cut.ranges(shard, total)
    if any(border % FLOAT8_GROUP for pair in ranges for border in pair):
        raise ValueError(
            f"{name}: a rank would hold a part of a group of {FLOAT8_GROUP} weights with one scale; lower "
            "tensor_parallel_size"
        )
    return _along(scale, dimension, [(first // FLOAT8_GROUP, last // FLOAT8_GROUP) for first, last in ranges])


def _block_part(name: str, weight: BlockWeight, cut: _Cut, ranges: Sequence[Range]) -> BlockWeight:
    """Return the rows or the columns `ranges` of a matrix in a block type; rows of one range stay where they lie."""
    kind = weight.type
    if not cut.by_inputs:
        return BlockWeight(_along(weight.data, 0, ranges), kind, weight.inputs, weight.release)
    ((first, last),) = ranges
    if first % kind.weights or last % kind.weights:
        raise ValueError(
            f"{name} in {kind.name} has blocks of {kind.weights} weights, which a rank with {last - first} inputs "
            "would cut; lower tensor_parallel_size, or use a file in a type with blocks of 32 weights"
        )
    begin, end = (border // kind.weights * kind.num_bytes for border in (first, last))
    part = weight.data[:, begin:end].contiguous()
    weight.release()
    return BlockWeight(part, kind, last - first)
