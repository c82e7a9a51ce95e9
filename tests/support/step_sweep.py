"""Triton's operations on the columns of a step compared with their definitions, in the interpreter or on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from support.triton_sweep import DEVICE, at, operations, reference
from vllm_mp.kernels.step_columns import StepColumns

LATEST = torch.arange(1000, 1300)
"""By row of the batch."""


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
    )


@pytest.mark.parametrize("num_tokens", [1, 64, 150])
def test_awaited_ids_become_the_latest_tokens_of_their_rows(num_tokens: int) -> None:
    ids = columns(num_tokens, 1, 1, seed=0, slots=False).input_ids
    found, latest = at(DEVICE, ids.clone(), LATEST)
    operations.fill_awaited(found, latest)
    expected = [int(LATEST[-1 - token]) if token < 0 else token for token in ids.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize("awaits", [True, False])
@pytest.mark.parametrize("slots", [True, False])
@pytest.mark.parametrize(
    ("tokens", "rows", "width", "all_tokens", "all_rows", "max_blocks"),
    [(1, 1, 1, 1, 1, 1), (3, 3, 5, 8, 8, 70), (70, 4, 66, 130, 9, 66), (100, 90, 3, 100, 90, 200)],
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
    reference.copy_step(step, expected, latest)
    operations.copy_step(*at(DEVICE, step, found, latest))
    for name, got, wanted in zip(StepColumns._fields, found, expected, strict=True):
        assert torch.equal(got.cpu(), wanted), name


def test_step_without_adapters_is_copied_to_buffers_without_slots() -> None:
    step = columns(5, 2, 3, seed=1, slots=True)
    buffers: Any = columns(8, 4, 3, seed=2, slots=False)
    found = StepColumns(*at(DEVICE, *buffers))
    operations.copy_step(*at(DEVICE, step, found), None)
    assert torch.equal(found.seq_lens.cpu(), torch.cat((step.seq_lens, torch.zeros(2, dtype=torch.int32))))
