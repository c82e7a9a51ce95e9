"""Triton's products compared with their definitions: 16-bit and 8-bit weights, quantized rows, adapters.

The tests run in the interpreter or on a GPU.
"""

import pytest
import torch
from torch import Tensor

from support.covering import by_turns, covering, extended
from support.triton_sweep import DEVICE, DTYPES, ERRORS, FLOAT8_HERE, INTERPRETED, SWEPT, as_bits, assert_near, at
from vllm_mp.kernels import reference
from vllm_mp.kernels.triton import launch, operations


def fp8_weights(outputs: int, inputs: int, block_rows: int) -> tuple[Tensor, Tensor]:
    """Return 8-bit weights and their scales: for each output, or for `block_rows` outputs and 128 inputs."""
    groups = -(-inputs // 128) if block_rows else 1
    weight = reference.to_float8(100 * torch.randn(outputs, inputs))
    return weight, torch.rand(outputs // (block_rows or 1), groups) + 0.5


@FLOAT8_HERE
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "block_rows"),
    [
        *((1, 40, 128, 0), (1, 256, 384, 128), (5, 96, 300, 32)),
        *extended((3, 33, 70, 0), (17, 64, 300, 0), (19, 7, 130, 1)),
    ],
)
def test_8_bit_products_agree_with_the_reference(rows: int, outputs: int, inputs: int, block_rows: int) -> None:
    x, bias = torch.randn(rows, inputs).to(SWEPT), torch.randn(outputs).to(SWEPT)
    weight, scale = fp8_weights(outputs, inputs, block_rows)
    for with_bias in (None, bias):
        got = operations.linear(*at(DEVICE, x, weight, with_bias, scale))
        assert got.dtype == SWEPT
        quantized = reference.QuantizedRows(*operations.quantize_rows(x.to(DEVICE), scale.shape[1]), x.dtype)
        assert torch.equal(operations.linear(quantized, *at(DEVICE, weight, with_bias, scale)), got)
        expected = reference.linear(x.float(), weight, with_bias, scale)
        # The rows are quantized as by the reference, so only sums and the result in 16 bits are rounded otherwise.
        error = (got.cpu().float() - expected).norm() / expected.norm()
        assert error < (1e-5 if INTERPRETED else 5e-3)


CUTS = {
    "by default": {},
    "narrow tiles": {"OUTPUT_TILE": 16, "PARTS": 1},
    "parts": {"OUTPUT_TILE": 32, "PARTS": 3},
    "more parts than steps": {"OUTPUT_TILE": 32, "PARTS": 40},
}
"""Options of products of few rows."""


def cut_product(monkeypatch: pytest.MonkeyPatch, cut: str, outputs: int, inputs: int, weights: str) -> None:
    """Let products with weights of that shape be cut in one of the ways `CUTS`."""
    if CUTS[cut]:
        device = torch.empty(0, device=DEVICE).device
        limit = launch.shared_bytes(device.type, device.index)
        options = {**launch.linear_options(outputs, inputs, weights, device), **CUTS[cut]}
        fitting = options if INTERPRETED else launch.fitting(options, weights, limit)
        monkeypatch.setitem(launch.table(device), launch.linear_key(outputs, inputs, weights), fitting)


