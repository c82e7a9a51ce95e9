"""Matrices in block types (kernels/block_weight.py), and embeddings that may be such a matrix."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.torch_threads import threads_for
from vllm_mp.core.weights.checkpoint import FLOAT_DTYPES, Destination
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import BLOCK_TYPES, BlockType, BlockWeight
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.quantization import BlockSource


class BlockMatrix(nn.Module):
    """A matrix [outputs, inputs] in block types, whose parts lie one below another."""

    def __init__(self, in_size: int, out_sizes: Sequence[int], type: BlockType) -> None:
        """Make a matrix without weights; floats are rounded to `type`."""
        super().__init__()
        self.shapes = [(size, in_size) for size in out_sizes]
        self._type = type
        self._parts: list[BlockWeight | None] = [None] * len(out_sizes)

    @property
    def is_loaded(self) -> bool:
        """Whether all parts were stored, and not given up."""
        return None not in self._parts

    @property
    def parts(self) -> list[BlockWeight]:
        """The parts; call it after all were stored."""
        parts = [part for part in self._parts if part is not None]
        assert len(parts) == len(self.shapes)
        return parts

    def give_up(self) -> None:
        """Drop the parts, which the product has taken over."""
        self._parts = [None] * len(self._parts)

    def store(self, part: int, weight: Tensor | BlockWeight) -> None:
        """Keep the weights of a part: a float tensor [outputs, inputs], which is rounded, or blocks, as they are."""
        self._parts[part] = ops.quantize_blocks(weight, self._type) if isinstance(weight, Tensor) else weight

    def destination(self, part: int = 0) -> Destination:
        """Return the destination of the weights of a part."""
        return Destination([self.shapes[part]], FLOAT_DTYPES, functools.partial(self.store, part), takes_blocks=True)

    def transposed_destination(self) -> Destination:
        """Return the destination of the transpose [inputs, outputs] of a matrix with one part, in floats."""
        return Destination([self.shapes[0][::-1]], FLOAT_DTYPES, lambda weight: self.store(0, weight.t().contiguous()))


def projection_type(in_size: int, source: BlockSource) -> BlockType:
    """Return the type to which floats of a projection are rounded; raises ValueError if there is none."""
    if in_size % 32:
        raise ValueError(f"4 bits need projections with a multiple of 32 inputs, not {in_size}; leave quantization out")
    if source != "int4":
        return BLOCK_TYPES["Q8_0"]
    return BLOCK_TYPES["Q4_K" if in_size % 256 == 0 else "Q4_1"]


def vocabulary_type(hidden_size: int) -> BlockType:
    """Return the type for embeddings and head, which need more bits than projections."""
    return BLOCK_TYPES["Q6_K" if hidden_size % 256 == 0 else "Q8_0"]


def vocabulary_matrix(arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> nn.Parameter | BlockMatrix:
    """Return the uninitialised weight [vocab_size, hidden_size] of an embedding or a head."""
    if arch.blocks in ("int4", "gguf"):
        return BlockMatrix(arch.hidden_size, [arch.vocab_size], vocabulary_type(arch.hidden_size))
    return nn.Parameter(torch.empty(arch.vocab_size, arch.hidden_size, dtype=dtype, device=device))


def embedding(ids: Tensor, weight: nn.Parameter | BlockMatrix, dtype: torch.dtype) -> Tensor:
    """Return the rows `ids` of the weight of an embedding, in `dtype`, which is that of a parameter."""
    if isinstance(weight, BlockMatrix):
        return ops.block_embedding(weight.parts[0], ids, dtype)
    with threads_for(ids.numel() * weight.shape[1]):
        return F.embedding(ids, weight)


def prepare_embedding(ids: Tensor, weight: nn.Parameter | BlockMatrix, out: Tensor) -> Callable[[], object] | None:
    """Return a call that writes `embedding` of `ids` to `out`; see `ops.prepare_embedding`."""
    return ops.prepare_embedding(weight.parts[0] if isinstance(weight, BlockMatrix) else weight, ids, out)


def destination_of(weight: Tensor | BlockMatrix) -> Tensor | Destination:
    """Return the destination of a whole matrix."""
    return weight.destination() if isinstance(weight, BlockMatrix) else weight


def count_block_weights(model: nn.Module) -> int:
    """Return the number of weights of a model that are in block types."""
    matrices = [module for module in model.modules() if isinstance(module, BlockMatrix)]
    return sum(outputs * inputs for matrix in matrices for outputs, inputs in matrix.shapes)
