"""The block types of GGUF files against the package that defines them."""

import gguf
import numpy as np
import pytest
import torch

from vllm_mp.kernels import ops
from vllm_mp.kernels.block_linear import TorchBlockLinear
from vllm_mp.kernels.block_weight import BLOCK_TYPES, QUANTIZABLE, BlockWeight, quantize_blocks

ERRORS = {
    "Q4_0": 0.09,
    "Q4_1": 0.08,
    "Q5_0": 0.045,
    "Q5_1": 0.04,
    "Q8_0": 0.006,
    "Q4_K": 0.08,
    "Q5_K": 0.04,
    "Q6_K": 0.02,
}
"""The greatest error of normally distributed weights, relative and root mean square, that each type may have."""


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_types_are_the_types_of_gguf_files(name):
    kind = gguf.GGMLQuantizationType[name]
    assert BLOCK_TYPES[name] == (name, *gguf.GGML_QUANT_SIZES[kind], kind.value)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_bytes_are_dequantized_as_gguf_does(name):
    block_type = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (40, 3 * block_type.num_bytes), dtype=torch.uint8, generator=generator)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[name])
    got = BlockWeight(data, block_type, 3 * block_type.weights).dequantized()
    assert np.array_equal(got.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_weights_are_rounded_with_the_error_that_their_bits_allow(name):
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5, :256] *= 1e-4
    rounded = quantize_blocks(weight, BLOCK_TYPES[name]).dequantized()
    for rows in (slice(None), slice(5, 6)):
        assert (rounded[rows] - weight[rows]).norm() <= ERRORS[name] * weight[rows].norm()
    assert not rounded[3].any()
    again = quantize_blocks(rounded, BLOCK_TYPES[name]).dequantized()
    assert (again - rounded).norm() <= ERRORS[name] / 2 * weight.norm()


def test_matrix_of_an_impossible_shape_is_refused():
    with pytest.raises(ValueError, match="a positive multiple of 256"):
        BlockWeight(torch.zeros(4, 144, dtype=torch.uint8), BLOCK_TYPES["Q4_K"], 300)
    with pytest.raises(ValueError, match=r"need torch.uint8 \[outputs, 288\], not torch.uint8 \[4, 144\]"):
        BlockWeight(torch.zeros(4, 144, dtype=torch.uint8), BLOCK_TYPES["Q4_K"], 512)
    with pytest.raises(ValueError, match="call contiguous"):
        BlockWeight(torch.zeros(4, 288, dtype=torch.uint8)[:, :144], BLOCK_TYPES["Q4_K"], 256)
    with pytest.raises(ValueError, match="a multiple of 256 inputs, not 96"):
        quantize_blocks(torch.zeros(4, 96), BLOCK_TYPES["Q6_K"])
    with pytest.raises(ValueError, match="Q2_K: weights cannot be rounded"):
        quantize_blocks(torch.zeros(4, 256), BLOCK_TYPES["Q2_K"])


def test_product_takes_parts_of_several_types_and_adds_the_bias_and_the_adapters():
    generator = torch.Generator().manual_seed(0)
    parts = [
        quantize_blocks(torch.randn(outputs, 256, generator=generator), BLOCK_TYPES[name])
        for name, outputs in (("Q4_K", 5), ("Q8_0", 3))
    ]
    weight = torch.cat([part.dequantized() for part in parts])
    x, bias = torch.randn(2, 3, 256, generator=generator), torch.randn(8, generator=generator)
    product = TorchBlockLinear(parts, bias, torch.float32)
    assert torch.allclose(product(x), x @ weight.T + bias, atol=1e-4)
    assert product(x.bfloat16(), torch.float32).dtype == torch.float32
    assert torch.equal(product.argmax(x[0]), product(x[0]).argmax(1))
    stack = product.adapter_stack([5, 3], 2, 4)
    a, b = torch.randn(4, 256, generator=generator), torch.randn(3, 4, generator=generator)
    stack.load(1, [None, ops.Factors(a, b)])
    added = product(x[0], None, stack, torch.tensor([-1, 1, 0], dtype=torch.int32)) - product(x[0])
    assert torch.allclose(added[1, 5:], x[0, 1] @ (b @ a).T, atol=1e-3)
    added[1, 5:] = 0
    assert not added.any()


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_embedding_dequantizes_the_rows_of_the_ids(name):
    weight = quantize_blocks(torch.randn(20, 256), BLOCK_TYPES[name])
    ids = torch.tensor([[3, 19], [0, 3]])
    assert torch.equal(ops.block_embedding(weight, ids, torch.bfloat16), weight.dequantized()[ids].bfloat16())