@pytest.mark.parametrize(
    ("cut", "rows", "outputs", "inputs", "dtype"),
    covering(
        [*CUTS],
        [(1, 40, 128), (3, 33, 72), (16, 96, 520), (17, 64, 72)],
        [torch.float16, torch.bfloat16],
        rest_is_extended=True,
    ),
    ids=str,
)
def test_products_of_few_rows_agree_with_the_reference(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_product(monkeypatch, cut, outputs, inputs, "16")
    x, weight, bias = (torch.randn(size).to(dtype) for size in ((rows, 2 * inputs), (outputs, inputs), (outputs,)))
    for some, with_bias in ((x[:, :inputs], None), (x[:, inputs:], bias), (x.T[:inputs].T.unsqueeze(0), bias)):
        got = operations.linear(*at(DEVICE, some, weight, with_bias))
        assert got.dtype == dtype
        expected = reference.linear(some.float(), weight.float(), None if with_bias is None else with_bias.float())
        assert_near(got, expected, dtype)


@pytest.mark.parametrize("cut", ["parts", *extended("by default")])
def test_product_of_a_row_is_the_same_beside_other_rows(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = (torch.randn(size).half() for size in ((16, 264), (96, 264), (96,)))
    quantized, scale = reference.quantize_rows(weight, 1)
    for stored, kind, scales in (
        (weight, "16", None),
        (quantized, "8", scale),
        (quantized, "blocks", scale.repeat(1, 3)),
    ):
        cut_product(monkeypatch, cut, 96, 264, kind)
        everything = at(DEVICE, x, stored, bias, scales)
        together = operations.linear(*everything)
        x_here, *others = everything
        x_here[:3] = torch.nan
        for rows in ([15], [3, 7], list(range(1, 16))):
            got = operations.linear(x_here[rows], *others)
            finite = [i for i, row in enumerate(rows) if row >= 3]
            assert torch.equal(got[finite], together[[rows[i] for i in finite]])


@FLOAT8_HERE
@DTYPES
@pytest.mark.parametrize(("inputs", "groups"), [(300, 1), (300, 3), (128, 1)])
def test_quantized_rows_are_those_of_the_reference_to_the_bit(inputs: int, groups: int, dtype: torch.dtype) -> None:
    x = (torch.randn(6, 2 * inputs) * torch.logspace(-3, 3, 6).unsqueeze(1)).to(dtype)[:, :inputs]
    x[2] = 0
    # A scale of a power of two: many quotients are midpoints of two 8-bit floats.
    x[4:] = (x[4:] / x[4:].abs().amax(1, keepdim=True) * 3).to(torch.bfloat16).to(dtype)
    x[4:, ::100] = 3.5
    quantized, scale = operations.quantize_rows(x.to(DEVICE), groups)
    expected, expected_scale = reference.quantize_rows(x, groups)
    assert torch.equal(scale.cpu(), expected_scale)
    assert not quantized[2].float().any()
    assert torch.equal(as_bits(quantized).cpu(), as_bits(expected))


@FLOAT8_HERE
@pytest.mark.parametrize(
    ("dim", "groups", "dtype"), by_turns([(300, 1), (300, 3), (48, 1), (2000, 16)], [*ERRORS]), ids=str
)
def test_norms_and_gated_products_are_quantized_as_their_results_would_be(
    dim: int, groups: int, dtype: torch.dtype
) -> None:
    x, residual = torch.randn(2, 5, 2 * dim).to(dtype).to(DEVICE).unbind()
    weight = torch.randn(dim).to(dtype).to(DEVICE)
    x[2] = 0
    normed, total = operations.add_rms_norm(x[:, :dim], residual[:, :dim], weight, 1e-5)
    rows, total_beside_rows = operations.add_rms_norm_rows(x[:, :dim], residual[:, :dim], weight, 1e-5, groups)
    assert torch.equal(total, total_beside_rows)
    for got, result in ((rows, normed), (operations.silu_and_mul_rows(x, groups), operations.silu_and_mul(x))):
        values, scale = operations.quantize_rows(result, groups)
        assert got.dtype == dtype
        assert_near(got.scale, scale.cpu(), torch.float32)
        assert (as_bits(got.values) != as_bits(values)).float().mean() < (1e-3 if INTERPRETED else 1e-2)


@FLOAT8_HERE
@pytest.mark.parametrize("block_rows", [0, 32])
def test_row_that_is_not_finite_affects_no_other_row_of_a_product(block_rows: int) -> None:
    x = torch.randn(5, 200)
    weight, scale = fp8_weights(64, 200, block_rows)
    expected = reference.linear(x, weight, None, scale)
    x[1, 150], x[3, 7] = torch.nan, torch.inf
    got = operations.linear(*at(DEVICE, x, weight, None, scale)).cpu()
    assert got[[1, 3]].isnan().all()
    assert reference.linear(x, weight, None, scale)[[1, 3]].isnan().all()
    assert (got[[0, 2, 4]] - expected[[0, 2, 4]]).norm() < 5e-3 * expected.norm()
    assert operations.linear(*at(DEVICE, x[:0], weight, None, scale)).shape == (0, 64)


@pytest.mark.parametrize(
    ("tokens", "inputs", "part_sizes", "max_rank", "dtype"),
    by_turns(
        [(1, 64, (40,), 16), (5, 70, (64, 16, 16), 8), (40, 48, (33, 7, 7), 20), (33, 64, (50, 50), 100)], [*ERRORS]
    ),
    ids=str,
)
def test_adapters_add_what_the_reference_adds(
    tokens: int, inputs: int, part_sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype
) -> None:
    x, out = torch.randn(tokens, 2 * inputs).to(dtype)[:, :inputs], torch.randn(tokens, sum(part_sizes)).to(dtype)
    a = (torch.randn(3, len(part_sizes), max_rank, inputs) / 8).to(dtype)
    b = (torch.randn(3, max_rank, sum(part_sizes)) / 8).to(dtype)
    slots = torch.randint(-1, 3, (tokens,), dtype=torch.int32)
    slots[0] = 2
    expected = out.float().clone()
    reference.add_adapters(expected, x.float(), slots, a.float(), b.float(), part_sizes)
    got, *inputs_on_device = at(DEVICE, out.clone(), x, slots, a, b)
    operations.add_adapters(got, *inputs_on_device, part_sizes)
    assert_near(got, expected, dtype)
    assert torch.equal(got.cpu()[slots == -1], out[slots == -1])


def test_token_that_is_not_finite_affects_no_other_token_of_its_adapter() -> None:
    x, a, b = torch.randn(5, 64), torch.randn(1, 1, 8, 64), torch.randn(1, 8, 40)
    slots = torch.zeros(5, dtype=torch.int32)
    results = []
    for value in (0.0, torch.nan):
        x[1, 3] = x[3, 7] = value
        out = torch.zeros(5, 40, device=DEVICE)
        operations.add_adapters(out, *at(DEVICE, x, slots, a, b), (40,))
        results.append(out.cpu())
    assert results[1][[1, 3]].isnan().all()
    assert torch.equal(results[1][[0, 2, 4]], results[0][[0, 2, 4]])
