"""Attention in both directions, compared with naive arithmetic."""

import pytest
import torch

from vllm_mp.kernels import ops

ROWS = (3, 1, 17, 8, 1)


def naive(q, k, v, scale):
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).float()


@pytest.mark.parametrize("rows", [ROWS, (5,), (1, 1, 1)])
def test_each_token_sees_its_whole_row_and_nothing_else(rows):
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(rows), 3, 8) for _ in range(3))
    got = ops.encoder_attention(q, k, v, rows, 0.3)
    parts = zip(*(whole.split(list(rows)) for whole in (q, k, v)), strict=True)
    torch.testing.assert_close(got, torch.cat([naive(*part, 0.3) for part in parts]), atol=1e-5, rtol=1e-4)


def test_nan_stays_in_its_row():
    torch.manual_seed(0)
    qkv = torch.randn(3, sum(ROWS), 3, 8)
    clean = ops.encoder_attention(*qkv, ROWS, 0.3)
    qkv[:, 4:21] = float("nan")
    got = ops.encoder_attention(*qkv, ROWS, 0.3)
    assert got[4:21].isnan().all()
    others = [*range(4), *range(21, sum(ROWS))]
    assert torch.equal(got[others], clean[others])
