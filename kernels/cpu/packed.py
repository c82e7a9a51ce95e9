"""Weights packed for the C++ kernels, and the products with them."""

import ctypes

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.library import DTYPES, CLinear, Library


class PackedLinear:
    """`x @ weight.T + bias`; the weights are kept in the order in which a product reads them.

    A row's result does not depend on the other rows.
    """

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, *, is_pair: bool = False) -> None:
        """`weight` [outputs, inputs] and `bias` [outputs] or None, as `can_pack` allows; both are copied.

        `is_pair`: two matrices of the same size, one after the other, of which the kernels take the same columns
        together; only `interface` is of use then.
        """
        outputs, inputs = weight.shape
        width = library.panel_columns
        if is_pair:
            half = outputs // 2
            columns = -(-half // (width // 2)) * width
            if bias is not None:
                padded = torch.zeros(2, columns // 2, dtype=bias.dtype)
                padded[:, :half] = bias.view(2, half)
                bias = padded.view(2, -1, width // 2).transpose(0, 1)
            outputs = columns
        else:
            columns = -(-outputs // width) * width
        self._library = library
        self._dtype = weight.dtype
        self._weight = torch.empty(columns * inputs, dtype=weight.dtype)
        self._bias = None if bias is None else bias.clone(memory_format=torch.contiguous_format)
        weight = weight.contiguous()
        library.function("pack", weight.dtype)(
            weight.data_ptr(), weight.shape[0], inputs, is_pair, self._weight.data_ptr(), torch.get_num_threads()
        )
        self.interface = CLinear(
            self._weight.data_ptr(), None if self._bias is None else self._bias.data_ptr(), inputs, outputs
        )
        self._pointer = ctypes.byref(self.interface)
        self._outputs = outputs

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[..., inputs] to [..., outputs], in the dtype of the weights or in float32."""
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((flat.shape[0], self._outputs), dtype=dtype or self._dtype)
        name = "linear" if out.dtype == self._dtype else "logits"
        self._library.function(name, self._dtype)(
            self._pointer, flat.data_ptr(), flat.shape[0], out.data_ptr(), torch.get_num_threads()
        )
        return out.view(*x.shape[:-1], self._outputs)


def can_pack(weight: Tensor) -> bool:
    """Whether the kernels take a matrix [outputs, inputs]: on the CPU, of their types, and with an even row."""
    return weight.device.type == "cpu" and weight.dtype in DTYPES and weight.shape[1] % 2 == 0
