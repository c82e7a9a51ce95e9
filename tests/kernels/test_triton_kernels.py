"""The Triton kernels in Triton's interpreter, on the CPU."""

import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.paged_batch import PagedBatch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs them on a GPU")

from support.product_sweep import *  # noqa: E402, F403
from support.triton_sweep import *  # noqa: E402, F403
from support.triton_sweep import assert_near, attend, attend_by_reference  # noqa: E402

FEW_EXAMPLES = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def _steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    decodes = [(1, draw(st.integers(1, 60))) for _ in range(draw(st.integers(0, 3)))]
    chunks = [draw(st.tuples(st.integers(2, 40), st.integers(0, 40))) for _ in range(draw(st.integers(0, 4)))]
    return [*decodes, *((queries, queries + before) for queries, before in chunks)] or [(1, 1)]


@pytest.mark.extended
@FEW_EXAMPLES
@given(
    rows=_steps(),
    heads=st.sampled_from([(2, 2), (3, 1), (6, 2), (10, 2)]),
    block_size=st.sampled_from([1, 4, 16, 24]),
    window=st.sampled_from([None, 1, 5, 33]),
)
def test_attention_of_any_step(rows: Any, heads: tuple[int, int], block_size: int, window: int | None) -> None:
    batch = PagedBatch(rows, *heads, 16, block_size)
    expected = attend_by_reference(batch, 0.25, window)
    assert_near(attend(batch, torch.float32, 0.25, window), expected, torch.float32)
