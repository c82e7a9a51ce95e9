"""Random steps over a scattered paged cache, with their expected attention."""

import itertools

import torch
from torch import Tensor

from vllm_mp.kernels import reference
from vllm_mp.testing.attention_steps import paged_metadata

# (query tokens, context) of each row, single-token rows first.
DECODES_EVEN = [(1, 9), (1, 9), (1, 9)]
DECODES_RAGGED = [(1, 1), (1, 70), (1, 3), (1, 17), (1, 16)]
PREFILLS = [(5, 5), (20, 33), (16, 16)]
MIXED = [(1, 40), (1, 2), (7, 7), (3, 50)]
WITH_IMAGES = [(1, 40), (70, 70), (90, 130), (12, 12), (1000, 1100)]
IMAGES = {1: [(3, 20), (20, 21), (30, 65)], 2: [(10, 45), (100, 130)], 4: [(480, 700)]}
"""The images in rows of `WITH_IMAGES`: (first position, end) of each. One had begun before the step."""


class PagedBatch:
    """Rows with random contexts, scattered over the blocks of a cache that is otherwise NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        value_dim: int | None = None,
        images: dict[int, list[tuple[int, int]]] | None = None,
    ) -> None:
        """`images` are (first position, end) of runs of tokens that see one another, by row."""
        generator = torch.Generator().manual_seed(0)
        value_dim = value_dim or head_dim
        self.rows = rows
        blocks_per_row = [-(-context // block_size) for _, context in rows]
        num_blocks = sum(blocks_per_row) + 3
        shuffled = iter(torch.randperm(num_blocks, generator=generator).tolist())
        tables = [list(itertools.islice(shuffled, count)) for count in blocks_per_row]
        width = max(blocks_per_row) + 1
        self.q = torch.randn(sum(q for q, _ in rows), heads, head_dim, generator=generator)
        self.keys = [torch.randn(context, kv_heads, head_dim, generator=generator) for _, context in rows]
        self.values = [torch.randn(context, kv_heads, value_dim, generator=generator) for _, context in rows]
        self.k_cache = torch.full((num_blocks, block_size, kv_heads, head_dim), float("nan"))
        self.v_cache = torch.full((num_blocks, block_size, kv_heads, value_dim), float("nan"))
        # Entries past a row's blocks lie far beyond the cache.
        padded_tables = [table + [10**6] * (width - len(table)) for table in tables]
        self.metadata = paged_metadata(rows, padded_tables, block_size, "cpu")
        self._ends = [[*range(1, context + 1)] for _, context in rows]
        for row, runs in (images or {}).items():
            for first, end in runs:
                self._ends[row][first:end] = [end] * (end - first)
        if images is not None:
            of_queries = [ends[-count:] for (count, _), ends in zip(rows, self._ends, strict=True)]
            ends = torch.tensor([*itertools.chain(*of_queries)], dtype=torch.int32)
            self.metadata = self.metadata._replace(attention_ends=ends)
        whole_rows = [(context, context) for _, context in rows]
        cells = paged_metadata(whole_rows, tables, block_size, "cpu").cell_mapping.split([n for n, _ in whole_rows])
        for row_cells, k, v in zip(cells, self.keys, self.values, strict=True):
            reference.write_kv(k, v, self.k_cache, self.v_cache, row_cells)

    def round_to(self, dtype: torch.dtype) -> None:
        """Round every value to `dtype`, kept as float32."""
        self.q, self.k_cache, self.v_cache = (x.to(dtype).float() for x in (self.q, self.k_cache, self.v_cache))

    def expected(self, scale: float, window: int | None, soft_cap: float | None) -> Tensor:
        """Return the attention, computed one query and one head at a time."""
        out = []
        queries = iter(self.q)
        for (count, context), k, v, ends in zip(self.rows, self.keys, self.values, self._ends, strict=True):
            for position in range(context - count, context):
                q = next(queries)
                first = max(0, position - window + 1) if window else 0
                end = ends[position]
                for_heads = []
                for head in range(q.shape[0]):
                    shared = head // (q.shape[0] // k.shape[1])
                    scores = k[first:end, shared] @ q[head] * scale
                    if soft_cap:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    for_heads.append(torch.softmax(scores, 0) @ v[first:end, shared])
                out.append(torch.stack(for_heads))
        return torch.stack(out)
