"""Steps for measuring paged attention, with blocks scattered over the cache."""

import itertools
from collections.abc import Sequence

import torch

from vllm_mp.kernels.attention_metadata import AttentionMetadata

BLOCK_SIZE = 16


def scattered_step(rows: Sequence[tuple[int, int]], device: torch.device) -> tuple[AttentionMetadata, int]:
    """Return a step of rows (query tokens, context), single-token rows first, and the number of blocks of its cache."""
    blocks = [-(-context // BLOCK_SIZE) for _, context in rows]
    table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    scattered = torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)
    for row, own in zip(table, scattered, strict=True):
        row[: len(own)] = own
    starts = [0, *itertools.accumulate(queries for queries, _ in rows)]
    metadata = AttentionMetadata(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32, device=device),
        block_table=table.to(device),
        cell_mapping=torch.zeros(starts[-1], dtype=torch.int64, device=device),
        query_lens=[queries for queries, _ in rows],
        host_seq_lens=[context for _, context in rows],
        num_decodes=sum(queries == 1 for queries, _ in rows),
        max_seq_len=max(context for _, context in rows),
    )
    return metadata, sum(blocks)
