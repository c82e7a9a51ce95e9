"""Weights in block types as the C++ kernels read them, and the products with them."""

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.library import (
    DTYPES,
    CBlockLinear,
    CBlockPart,
    CBlockStrip,
    Library,
    address,
)
from vllm_mp.kernels.cpu.packed import Arena
from vllm_mp.kernels.cpu.product import Product

logger = logging.getLogger(__name__)

IN_PLACE_VARIABLE: Final = "VLLM_MP_BLOCKS_IN_PLACE"
"""Environment variable: 1: all matrices are read where they lie."""
_LONGEST_COPIED_ROW = 1152
"""Bytes of a row up to which a matrix is copied that stays in memory too. Longer rows take much memory twice."""
_MAX_EMBEDDED_BY_ONE = 2**20
"""Number of elements of embeddings up to which one thread makes them, in a millisecond or two: threads that other
programs keep from their processors would be waited for much longer."""


class BlockLinear(Product):
    """`x @ weight.T + bias`, with weights in block types.

    The weight consists of the rows of the parts, which may have different types. They are rewritten in strips, in the
    order in which they are read. Where memory is short, and for long rows that stay in memory anyway, they are read
    where they lie, which is slower and has the same results.

    Rows of `x` are quantized to 8 bits with a scale for each 32 inputs, which adds an error of about 0.6 % to each
    product (relative, root mean square, for normally distributed values). Results are batch-invariant, unless
    `library.is_batch_invariant` is False. Then, where the processor has tiles, 24 rows or more in bfloat16 are
    multiplied with weights that are rounded to bfloat16, which is faster.
    """

    _PREFIX = "block_"

    def __init__(
        self,
        library: Library,
        parts: Sequence[BlockWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_pair: bool = False,
        is_kept: bool = False,
        is_of_experts: bool = False,
        arena: Arena | None = None,
    ) -> None:
        """Keep or rewrite `parts`, which `can_read` must allow; copy `bias` [outputs]. Rows and results have `dtype`.

        With `is_pair`, the rows are those of two matrices of the same size, which the kernels take in pairs; only
        `interface` can be used then. `is_kept`: the caller keeps `parts` too. `is_of_experts`: the matrix is multiplied
        together with experts, whose rows are always quantized. Strips lie in `arena` if it is given.
        """
        inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
        halves = 2 if is_pair else 1
        width = library.panel_columns // halves
        panels = -(-outputs // (halves * width))
        self._library = library
        self._is_pair = is_pair
        self._dtype = dtype
        self._outputs = outputs
        self._bias = None
        if bias is not None:
            padded = torch.zeros(halves, panels * width)
            padded[:, : outputs // halves] = bias.view(halves, -1)
            self._bias = padded.view(halves, panels, width).transpose(0, 1).contiguous()
        c_parts = (CBlockPart * len(parts))(*map(_c_part, parts))
        is_batch_invariant = int(library.is_batch_invariant or is_of_experts)
        self.interface = CBlockLinear(
            c_parts, len(parts), address(self._bias), inputs, outputs, int(is_pair), None, is_batch_invariant
        )
        self._pointer = ctypes.byref(self.interface)
        self._kept: tuple[Any, ...] = (parts, c_parts)
        """Owners of memory that `interface` points to."""
        arena = arena or Arena()
        is_twice = is_kept and any(part.release is None for part in parts)
        is_long = any(part.data.shape[1] > _LONGEST_COPIED_ROW for part in parts)
        in_place = (is_twice and is_long) or os.environ.get(IN_PLACE_VARIABLE) == "1"
        num_bytes = 0 if in_place else library.strip_bytes(self._pointer)
        if num_bytes and not arena.has_room(num_bytes):
            _say_that_memory_is_short()
        elif num_bytes:
            memory = arena.empty(num_bytes, torch.uint8)
            strips = (CBlockStrip * (2 * panels))()
            library.write_strips(self._pointer, memory.data_ptr(), strips, torch.get_num_threads())
            self.interface.parts, self.interface.num_parts, self.interface.strips = None, 0, strips
            self._kept = (memory, strips)
            for part in parts:
                if part.release is not None:
                    part.release()


@functools.cache
def _say_that_memory_is_short() -> None:
    """Log it once for all matrices."""
    logger.info(
        "weights in block types are read where they lie, which is slower for several rows: a copy would leave less "
        "than a quarter of the memory free"
    )


def embedding(library: Library, weight: BlockWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.block_embedding`; `weight` and `dtype` are such as `can_read` allows."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, weight.inputs, dtype=dtype)
    prepare_embedding(library, weight, ids, out)()
    return out


def prepare_embedding(library: Library, weight: BlockWeight, ids: Tensor, out: Tensor) -> Callable[[], None]:
    """Return a call that writes `embedding` of what is then in `ids` to `out`; both are contiguous and outlive it."""
    return functools.partial(
        library.function("block_embedding", out.dtype),
        ctypes.byref(_c_part(weight)),
        weight.inputs,
        ids.data_ptr(),
        ids.numel(),
        out.data_ptr(),
        1 if out.numel() <= _MAX_EMBEDDED_BY_ONE else torch.get_num_threads(),
    )


def can_read(weights: Sequence[BlockWeight], dtype: torch.dtype) -> bool:
    """Tell whether the kernels compute with `weights` and rows of `dtype`: on the CPU, in a supported dtype."""
    return dtype in DTYPES and all(weight.data.device.type == "cpu" for weight in weights)


def _c_part(weight: BlockWeight) -> CBlockPart:
    return CBlockPart(weight.data.data_ptr(), weight.outputs, weight.type.ggml_type, weight.data.shape[1])
