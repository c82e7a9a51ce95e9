"""Triton's operations on the columns of a step compared with their definitions, in the interpreter or on a GPU.

Attention over columns that pad a step, as a graph reads them, is compared with attention over the step itself.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.covering import covering, extended
from support.paged_batch import MIXED, PagedBatch
from support.triton_sweep import DEVICE, assert_near, at, attend_by_reference, operations, reference
from support.triton_sweep import short_parts as short_parts
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.step_columns import StepColumns
from vllm_mp.kernels.triton import launch

LATEST = torch.where(torch.arange(300) % 7 == 3, -1, torch.arange(1000, 1300))
"""The tokens that were sampled last; some rows got none."""


def columns(num_tokens: int, num_rows: int, width: int, seed: int, *, slots: bool) -> StepColumns:
    """Return random columns of a step; some of its tokens are awaited."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, shape, generator=chance).to(dtype)

    return StepColumns(
        drawn(-len(LATEST), 900, num_tokens, dtype=torch.int64),
        drawn(0, 5000, num_tokens, dtype=torch.int64),
        drawn(2**40, 2**41, num_tokens, dtype=torch.int64),
        drawn(1, 5000, num_rows + 1),
        drawn(1, 5000, num_rows),
        drawn(1, 2**30, num_rows, width),
        drawn(-1, 4, num_tokens) if slots else None,
        drawn(1, 5000, 2),
    )


@pytest.mark.parametrize("num_tokens", [1, 64, 150])
def test_awaited_ids_become_the_tokens_that_were_sampled_last_or_0(num_tokens: int) -> None:
    ids = columns(num_tokens, 1, 1, seed=0, slots=False).input_ids
    found, latest = at(DEVICE, ids.clone(), LATEST)
    operations.fill_awaited(found, latest)
    expected = [max(0, int(LATEST[-1 - token])) if token < 0 else token for token in ids.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "rows", "width", "all_tokens", "all_rows", "max_blocks", "slots", "awaits"),
    covering(
        [(1, 1, 1, 1, 1, 1), (3, 3, 5, 8, 8, 70), (70, 4, 66, 130, 9, 66), (100, 90, 3, 100, 90, 200)],
        [True, False],
        [True, False],
    ),
)
def test_copied_step_agrees_with_the_reference(
    tokens: int, rows: int, width: int, all_tokens: int, all_rows: int, max_blocks: int, slots: bool, awaits: bool
) -> None:
    step = columns(tokens, rows, width, seed=1, slots=slots)
    if not awaits:
        step = step._replace(input_ids=step.input_ids.clamp(min=0))
    latest = LATEST if awaits else None
    # The buffers keep what an earlier step wrote.
    expected = columns(all_tokens, all_rows, max_blocks, seed=2, slots=True)
    found = StepColumns(*at(DEVICE, *(None if column is None else column.clone() for column in expected)))
    num_decodes = rows // 2
    reference.copy_step(step, expected, num_decodes, latest)
    operations.copy_step(*at(DEVICE, step, found, num_decodes, latest))
    for name, got, wanted in zip(StepColumns._fields, found, expected, strict=True):
        assert torch.equal(got.cpu(), wanted), name


def test_step_without_adapters_is_copied_to_buffers_without_slots() -> None:
    step = columns(5, 2, 3, seed=1, slots=True)
    buffers: Any = columns(8, 4, 3, seed=2, slots=False)
    found = StepColumns(*at(DEVICE, *buffers))
    operations.copy_step(*at(DEVICE, step, found), 2)
    assert torch.equal(found.seq_lens.cpu(), torch.cat((step.seq_lens, torch.zeros(2, dtype=torch.int32))))


