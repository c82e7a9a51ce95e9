"""What products with weights of all forms have in common: the calls of the C++ kernels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.adapter_stack import PackedAdapterStack
from vllm_mp.kernels.cpu.library import CTokenMasks, Library, address
from vllm_mp.kernels.sampling import TokenMasks


class Product:
    """`x @ weight.T + bias`. A subclass has the weights, and sets all attributes below.

    The prepared calls read and write tensors that are contiguous and must outlive them.
    """

    _PREFIX: ClassVar[str]
    """What the names of the kernels for this form of the weights begin with."""
    interface: Any
    """The weights as the kernels read them."""
    _library: Library
    _pointer: Any
    """A reference to `interface`."""
    _dtype: torch.dtype
    """Of rows, and of results that are not logits."""
    _outputs: int
    _is_pair: bool

    def __call__(
        self,
        x: Tensor,
        dtype: torch.dtype | None = None,
        adapters: PackedAdapterStack | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Return [..., outputs] for `x` [..., inputs], in the dtype of the original weights or in `dtype` float32.

        With `adapters` and `adapter_slots`, int32 for each row of `x`, the rows get what `ops.add_adapters` adds,
        before they are rounded; `dtype` must be None then.
        """
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty((flat.shape[0], self._outputs), dtype=dtype or self._dtype)
        added = None if adapters is None or adapter_slots is None else adapters.pointer
        self.prepare(flat, out, added, address(adapter_slots))()
        return out.view(*x.shape[:-1], self._outputs)

    def adapter_stack(self, part_sizes: Sequence[int], num_slots: int, max_rank: int) -> PackedAdapterStack:
        """Return memory for adapters of these weights; `part_sizes` has the number of outputs of each part."""
        return PackedAdapterStack(
            self._library, self.interface.inputs, part_sizes, num_slots, max_rank, self._dtype, is_pair=self._is_pair
        )

    def argmax(self, x: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Return `ops.masked_argmax` of the float32 outputs for `x` [rows, inputs], without storing them."""
        x = x.contiguous()
        indices = torch.empty(x.shape[0], dtype=torch.int64)
        self.prepare_argmax(x, indices, masks)()
        return indices

    def prepare_argmax(self, x: Tensor, indices: Tensor, masks: TokenMasks | None = None) -> Callable[[], None]:
        """Return a call that writes `argmax` of what is then in `x` to `indices`, int64 [rows]."""
        return functools.partial(
            self._library.function(self._PREFIX + "argmax", self._dtype),
            self._pointer,
            x.data_ptr(),
            x.shape[0],
            indices.data_ptr(),
            CTokenMasks.pointer(masks),
            torch.get_num_threads(),
        )

    def prepare(self, x: Tensor, out: Tensor, added: Any = None, adapter_slots: Any = None) -> Callable[[], None]:
        """Return a call that writes the outputs for what is then in `x` [rows, inputs] to `out` [rows, outputs].

        `out` has the dtype of `x` or is float32. `added` points to the adapters that `adapter_slots` of rows choose.
        """
        is_logits = out.dtype != self._dtype
        return functools.partial(
            self._library.function(self._PREFIX + ("logits" if is_logits else "linear"), self._dtype),
            self._pointer,
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            torch.get_num_threads(),
            *(() if is_logits else (added, adapter_slots)),
        )
