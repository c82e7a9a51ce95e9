"""Cosines and sines of rotary position embeddings, with the context extensions that checkpoints use.

The arithmetic is float32, in the order of transformers, so that the tables agree to the bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mp.model_config.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int, max_position: int) -> Tensor:
    """Return the radians per token of each rotated pair: float32 [rotary_dim / 2], on the CPU.

    LongRoPE's frequencies depend on `max_position`, the length of the context in tokens.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.type == "longrope":
        factors = rope.long_factor if max_position > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponents)
    base = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return base / rope.factor
    if rope.type == "llama3":
        return _llama3(rope, base)
    if rope.type == "yarn":
        return _yarn(rope, dim)
    return base


def cos_sin_cache(
    ropes: Sequence[Rope], head_dim: int, max_position: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the tables for `ops.rotary`: [ropes, max_position, rotary_dim], cosines of each frequency, then sines."""
    frequencies = [inverse_frequencies(rope, head_dim, max_position) for rope in ropes]
    half = len(frequencies[0])
    tables = torch.empty(len(ropes), max_position, 2 * half, dtype=dtype, device=device)
    if tables.is_meta:
        return tables  # torch imports its compilers to compute there, which takes a second
    positions = torch.arange(max_position, dtype=torch.float32, device=device)
    for table, rope, of_rope in zip(tables, ropes, frequencies, strict=True):
        angles = torch.outer(positions, of_rope.to(device))
        table[:, :half] = angles.cos().mul_(rope.attention_factor)
        table[:, half:] = angles.sin().mul_(rope.attention_factor)
    return tables


def cos_sin_of_sections(cos_sin: Tensor, positions: Tensor, sections: Sequence[int]) -> Tensor:
    """Return the table for `ops.rotary` of tokens with several positions: [1, num_tokens, rotary_dim] (M-RoPE).

    `cos_sin` [1, max_position, rotary_dim] is that of `cos_sin_cache`. Section i, the next `sections[i]` frequencies,
    rotates by `positions[i]`, int64 [num_sections, num_tokens].
    """
    halves = cos_sin[0].view(cos_sin.shape[1], 2, -1)
    parts = torch.split(halves, list(sections), -1)
    return torch.cat([part[at] for part, at in zip(parts, positions, strict=True)], -1).flatten(1)[None]


def _llama3(rope: Rope, base: Tensor) -> Tensor:
    """Scale as Llama 3.1 does: divide slow frequencies by the factor, keep fast ones, interpolate between."""
    context = rope.original_max_position
    wavelength = 2 * math.pi / base
    scaled = torch.where(wavelength > context / rope.low_freq_factor, base / rope.factor, base)
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelength >= context / rope.high_freq_factor) & (wavelength <= context / rope.low_freq_factor)
    return torch.where(between, smoothed, scaled)


def _yarn(rope: Rope, head_dim: int) -> Tensor:
    """Scale by YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, with a linear ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # keeps the slope of the ramp finite
    periods = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept
