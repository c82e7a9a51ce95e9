"""The operations on the columns of a step in Triton's interpreter, and their definition on an example."""

import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs them on a GPU")

from support.step_sweep import *  # noqa: E402, F403

from vllm_mp.kernels import reference  # noqa: E402
from vllm_mp.kernels.step_columns import StepColumns  # noqa: E402


def test_copied_step_is_padded_with_tokens_and_rows_that_read_and_change_nothing():
    def ints(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype)

    step = StepColumns(
        input_ids=ints(-3, 7, 8, dtype=torch.int64),
        positions=ints(5, 0, 1, dtype=torch.int64),
        cell_mapping=ints(21, 40, 41, dtype=torch.int64),
        query_start=ints(0, 1, 3),
        seq_lens=ints(6, 2),
        block_table=ints((4, 5), (10, 0)),
        adapter_slots=ints(-1, 2, 2),
    )
    nines = (torch.full(shape, 9, dtype=dtype) for shape, dtype in (((5,), torch.int64),) * 3)
    rows = (torch.full(shape, 9, dtype=torch.int32) for shape in ((5,), (4,), (4, 3), (5,), (2,)))
    buffers = StepColumns(*nines, *rows)
    reference.copy_step(step, buffers, 1, torch.tensor([100, 101, 102]))
    assert buffers.input_ids.tolist() == [102, 7, 8, 9, 9]
    assert buffers.positions.tolist() == [5, 0, 1, 9, 9]
    assert buffers.cell_mapping.tolist() == [21, 40, 41, 0, 0]
    assert buffers.query_start.tolist() == [0, 1, 3, 3, 3]
    assert buffers.seq_lens.tolist() == [6, 2, 0, 0]
    assert buffers.row_counts.tolist() == [1, 2]
    assert buffers.block_table.tolist() == [[4, 5, 9], [10, 0, 9], [9, 9, 9], [9, 9, 9]]
    assert buffers.adapter_slots.tolist() == [-1, 2, 2, -1, -1]
