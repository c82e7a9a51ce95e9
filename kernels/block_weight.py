"""Weights in the block types of GGUF files: their layout, and their definition in torch.

A row of a matrix is a sequence of blocks. A block holds small integers for 32 or 256 inputs that lie side by side, and
the scales, and for some types the minima, that restore them: `weight = scale * integer - minimum` for each group of 16
or 32 integers. The layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor


class BlockType(NamedTuple):
    """A layout of blocks: `weights` weights in `num_bytes` bytes; `ggml_type` is its number in files."""

    name: str
    weights: int
    num_bytes: int
    ggml_type: int


BLOCK_TYPES: Final = {
    name: BlockType(name, *layout)
    for name, layout in {
        "Q4_0": (32, 18, 2),
        "Q4_1": (32, 20, 3),
        "Q5_0": (32, 22, 6),
        "Q5_1": (32, 24, 7),
        "Q8_0": (32, 34, 8),
        "Q2_K": (256, 84, 10),
        "Q3_K": (256, 110, 11),
        "Q4_K": (256, 144, 12),
        "Q5_K": (256, 176, 13),
        "Q6_K": (256, 210, 14),
        "IQ4_NL": (32, 18, 20),
        "IQ4_XS": (256, 136, 23),
    }.items()
}
"""The block types that products compute with, by name."""

IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The integers that the 4-bit codes of IQ4_NL and IQ4_XS stand for."""

_CHUNK_BLOCKS: Final = 2**20
"""About as many weights are converted at once, so that temporary tensors stay small."""
_NUM_CANDIDATES: Final = 8
"""The scales that `quantize_blocks` tries for a group."""


@dataclass(frozen=True)
class BlockWeight:
    """A matrix [outputs, inputs] in a block type.

    `data` uint8 [outputs, bytes of a row], contiguous; it may lie in a mapped file and is never written.
    """

    data: Tensor
    type: BlockType
    inputs: int
    release: Callable[[], None] | None = None
    """Lets the system take back the memory of `data`, which can be read again; None: it lies in no mapped file."""

    def __post_init__(self) -> None:
        """Raise ValueError if `data` has another shape or dtype than `type` and `inputs` require."""
        blocks, rest = divmod(self.inputs, self.type.weights)
        if rest or self.inputs <= 0:
            raise ValueError(
                f"a row of {self.inputs} inputs cannot be stored as {self.type.name}; "
                f"give a positive multiple of {self.type.weights}"
            )
        row_bytes = blocks * self.type.num_bytes
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.shape[1] != row_bytes:
            raise ValueError(
                f"{self.inputs} inputs in {self.type.name} need torch.uint8 [outputs, {row_bytes}], "
                f"not {self.data.dtype} {list(self.data.shape)}"
            )
        if not self.data.is_contiguous():
            raise ValueError(f"the rows of a {self.type.name} matrix must lie one after the other; call contiguous()")

    @property
    def outputs(self) -> int:
        """The number of rows of the matrix."""
        return len(self.data)

    def dequantized(self) -> Tensor:
        """Return the weights as float32 [outputs, inputs], to the bit as the package `gguf` does."""
        blocks = self.data.view(-1, self.type.num_bytes)
        out = torch.empty(len(blocks), self.type.weights, device=self.data.device)
        step = max(1, _CHUNK_BLOCKS // self.type.weights)
        for first in range(0, len(blocks), step):
            scales, minima, integers = _UNPACK[self.type.name](blocks[first : first + step])
            groups = integers.view(*scales.shape, -1).float() * scales.unsqueeze(2)
            if minima is not None:
                groups -= minima.unsqueeze(2)
            out[first : first + step] = groups.flatten(1)
        return out.view(self.outputs, self.inputs)


def quantize_blocks(weight: Tensor, type: BlockType) -> BlockWeight:
    """Return `weight` [outputs, inputs], finite and of any float dtype, rounded to a block type of `QUANTIZABLE`.

    Several scales are tried for each group, and the scale with the least squared error is taken. Raises ValueError for
    another type, or if the inputs are no multiple of the weights in a block.
    """
    quantize = _QUANTIZE.get(type.name)
    if quantize is None:
        raise ValueError(f"{type.name}: weights cannot be rounded to this type; give one of {', '.join(QUANTIZABLE)}")
    outputs, inputs = weight.shape
    if inputs % type.weights:
        raise ValueError(f"{type.name} needs a multiple of {type.weights} inputs, not {inputs}")
    blocks = weight.reshape(-1, type.weights)
    data = torch.empty(len(blocks), type.num_bytes, dtype=torch.uint8, device=weight.device)
    step = max(1, _CHUNK_BLOCKS // type.weights)
    for first in range(0, len(blocks), step):
        data[first : first + step] = quantize(blocks[first : first + step].float())
    return BlockWeight(data.view(outputs, -1), type, inputs)


Unpacked = tuple[Tensor, Tensor | None, Tensor]
"""Scales and minima, float32 [blocks, groups], and the integers [blocks, weights] of one block after the other."""


def _fields(packed: Tensor, run: int, bits: int) -> Tensor:
    """Return the fields of `bits` bits of bytes [blocks, n] as int16 [blocks, n * 8 / bits].

    `run` bytes hold the lowest fields of `run` consecutive weights, then the next fields of the next `run` weights.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    fields = packed.reshape(len(packed), -1, 1, run) >> shifts & (1 << bits) - 1
    return fields.flatten(1).short()


def _bytes_of_fields(fields: Tensor, run: int, bits: int) -> Tensor:
    """Do the reverse of `_fields`."""
    parts = fields.to(torch.uint8).view(len(fields), -1, 8 // bits, run)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=fields.device).view(1, 1, -1, 1)
    return (parts << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _float16(stored: Tensor) -> Tensor:
    """Return float32 [blocks, n] of bytes [blocks, 2 * n]."""
    return stored.contiguous().view(torch.float16).float()


def _bytes_of_float16(values: Tensor) -> Tensor:
    return values.clamp(-65504, 65504).half().contiguous().view(torch.uint8)


def _unpack_q4_0(blocks: Tensor) -> Unpacked:
    return _float16(blocks[:, :2]), None, _fields(blocks[:, 2:], 16, 4) - 8


def _unpack_q4_1(blocks: Tensor) -> Unpacked:
    return _float16(blocks[:, :2]), -_float16(blocks[:, 2:4]), _fields(blocks[:, 4:], 16, 4)


def _unpack_q5_0(blocks: Tensor) -> Unpacked:
    integers = _fields(blocks[:, 6:], 16, 4) + 16 * _fields(blocks[:, 2:6], 1, 1)
    return _float16(blocks[:, :2]), None, integers - 16


def _unpack_q5_1(blocks: Tensor) -> Unpacked:
    integers = _fields(blocks[:, 8:], 16, 4) + 16 * _fields(blocks[:, 4:8], 1, 1)
    return _float16(blocks[:, :2]), -_float16(blocks[:, 2:4]), integers


def _unpack_q8_0(blocks: Tensor) -> Unpacked:
    return _float16(blocks[:, :2]), None, blocks[:, 2:].contiguous().view(torch.int8).short()


def _unpack_q2_k(blocks: Tensor) -> Unpacked:
    d, minimum = torch.split(_float16(blocks[:, 80:]), 1, 1)
    return d * (blocks[:, :16] & 15), minimum * (blocks[:, :16] >> 4), _fields(blocks[:, 16:80], 32, 2)


def _unpack_q3_k(blocks: Tensor) -> Unpacked:
    scales = _fields(blocks[:, 96:104], 8, 4) + 16 * _fields(blocks[:, 104:108], 4, 2) - 32
    integers = _fields(blocks[:, 32:96], 32, 2) + 4 * _fields(blocks[:, :32], 32, 1) - 4
    return _float16(blocks[:, 108:]) * scales, None, integers


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and the eight minima of 6 bits that 12 bytes hold."""
    low, minimum, high = torch.split(packed, 4, 1)
    return (
        torch.cat((low & 63, high & 15 | low >> 2 & 48), 1),
        torch.cat((minimum & 63, high >> 4 | minimum >> 2 & 48), 1),
    )


def _bytes_of_k_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Do the reverse of `_k_scales`."""
    (low, high), (low_minima, high_minima) = torch.split(scales, 4, 1), torch.split(minima, 4, 1)
    return torch.cat(
        (low | (high >> 4) << 6, low_minima | (high_minima >> 4) << 6, high & 15 | (high_minima & 15) << 4), 1
    )


def _unpack_q4_k(blocks: Tensor) -> Unpacked:
    d, minimum = torch.split(_float16(blocks[:, :4]), 1, 1)
    scales, minima = _k_scales(blocks[:, 4:16])
    return d * scales, minimum * minima, _fields(blocks[:, 16:], 32, 4)


def _unpack_q5_k(blocks: Tensor) -> Unpacked:
    d, minimum = torch.split(_float16(blocks[:, :4]), 1, 1)
    scales, minima = _k_scales(blocks[:, 4:16])
    return d * scales, minimum * minima, _fields(blocks[:, 48:], 32, 4) + 16 * _fields(blocks[:, 16:48], 32, 1)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    integers = _fields(blocks[:, :128], 64, 4) + 16 * _fields(blocks[:, 128:192], 32, 2) - 32
    return _float16(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8), None, integers


def _iq4_values(codes: Tensor) -> Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int16, device=codes.device)[codes.int()]


def _unpack_iq4_nl(blocks: Tensor) -> Unpacked:
    return _float16(blocks[:, :2]), None, _iq4_values(_fields(blocks[:, 2:], 16, 4))


def _unpack_iq4_xs(blocks: Tensor) -> Unpacked:
    scales = _fields(blocks[:, 4:8], 1, 4) + 16 * _fields(blocks[:, 2:4], 1, 2) - 32
    return _float16(blocks[:, :2]) * scales, None, _iq4_values(_fields(blocks[:, 8:], 16, 4))


_UNPACK: Final[dict[str, Callable[[Tensor], Unpacked]]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
    "IQ4_NL": _unpack_iq4_nl,
    "IQ4_XS": _unpack_iq4_xs,
}


def _divided(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0, a / torch.where(b == 0, 1, b))


def _integers(x: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    """Return x [blocks, groups, n] in units of `scales` [blocks, groups], rounded."""
    return _divided(x, scales.unsqueeze(2)).round_().clamp_(lowest, highest)


def _scales(x: Tensor, highest: int) -> Tensor:
    """Return the scales [blocks, groups] with the least error for integers from -highest - 1 to highest."""
    extreme = x.gather(2, x.abs().argmax(2, keepdim=True)).squeeze(2)
    squares = x.square().sum(2)
    best, most_explained = torch.zeros_like(extreme), torch.full_like(extreme, -1)
    for steps in torch.linspace(highest - 0.5, highest + 1.5, _NUM_CANDIDATES).tolist():
        integers = _integers(x, extreme / -steps, -highest - 1, highest)
        products, norms = (x * integers).sum(2), integers.square().sum(2)
        explained = _divided(products.square(), norms)  # the squared error is `squares - explained` for the best scale
        is_better = explained > most_explained
        best = torch.where(is_better, _divided(products, norms), best)
        most_explained = torch.where(is_better, explained, most_explained)
    return torch.where(squares == 0, 0, best)


def _scales_and_minima(x: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return scales and minima [blocks, groups] with about the least error for integers from 0 to `highest`."""
    count = x.shape[2]
    low, mean = x.amin(2), x.mean(2)
    span = x.amax(2) - low
    best, minima, least = _divided(span, torch.tensor(highest)), -low, torch.full_like(low, torch.inf)
    for steps in torch.linspace(highest - 1.0, highest + 0.5, _NUM_CANDIDATES).tolist():
        integers = _integers(x - low.unsqueeze(2), span / steps, 0, highest)
        average = integers.mean(2)
        covariance = (x * integers).sum(2) - count * mean * average
        scales = _divided(covariance, integers.square().sum(2) - count * average.square())
        offsets = scales * average - mean
        error = (integers * scales.unsqueeze(2) - offsets.unsqueeze(2) - x).square().sum(2)
        is_better = error < least
        best, minima, least = (
            torch.where(is_better, new, old) for new, old in ((scales, best), (offsets, minima), (error, least))
        )
    return best, minima


def _quantize_q4_0(x: Tensor) -> Tensor:
    scales = _float16(_bytes_of_float16(_scales(x.unsqueeze(1), 7)))
    integers = _integers(x.unsqueeze(1), scales, -8, 7).flatten(1)
    return torch.cat((_bytes_of_float16(scales), _bytes_of_fields(integers + 8, 16, 4)), 1)


def _quantize_q5_0(x: Tensor) -> Tensor:
    scales = _float16(_bytes_of_float16(_scales(x.unsqueeze(1), 15)))
    integers = (_integers(x.unsqueeze(1), scales, -16, 15).flatten(1) + 16).to(torch.uint8)
    parts = (_bytes_of_float16(scales), _bytes_of_fields(integers >> 4, 1, 1), _bytes_of_fields(integers & 15, 16, 4))
    return torch.cat(parts, 1)


def _with_minimum(x: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return the stored scale and minimum, uint8 [blocks, 4], and the integers uint8 [blocks, n], of single groups."""
    scales, minima = _scales_and_minima(x.unsqueeze(1), highest)
    stored = _bytes_of_float16(torch.cat((scales, -minima), 1))
    scale, minimum = torch.split(_float16(stored), 1, 1)
    return stored, _integers((x - minimum).unsqueeze(1), scale, 0, highest).flatten(1).to(torch.uint8)


def _quantize_q4_1(x: Tensor) -> Tensor:
    stored, integers = _with_minimum(x, 15)
    return torch.cat((stored, _bytes_of_fields(integers, 16, 4)), 1)


def _quantize_q5_1(x: Tensor) -> Tensor:
    stored, integers = _with_minimum(x, 31)
    return torch.cat((stored, _bytes_of_fields(integers >> 4, 1, 1), _bytes_of_fields(integers & 15, 16, 4)), 1)


def _quantize_q8_0(x: Tensor) -> Tensor:
    scales = _float16(_bytes_of_float16(x.abs().amax(1, keepdim=True) / 127))
    integers = _integers(x.unsqueeze(1), scales, -128, 127).flatten(1)
    return torch.cat((_bytes_of_float16(scales), integers.to(torch.int8).view(torch.uint8)), 1)


def _with_k_scales(x: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Return the first 16 bytes of Q4_K or Q5_K, and the integers uint8 [blocks, 256]."""
    groups = x.view(len(x), 8, 32)
    scales, minima = _scales_and_minima(torch.cat((groups, groups.new_zeros(len(x), 8, 1)), 2), highest)
    minima = minima.clamp_(min=0)
    stored = _bytes_of_float16(torch.cat([some.amax(1, keepdim=True) / 63 for some in (scales, minima)], 1))
    d, minimum = torch.split(_float16(stored), 1, 1)
    scales = _divided(scales, d).round_().clamp_(0, 63)
    minima = _divided(minima, minimum).round_().clamp_(0, 63)
    integers = _integers(groups + (minimum * minima).unsqueeze(2), d * scales, 0, highest).flatten(1).to(torch.uint8)
    packed = _bytes_of_k_scales(scales.to(torch.uint8), minima.to(torch.uint8))
    return torch.cat((stored, packed), 1), integers


def _quantize_q4_k(x: Tensor) -> Tensor:
    stored, integers = _with_k_scales(x, 15)
    return torch.cat((stored, _bytes_of_fields(integers, 32, 4)), 1)


def _quantize_q5_k(x: Tensor) -> Tensor:
    stored, integers = _with_k_scales(x, 31)
    return torch.cat((stored, _bytes_of_fields(integers >> 4, 32, 1), _bytes_of_fields(integers & 15, 32, 4)), 1)


def _quantize_q6_k(x: Tensor) -> Tensor:
    groups = x.view(len(x), 16, 16)
    scales = _scales(groups, 31)
    extreme = scales.gather(1, scales.abs().argmax(1, keepdim=True))
    d = _float16(_bytes_of_float16(extreme / -128))
    units = _divided(scales, d).round_().clamp_(-128, 127)
    integers = (_integers(groups, d * units, -32, 31).flatten(1) + 32).to(torch.uint8)
    parts = (
        _bytes_of_fields(integers & 15, 64, 4),
        _bytes_of_fields(integers >> 4, 32, 2),
        units.to(torch.int8).view(torch.uint8),
        _bytes_of_float16(d),
    )
    return torch.cat(parts, 1)


_QUANTIZE: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Q4_0": _quantize_q4_0,
    "Q4_1": _quantize_q4_1,
    "Q5_0": _quantize_q5_0,
    "Q5_1": _quantize_q5_1,
    "Q8_0": _quantize_q8_0,
    "Q4_K": _quantize_q4_k,
    "Q5_K": _quantize_q5_k,
    "Q6_K": _quantize_q6_k,
}

QUANTIZABLE: Final = tuple(_QUANTIZE)
"""The names of the types to which `quantize_blocks` rounds."""
