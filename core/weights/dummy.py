"""Random weights, for measurements and tests that need no checkpoint."""

import zlib
from typing import Final

import torch
from torch import Tensor, nn

from vllm_mp.core.weights.block_matrix import BlockMatrix
from vllm_mp.kernels.reference import FLOAT8, FLOAT8_MAX

# A prime, so that the repeats of the dummy sequence never line up with the rows of a matrix.
DUMMY_PERIOD: Final = 1_048_573
DUMMY_STD: Final = 0.02


@torch.no_grad()
def fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Fill `model` with random weights of standard deviation 0.02, and its norms with 1.

    The weights depend on `seed` and the model alone. All 8-bit weights share one scale. Ranks of a group draw each
    parameter from its name, so that those that every rank holds are equal on all of them.
    """
    is_shard = getattr(getattr(model, "arch", None), "shard", None) is not None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DUMMY_PERIOD, generator=generator) * DUMMY_STD
    float8_scale = float(drawn.abs().max()) / FLOAT8_MAX
    sequences: dict[torch.dtype, Tensor] = {}
    at = 0

    def fill(tensor: Tensor) -> None:
        nonlocal at
        if tensor.dtype not in sequences:
            sequences[tensor.dtype] = (drawn / float8_scale if tensor.dtype == FLOAT8 else drawn).to(tensor)
        sequence = sequences[tensor.dtype]
        # A fresh draw for each weight would take a minute per billion, so one sequence repeats.
        flat = tensor.view(-1)
        filled = 0
        while filled < flat.numel():
            count = min(DUMMY_PERIOD - at, flat.numel() - filled)
            flat[filled : filled + count] = sequence[at : at + count]
            filled += count
            at = (at + count) % DUMMY_PERIOD

    for name, parameter in model.named_parameters():
        if is_shard:
            at = zlib.crc32(name.encode()) % DUMMY_PERIOD
        if name.endswith(".weight_scale"):
            parameter.fill_(float8_scale)
        elif parameter.dim() == 1 and not name.endswith("bias"):
            parameter.fill_(1.0)
        else:
            fill(parameter)
    for module in model.modules():
        if isinstance(module, BlockMatrix):
            for part, shape in enumerate(module.shapes):
                weight = torch.empty(shape)
                fill(weight)
                module.store(part, weight)
