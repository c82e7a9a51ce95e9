"""LoRA adapters packed for the C++ kernels."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mp.kernels.adapter_stack import Factors
from vllm_mp.kernels.cpu.library import CAdapterStack, Library

_RANK_UNIT = 2
"""Ranks are padded to multiples of this, because two elements of bfloat16 are multiplied at once."""


class PackedAdapterStack:
    """A and B of the adapters of one projection, in slots, in the order in which csrc/lora.h reads them."""

    def __init__(
        self,
        library: Library,
        inputs: int,
        part_sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        *,
        is_pair: bool = False,
    ) -> None:
        """Allocate; `part_sizes` has the number of outputs of each part, and `is_pair` is as in `PackedLinear`."""
        width = library.panel_columns // 2
        self._width = width
        self._unit = 4 // dtype.itemsize
        max_rank = _padded(max_rank, _RANK_UNIT)
        self._columns = _columns(part_sizes, width, is_pair)
        part_of = torch.repeat_interleave(torch.arange(len(part_sizes)), torch.tensor(part_sizes))
        parts = part_of[self._columns].view(-1, width)
        # A vector of columns that belong to several parts takes the ranks of all of them.
        self._span = int((parts.amax(1) - parts.amin(1)).max()) + 1
        first_parts = parts.amin(1).clamp(max=len(part_sizes) - self._span)
        self._parts_of_vectors = first_parts.unsqueeze(1) + torch.arange(self._span)
        self._first_parts = first_parts.int()
        self._ranks = torch.zeros(num_slots, dtype=torch.int32)
        panels = -(-len(part_sizes) * max_rank // width)
        self._a = torch.zeros((num_slots, panels, inputs // self._unit, width, self._unit), dtype=dtype)
        shape_b = (len(first_parts), num_slots, self._span * max_rank // self._unit, width, self._unit)
        self._b = torch.zeros(shape_b, dtype=dtype)
        self._part_sizes = list(part_sizes)
        self.interface = CAdapterStack(
            self._a.data_ptr(),
            self._b.data_ptr(),
            self._ranks.data_ptr(),
            self._first_parts.data_ptr(),
            num_slots,
            max_rank,
            len(part_sizes),
            self._span,
            inputs,
        )
        self.pointer = ctypes.pointer(self.interface)

    def load(self, slot: int, parts: Sequence[Factors | None]) -> None:
        """Replace what `slot` holds with the factors of each part; None leaves the part as it is in the model."""
        rank = _padded(max((len(factors.a) for factors in parts if factors is not None), default=0), _RANK_UNIT)
        self._ranks[slot] = rank
        if not rank:
            return
        inputs, dtype = self.interface.inputs, self._a.dtype
        all_a = torch.zeros((_padded(len(parts) * rank, self._width), inputs), dtype=dtype)
        all_b = torch.zeros((sum(self._part_sizes), len(parts), rank), dtype=dtype)
        for part, (factors, of_b) in enumerate(zip(parts, torch.split(all_b, self._part_sizes), strict=True)):
            if factors is not None:
                own_rank = len(factors.a)
                all_a[part * rank : part * rank + own_rank] = factors.a
                of_b[:, part, :own_rank] = factors.b
        of_slot = all_a.view(-1, self._width, inputs // self._unit, self._unit).transpose(1, 2)
        self._a[slot, : len(of_slot)] = of_slot
        vectors = all_b[self._columns].view(-1, self._width, len(parts), rank).transpose(1, 2)
        spanned = vectors[torch.arange(len(vectors)).unsqueeze(1), self._parts_of_vectors]  # [.., span, width, rank]
        panels = spanned.reshape(*spanned.shape[:3], -1, self._unit).transpose(2, 3).flatten(1, 2)
        self._b[:, slot, : panels.shape[1]] = panels


def _columns(part_sizes: Sequence[int], width: int, is_pair: bool) -> Tensor:
    """Return the output in each column of the product's panels; columns that only fill a panel repeat the last."""
    outputs = torch.arange(sum(part_sizes))
    if not is_pair:
        return _filled(outputs, 2 * width)
    gate, up = (_filled(half, width).view(-1, width) for half in outputs.chunk(2))
    return torch.stack((gate, up), 1).flatten()


def _filled(outputs: Tensor, unit: int) -> Tensor:
    return torch.cat((outputs, outputs[-1:].expand(-len(outputs) % unit)))


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit
