"""Models run by hand over a scattered paged cache."""

import random
from typing import Any

import torch
from torch import Tensor

from vllm_mp.testing.attention_steps import paged_metadata


@torch.inference_mode()
def run_in_chunks(
    model: Any,
    prompts: list[list[int]],
    block_size: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the logits of every token of every prompt, from steps that advance prompts by random numbers of tokens."""
    chance = random.Random(0)
    blocks_per_row = -(-max(map(len, prompts)) // block_size)
    blocks = list(range(blocks_per_row * len(prompts) + 2))
    chance.shuffle(blocks)
    tables = [blocks[row * blocks_per_row : (row + 1) * blocks_per_row] for row in range(len(prompts))]

    def cache(shape: tuple[int, int]) -> Tensor:
        # Cells that no row wrote are NaN, so that reading them shows.
        return torch.full((len(blocks), block_size, *shape), float("nan"), dtype=dtype, device=device)

    caches = [(cache(keys), cache(values)) for keys, values in model.kv_shapes]
    done = [0] * len(prompts)
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
        step = [
            (row, min(chance.choice([1, 1, 2, 7, 30]), len(prompt) - done[row]))
            for row, prompt in enumerate(prompts)
            if done[row] < len(prompt) and chance.random() < 0.8
        ]
        if not step:
            continue
        step.sort(key=lambda item: item[1] > 1)
        metadata = paged_metadata(
            [(count, done[row] + count) for row, count in step], [tables[row] for row, _ in step], block_size, device
        )
        positions = [done[row] + i for row, count in step for i in range(count)]
        ids = [prompts[row][done[row] + i] for row, count in step for i in range(count)]
        hidden = model.forward(
            torch.tensor(ids, device=device), torch.tensor(positions, device=device), caches, metadata
        )
        parts = model.compute_logits(hidden).split(metadata.query_lens)
        for (row, count), part in zip(step, parts, strict=True):
            logits[row].append(part)
            done[row] += count
    return [torch.cat(parts) for parts in logits]
