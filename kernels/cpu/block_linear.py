"""Weights in block types as the C++ kernels read them, and the products with them."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.adapter_stack import PackedAdapterStack
from vllm_mp.kernels.cpu.library import DTYPES, CBlockLinear, CBlockPart, CTokenMasks, Library, address
from vllm_mp.kernels.sampling import TokenMasks


class BlockLinear:
    """`x @ weight.T + bias`, with weights in block types that are read where they lie.

    The rows of the weight are those of the parts, which may have different types. Rows of `x` are quantized to 8 bits
    with a scale for each 32 inputs, which adds an error of about 0.6 % to each product (relative, root mean square, for
    normally distributed values). Results are batch-invariant.
    """

    def __init__(
        self,
        library: Library,
        parts: Sequence[BlockWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        is_pair: bool = False,
    ) -> None:
        """Keep `parts`, which `can_read` must allow, and copy `bias` [outputs]; rows and results have `dtype`.

        With `is_pair`, the rows are those of two matrices of the same size, which the kernels take in pairs; only
        `interface` can be used then.
        """
        inputs, outputs = parts[0].inputs, sum(part.outputs for part in parts)
        width = library.panel_columns // 2 if is_pair else library.panel_columns
        self._library = library
        self._parts = parts
        self._is_pair = is_pair
        self._dtype = dtype
        self._outputs = outputs
        self._bias = None
        if bias is not None:
            halves = bias.float().view(2 if is_pair else 1, -1)
            panels = -(-halves.shape[1] // width)
            padded = torch.zeros(len(halves), panels * width)
            padded[:, : halves.shape[1]] = halves
            self._bias = padded.view(len(halves), panels, width).transpose(0, 1).contiguous()
        self._c_parts = (CBlockPart * len(parts))(*map(_c_part, parts))
        self.interface = CBlockLinear(
            self._c_parts, len(parts), address(self._bias), inputs, self._outputs, int(is_pair)
        )
        self._pointer = ctypes.byref(self.interface)

    def __call__(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        adapters: PackedAdapterStack | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Return [..., outputs] for `x` [..., inputs]; see `PackedLinear.__call__`."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((flat.shape[0], self._outputs), dtype=dtype or self._dtype)
        name = "block_linear" if out.dtype == self._dtype else "block_logits"
        arguments = [self._pointer, flat.data_ptr(), flat.shape[0], out.data_ptr(), torch.get_num_threads()]
        if name == "block_linear":
            added = None if adapters is None or adapter_slots is None else adapters.pointer
            arguments += [added, address(adapter_slots)]
        self._library.function(name, self._dtype)(*arguments)
        return out.view(*x.shape[:-1], self._outputs)

    def adapter_stack(self, part_sizes: Sequence[int], num_slots: int, max_rank: int) -> PackedAdapterStack:
        """Return memory for adapters of these weights; `part_sizes` has the number of outputs of each part."""
        return PackedAdapterStack(
            self._library, self.interface.inputs, part_sizes, num_slots, max_rank, self._dtype, is_pair=self._is_pair
        )

    def argmax(self, x: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Return `ops.masked_argmax` of the float32 outputs for `x` [rows, inputs], without storing them."""
        x = x.contiguous()
        places = torch.empty(x.shape[0], dtype=torch.int64)
        self._library.function("block_argmax", self._dtype)(
            self._pointer,
            x.data_ptr(),
            x.shape[0],
            places.data_ptr(),
            CTokenMasks.pointer(masks),
            torch.get_num_threads(),
        )
        return places


def embedding(library: Library, weight: BlockWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See `ops.block_embedding`; `weight` and `dtype` are such as `can_read` allows."""
    ids = ids.contiguous()
    out = torch.empty(*ids.shape, weight.inputs, dtype=dtype)
    library.function("block_embedding", dtype)(
        ctypes.byref(_c_part(weight)),
        weight.inputs,
        ids.data_ptr(),
        ids.numel(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def can_read(weights: Sequence[BlockWeight], dtype: torch.dtype) -> bool:
    """Tell whether the kernels compute with `weights` and rows of `dtype`: on the CPU, in a supported dtype."""
    return dtype in DTYPES and all(weight.data.device.type == "cpu" for weight in weights)


def _c_part(weight: BlockWeight) -> CBlockPart:
    return CBlockPart(weight.data.data_ptr(), weight.outputs, weight.type.ggml_type, weight.data.shape[1])
