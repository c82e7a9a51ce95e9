"""Steps over a paged KV cache, laid out by hand, for tests and measurements of attention."""

import itertools
from collections.abc import Sequence

import torch

from vllm_mp.kernels.attention_metadata import AttentionMetadata


def paged_metadata(
    rows: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, device: torch.device | str
) -> AttentionMetadata:
    """Return the metadata of a step from the (query tokens, context) and the blocks of each row.

    Rows with one query token come first. Shorter tables are filled up with block 0.
    """
    width = max(map(len, tables))
    cells = [
        table[position // block_size] * block_size + position % block_size
        for (queries, context), table in zip(rows, tables, strict=True)
        for position in range(context - queries, context)
    ]
    ends = itertools.accumulate(queries for queries, _ in rows)
    return AttentionMetadata(
        query_start=torch.tensor([0, *ends], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([context for _, context in rows], dtype=torch.int32, device=device),
        block_table=torch.tensor(
            [[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32, device=device
        ),
        cell_mapping=torch.tensor(cells, device=device),
        query_lens=[queries for queries, _ in rows],
        host_seq_lens=[context for _, context in rows],
        num_decodes=sum(queries == 1 for queries, _ in rows),
        max_seq_len=max(context for _, context in rows),
    )


def scattered_step(
    rows: Sequence[tuple[int, int]], block_size: int, device: torch.device | str
) -> tuple[AttentionMetadata, int]:
    """Return `paged_metadata` with blocks scattered at random over a cache, and the number of blocks of that cache."""
    num_blocks = [-(-context // block_size) for _, context in rows]
    shuffled = iter(torch.randperm(sum(num_blocks)).tolist())
    tables = [list(itertools.islice(shuffled, count)) for count in num_blocks]
    return paged_metadata(rows, tables, block_size, device), sum(num_blocks)
