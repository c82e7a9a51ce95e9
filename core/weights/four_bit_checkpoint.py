"""Checkpoints with 4 bits per weight, in the layouts of AWQ and of GPTQ, as weights in block types.

A matrix is stored as `qweight`, int32 with eight integers of 4 bits each; `qzeros`, the integers that stand for zero,
and `scales`, and both hold for a group of inputs; and for GPTQ `g_idx`, the group of each input. A block type
holds the same integers: Q4_0 if all zeros are 8, else Q4_1, whose minimum is the scale times the zero in float16.
Matrices whose groups are not in the order of their inputs have no such type, and are rounded to Q8_0.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from vllm_mp.core.weights.checkpoint import CheckpointMismatchError
from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockWeight, quantize_blocks
from vllm_mp.model_config.quantization import FourBits

_BLOCK: Final = 32
_AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, among eight, of each 4 bits of an integer of AWQ, beginning with the lowest bits."""


def unpacked(tensors: Iterable[tuple[str, Tensor]], four_bits: FourBits) -> Iterator[tuple[str, Tensor | BlockWeight]]:
    """Yield `tensors`, with one matrix in a block type instead of the tensors that store a quantized matrix.

    Raises CheckpointMismatchError, naming the tensor, for one that is missing or whose shape or dtype is wrong.
    """
    wanted = {"qweight", "qzeros", "scales"} | ({"g_idx"} if four_bits.is_reordered else set())
    pending: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, _, kind = name.rpartition(".")
        if kind in wanted:
            parts = pending.setdefault(module, {})
            parts[kind] = tensor
            if parts.keys() == wanted:
                yield f"{module}.weight", _block_weight(module, pending.pop(module), four_bits)
        elif kind != "g_idx":
            yield name, tensor
    for module, parts in pending.items():
        raise CheckpointMismatchError(f"missing {module}.{min(wanted - parts.keys())}")


def _block_weight(module: str, parts: dict[str, Tensor], four_bits: FourBits) -> BlockWeight:
    """Return the matrix that `parts` store."""
    is_awq = four_bits.method == "awq"
    packed = parts["qweight"]
    _check(module, "qweight", packed, torch.int32, None)
    inputs, outputs = (packed.shape[0], 8 * packed.shape[1]) if is_awq else (8 * packed.shape[0], packed.shape[1])
    group = four_bits.group_size or inputs
    if inputs % group or group % _BLOCK:
        raise CheckpointMismatchError(
            f"{module}.qweight has {inputs} inputs, which groups of {group} do not divide; groups must be multiples of "
            f"{_BLOCK} that divide the inputs"
        )
    groups = inputs // group
    _check(module, "qzeros", parts["qzeros"], torch.int32, [groups, outputs // 8])
    _check(module, "scales", parts["scales"], None, [groups, outputs])
    if is_awq:
        integers, zeros = (_fields(parts[kind], _AWQ_ORDER) for kind in ("qweight", "qzeros"))
    else:
        integers = _fields(packed.t().contiguous()).t()
        zeros = _fields(parts["qzeros"])[:, :outputs] + four_bits.zero_offset
    scales = parts["scales"].float()
    if not scales.half().isfinite().all():
        raise CheckpointMismatchError(f"{module}.scales has values that are not finite in float16")
    if four_bits.is_reordered:
        _check(module, "g_idx", parts["g_idx"], torch.int32, [inputs])
        group_of = parts["g_idx"].long()
        if not (int(group_of.min()) >= 0 and int(group_of.max()) < groups):
            raise CheckpointMismatchError(f"{module}.g_idx names a group outside of the {groups} that there are")
        if not torch.equal(group_of, torch.arange(inputs) // group):
            weight = (integers - zeros[group_of]) * scales[group_of]
            return quantize_blocks(weight.t().contiguous(), BLOCK_TYPES["Q8_0"])
    return _four_bit_blocks(integers.t(), zeros.t(), scales.t(), group)


def _check(module: str, kind: str, tensor: Tensor, dtype: torch.dtype | None, shape: list[int] | None) -> None:
    """Raise CheckpointMismatchError unless a tensor has `dtype` (None: a float) and `shape` (None: two dimensions)."""
    has_dtype = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not has_dtype:
        raise CheckpointMismatchError(f"{module}.{kind} has dtype {tensor.dtype}, not {dtype or 'a float'}")
    if tensor.dim() != 2 if shape is None else list(tensor.shape) != shape:
        raise CheckpointMismatchError(
            f"{module}.{kind} has shape {list(tensor.shape)}, not {shape or 'two dimensions'}"
        )


def _fields(packed: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return the 4-bit integers of `packed` [rows, n], int16 [rows, 8 * n]; of eight, the i-th goes to `order[i]`."""
    out = torch.empty(*packed.shape, 8, dtype=torch.int16)
    for i, column in enumerate(order):
        out[:, :, column] = packed >> 4 * i & 15
    return out.flatten(1)


def _four_bit_blocks(integers: Tensor, zeros: Tensor, scales: Tensor, group: int) -> BlockWeight:
    """Return blocks with these `integers` [outputs, inputs], and `zeros` and `scales` [outputs, groups]."""
    outputs, inputs = integers.shape
    blocks = integers.reshape(outputs, -1, 2, _BLOCK // 2).to(torch.uint8)
    is_symmetric = bool((zeros == 8).all())
    fields = [scales] if is_symmetric else [scales, -scales * zeros]
    stored = torch.stack(fields, 2).repeat_interleave(group // _BLOCK, 1).half().view(torch.uint8)
    data = torch.cat((stored, blocks[:, :, 0] | blocks[:, :, 1] << 4), 2).flatten(1)
    return BlockWeight(data, BLOCK_TYPES["Q4_0" if is_symmetric else "Q4_1"], inputs)