class _OnDeviceOnly(list[int]):
    """Lengths that a graph does not know."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("attention reads lengths on the host")

    __len__ = __iter__ = __getitem__  # type: ignore[assignment]


def padded_for_a_graph(metadata: AttentionMetadata, tokens: int, rows: int) -> AttentionMetadata:
    """Return `metadata` with padding up to `tokens` and `rows`, as the graph of such a shape has it."""
    num_tokens, (num_rows, width) = len(metadata.cell_mapping), metadata.block_table.shape
    starts = torch.full((rows + 1 - len(metadata.query_start),), num_tokens, dtype=torch.int32)
    nothing = torch.zeros(rows - num_rows, dtype=torch.int32)
    return AttentionMetadata(
        query_start=torch.cat((metadata.query_start, starts)),
        seq_lens=torch.cat((metadata.seq_lens, nothing)),
        block_table=torch.cat((metadata.block_table, torch.full((rows - num_rows, width), 10**6, dtype=torch.int32))),
        cell_mapping=torch.cat((metadata.cell_mapping, torch.zeros(tokens - num_tokens, dtype=torch.int64))),
        query_lens=_OnDeviceOnly(),
        host_seq_lens=_OnDeviceOnly(),
        num_decodes=0,
        max_seq_len=4096,
        isolates=True,
        row_counts=torch.tensor([metadata.num_decodes, num_rows], dtype=torch.int32),
    )


def attend_padded(batch: PagedBatch, tokens: int, rows: int, splits: int | None, *options: Any) -> Tensor:
    """Return the attention of the tokens of `batch`, computed with padding whose queries are NaN."""
    padding = torch.full((tokens - len(batch.q), *batch.q.shape[1:]), torch.nan)
    metadata = padded_for_a_graph(batch.metadata, tokens, rows)._replace(decode_splits=splits)
    inputs = at(DEVICE, torch.cat((batch.q, padding)), batch.k_cache, batch.v_cache, metadata)
    return operations.paged_attention(*inputs, *options)[: len(batch.q)]


@pytest.mark.parametrize(
    ("steps", "padding", "splits", "window"),
    covering(
        [MIXED, [(1, 40), (1, 90), (1, 3)], [(5, 5), (40, 60)], [(1, 33), (33, 33), (1, 1), (2, 9)]],
        [((0, 0),), ((1, 0),), ((20, 3),)],
        [(1, None), (4, 20), (None, None)],
        rest_is_extended=True,
    ),
    ids=str,
)
def test_attention_of_a_graph_learns_on_the_device_which_rows_are_decodes(
    steps: Any, padding: Any, splits: int | None, window: int | None
) -> None:
    batch = PagedBatch(steps, 6, 2, 32, 16)
    num_decodes = next((i for i, (queries, _) in enumerate(steps) if queries > 1), len(steps))
    batch.metadata = batch.metadata._replace(num_decodes=num_decodes)  # the first row of a prompt is no decode
    tokens, rows = (size + more for size, more in zip((len(batch.q), len(steps)), padding, strict=True))
    got = attend_padded(batch, tokens, rows, splits, 0.125, window)
    assert_near(got, attend_by_reference(batch, 0.125, window), torch.float32)


def test_decode_beside_prefills_has_the_same_bits_in_a_graph() -> None:
    """The kernel for prefills, which would come to other bits, leaves decodes out."""
    batch = PagedBatch([(1, 40), (1, 90), (1, 17), (20, 33)], 2, 1, 32, 16)
    metadata = batch.metadata._replace(decode_splits=4, max_seq_len=4096)
    inputs = at(DEVICE, batch.q, batch.k_cache, batch.v_cache)
    launched = operations.paged_attention(*inputs, *at(DEVICE, metadata), 0.125)
    as_prefills = operations.paged_attention(*inputs, *at(DEVICE, metadata._replace(num_decodes=0)), 0.125)
    assert not torch.equal(as_prefills[:3], launched[:3])
    assert torch.equal(attend_padded(batch, len(batch.q) + 3, 6, 4, 0.125), launched)


@pytest.mark.parametrize(
    ("steps", "splits"),
    [([(1, 20), (1, 3), (2, 9), (18, 22)], None), ([(50, 55)], None), *extended(([(1, 20), (1, 9)], 1))],
)
def test_attention_of_a_graph_has_the_same_bits_however_many_programs_share_its_work(
    monkeypatch: pytest.MonkeyPatch, steps: Any, splits: int | None
) -> None:
    batch = PagedBatch(steps, 2, 2, 16, 16)
    num_decodes = sum(queries == 1 for queries, _ in steps)
    batch.metadata = batch.metadata._replace(num_decodes=num_decodes)
    table = launch.table(torch.empty(0, device=DEVICE).device)
    found = []
    for count in (1, 10_000):
        monkeypatch.setitem(table, "looping", dict.fromkeys(table["looping"], count))
        found.append(attend_padded(batch, len(batch.q) + 20, len(steps) + 7, splits, 0.125))
    assert torch.equal(*found)
    assert_near(found[0], attend_by_reference(batch, 0.125, None), torch.float32)


def test_empty_replay_of_a_graph_ends() -> None:
    """A capture runs over buffers that hold no row."""
    batch = PagedBatch([(1, 9), (20, 20)], 4, 2, 32, 16)
    nothing = torch.zeros(2, dtype=torch.int32)
    metadata = padded_for_a_graph(batch.metadata, 64, 8)
    metadata = metadata._replace(
        row_counts=nothing,
        seq_lens=torch.zeros_like(metadata.seq_lens),
        query_start=torch.zeros_like(metadata.query_start),
    )
    q = torch.zeros(64, *batch.q.shape[1:])
    operations.paged_attention(*at(DEVICE, q, batch.k_cache, batch.v_cache, metadata, 0.125))


def test_nan_reaches_in_a_graph_only_the_queries_that_see_it() -> None:
    batch = PagedBatch([(1, 40), (1, 20), (40, 60), (9, 9)], 4, 2, 32, 16)
    for row, position in ((1, 12), (2, 25), (3, 4)):
        batch.values[row][position, 1, 5] = torch.nan
        cells = batch.v_cache[batch.metadata.block_table[row, position // 16], position % 16]
        cells.copy_(batch.values[row][position])
    expected = batch.expected(0.125, None, None)
    finite = expected.isfinite().all(-1)
    assert not finite.all()
    got = attend_padded(batch, len(batch.q) + 10, 6, None, 0.125).cpu()
    assert torch.equal(got.isfinite().all(-1), finite)
    assert_near(got[finite], expected[finite], torch.float32)
