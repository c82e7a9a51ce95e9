"""Why products of 8-bit floats add their sums in float32: an emulation of the sums of Hopper's tensor cores."""

import math

import pytest
import torch
from torch import Tensor

from vllm_mp.kernels import reference

ROWS, OUTPUTS, INPUTS = 4, 64, 4096
KEPT_BITS = 13
"""Fraction bits to which each addend is cut, relative to the largest, as DeepSeek-V3's authors measured."""
LANES = 32
"""The products that an instruction adds to a sum."""
BOUND = 5e-3
"""The relative error that tests allow on a GPU, of which rounding results to bfloat16 takes up to 2e-3."""


def tensor_core_sums(products: Tensor, inputs_a_sum: int) -> Tensor:
    """Return the sums of `products` [..., INPUTS]: each of `inputs_a_sum` as tensor cores add, those in float32."""
    total = torch.zeros(products.shape[:-1])
    for part in products.double().split(inputs_a_sum, -1):
        of_part = torch.zeros(products.shape[:-1], dtype=torch.float64)
        for lanes in part.split(LANES, -1):
            addends = torch.cat((of_part.unsqueeze(-1), lanes), -1)
            exponent = torch.frexp(addends.abs().amax(-1, keepdim=True)).exponent - 1
            of_part = torch.ldexp(torch.ldexp(addends, KEPT_BITS - exponent).trunc(), exponent - KEPT_BITS).sum(-1)
        total += of_part.float()
    return total


def error_of_sums(x, weight, inputs_a_sum):
    """Return the error of the products of random `x` and `weight`, relative to their norm."""
    products = (reference.to_float8(100 * part).float() for part in (x[:, None, :], weight))
    products = math.prod(products)
    exact = products.double().sum(-1)
    return (tensor_core_sums(products, inputs_a_sum) - exact).norm() / exact.norm()


@pytest.mark.parametrize(("inputs_a_sum", "is_precise"), [(128, True), (256, True), (INPUTS, False)])
def test_sums_of_few_inputs_in_tensor_cores_are_precise_and_sums_of_all_are_not(inputs_a_sum, is_precise):
    torch.manual_seed(0)
    error = error_of_sums(torch.randn(ROWS, INPUTS), torch.randn(OUTPUTS, INPUTS), inputs_a_sum)
    assert (error < BOUND / 10) == is_precise


@pytest.mark.parametrize(("inputs_a_sum", "is_precise"), [(128, True), (256, True), (INPUTS, False)])
def test_sums_of_positive_products_lose_the_most(inputs_a_sum, is_precise):
    """A sum grows far beyond its addends, which then keep few bits; without the limit it is off by more than 3 %."""
    torch.manual_seed(0)
    error = error_of_sums(torch.rand(ROWS, INPUTS), torch.rand(OUTPUTS, INPUTS), inputs_a_sum)
    assert error < BOUND / 2 if is_precise else error > 0.03


@pytest.mark.parametrize(("dtype", "num_groups"), [(torch.bfloat16, 32), (torch.float16, 1)])
def test_last_bit_of_a_quotient_decides_enough_8_bit_floats_to_exceed_the_bound(dtype, num_groups):
    torch.manual_seed(0)
    x = torch.randn(1, INPUTS).to(dtype).float()
    weight = reference.to_float8(100 * torch.randn(OUTPUTS * 16, INPUTS)).float()
    exact, scale = reference.quantize_rows(x, num_groups)
    scales = scale.repeat_interleave(INPUTS // num_groups, 1)
    last_bits = torch.randint(-1, 2, x.shape, dtype=torch.int32)
    quotients = ((x / scales).view(torch.int32) + last_bits).view(torch.float32)
    errors = (reference.to_float8(quotients).float() - exact.float()) * scales
    result = (exact.float() * scales) @ weight.T
    assert (errors @ weight.T).norm() > BOUND / 2 * result.norm()
