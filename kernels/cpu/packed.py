"""Weights packed for the C++ kernels, and the products with them."""

import ctypes
from typing import Final

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.library import DTYPES, CLinear, Library, address
from vllm_mp.kernels.cpu.packed_forms import PackedForm, next_form, note_form
from vllm_mp.kernels.cpu.product import Product
from vllm_mp.machine.host_memory import host_memory

MAX_INT8_INPUTS: Final = 65_536
"""With more inputs, a sum of 8-bit products may overflow 32 bits."""
_STRETCH_BYTES: Final = 64 * 2**20
_ALIGNMENT: Final = 64


class Arena:
    """Memory for many tensors with the same lifetime, in stretches so long that most of it lies in huge pages.

    The system provides huge pages if torch asks for them; the environment of a core makes torch ask.
    """

    def __init__(self) -> None:
        self._stretch = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a quarter of the memory, or of a container's, stays free with `num_bytes` more."""
        if self._used + num_bytes <= len(self._stretch):
            return True
        memory = host_memory()
        total = memory.total if memory.group_limit is None else min(memory.total, memory.group_limit)
        return memory.available - max(num_bytes, _STRETCH_BYTES) >= total // 4

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor [size]."""
        num_bytes = size * dtype.itemsize
        if self._used + num_bytes > len(self._stretch):
            self._stretch = torch.empty(max(num_bytes, _STRETCH_BYTES), dtype=torch.uint8)
            self._used = 0
        taken = self._stretch[self._used : self._used + num_bytes].view(dtype)
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return taken


class PackedLinear(Product):
    """`x @ weight.T + bias`, with the weights stored in the order in which a product reads them.

    Results are batch-invariant. 8-bit weights have a scale for each output. The rows that they are multiplied with are
    quantized to 8 bits with a scale for each row. Both are rotated first (csrc/linear.h).
    """

    _PREFIX = ""

    def __init__(
        self,
        library: Library,
        weight: Tensor,
        bias: Tensor | None,
        quantization: str | None = None,
        *,
        is_pair: bool = False,
        arena: Arena | None = None,
    ) -> None:
        """Copy `weight` [outputs, inputs], which `can_pack` must allow, and `bias` [outputs] or None.

        `quantization="int8"` needs a number of inputs that four divides; other weights keep their dtype. With
        `is_pair`, `weight` holds two matrices of the same size, one after the other, whose columns the kernels take
        in pairs; only `interface` can be used then. The packed weights lie in `arena` if it is given. In a block of
        `packed_forms.reuse_forms` they are taken over, and the elements of `weight` are not read.
        """
        outputs, inputs = weight.shape
        parts = 2 if is_pair else 1
        panel_part = library.panel_columns // parts
        panels = -(-outputs // (parts * panel_part))
        columns = panels * library.panel_columns
        is_int8 = quantization == "int8" and inputs % 4 == 0 and inputs <= MAX_INT8_INPUTS
        self._library = library
        self._is_pair = is_pair
        self._dtype = weight.dtype
        dtype = torch.int8 if is_int8 else weight.dtype
        form = next_form(columns * inputs, dtype, columns if is_int8 else 0)
        if form is None:
            empty = torch.empty if arena is None else arena.empty
            form = PackedForm(
                empty(columns * inputs, dtype=dtype),
                torch.empty(columns, dtype=torch.float32) if is_int8 else None,
                torch.empty(columns, dtype=torch.int32) if is_int8 else None,
            )
            source = weight.contiguous()
            library.function("pack", weight.dtype)(
                source.data_ptr(),
                outputs,
                inputs,
                is_pair,
                *map(address, form),
                torch.get_num_threads(),
            )
            note_form(weight, form)
        self._weight, self._scales, self._sums = form
        self._bias = None
        if bias is not None:
            padded = bias.new_zeros(parts, panels * panel_part)
            padded[:, : outputs // parts] = bias.view(parts, -1)
            self._bias = padded.view(parts, panels, panel_part).transpose(0, 1).contiguous()
        self._outputs = columns if is_pair else outputs
        self.interface = CLinear(
            self._weight.data_ptr(),
            address(self._bias),
            address(self._scales),
            address(self._sums),
            inputs,
            self._outputs,
        )
        self._pointer = ctypes.byref(self.interface)


def can_pack(weight: Tensor) -> bool:
    """Tell whether the kernels take a matrix [outputs, inputs]: on the CPU, of a supported dtype, with even inputs."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] % 2 == 0
