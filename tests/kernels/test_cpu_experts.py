"""Mixtures of experts in every build of the C++ kernels, against their definition in torch."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from support.covering import by_turns
from torch import Tensor

from vllm_mp.kernels import ops
from vllm_mp.kernels.block_linear import TorchBlockExperts
from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.experts import PackedExperts

NUM_EXPERTS, CHOSEN = 7, 3
UNUSED = 4
"""An expert that no token chooses."""
TOLERANCE = {
    "float32": 2e-6,
    "bfloat16": 8e-3,
    "int8": 0.025,
    "int8-bfloat16": 0.025,
    "Q4_K": 0.015,
    "Q8_0": 0.015,
    "Q4_1-bfloat16": 0.015,
}
"""For each kind of weights, the greatest error beside that of the weights: relative, root mean square."""


class Case(NamedTuple):
    experts: PackedExperts
    dtype: torch.dtype
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The definition, in float64 or with dequantized weights."""


def random_weights(hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=generator) / hidden**0.5
    return gate_up, torch.randn(NUM_EXPERTS, hidden, inner, generator=generator) / inner**0.5


@functools.cache
def random_blocks(name: str, hidden: int, inner: int) -> list[list[list[BlockWeight]]]:
    """Return random weights in the block type `name`: by matrix, by expert, and in parts."""
    gate_up, down = random_weights(hidden, inner)
    return [
        [[ops.quantize_blocks(part, ops.BLOCK_TYPES[name]) for part in matrix.chunk(parts)] for matrix in matrices]
        for matrices, parts in ((gate_up, 2), (down, 1))
    ]


def case(kind: str, hidden: int = 512, inner: int = 256, activation: str = "silu") -> Case:
    """Return experts of random weights."""
    name, _, rows = kind.partition("-")
    dtype = torch.bfloat16 if "bfloat16" in (name, rows) else torch.float32
    gate_up, down = (matrices.to(dtype) for matrices in random_weights(hidden, inner))
    if name in ops.BLOCK_TYPES:
        blocks = random_blocks(name, hidden, inner)
        experts = ops.block_experts(*blocks, activation, dtype)
        gate_up, down = (
            torch.stack([torch.cat([part.dequantized() for part in parts]) for parts in matrices])
            for matrices in blocks
        )
    else:
        experts = ops.pack_experts(gate_up, down, activation, "int8" if name == "int8" else None)
    assert isinstance(experts, PackedExperts)

    def compute(x: Tensor, ids: Tensor, router_weights: Tensor) -> Tensor:
        return ops.experts(x.double(), ids, router_weights, gate_up.double(), down.double(), activation)

    return Case(experts, dtype, compute)


def choices(num_tokens: int, count: int = CHOSEN) -> tuple[Tensor, Tensor]:
    """Return random experts of each token, without `UNUSED`, and their weights."""
    allowed = torch.tensor([expert for expert in range(NUM_EXPERTS) if expert != UNUSED])
    ids = torch.stack([allowed[torch.randperm(len(allowed))[:count]] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, count)


@pytest.mark.parametrize(("kind", "activation"), by_turns([*TOLERANCE], ["silu", "gelu_pytorch_tanh"]))
def test_experts_agree_with_the_definition(build, kind, activation):
    made = case(kind, activation=activation)
    for num_tokens in (1, 4, 40, 130):
        x, (ids, weights) = torch.randn(num_tokens, 512).to(made.dtype), choices(num_tokens)
        got, exact = made.experts(x, ids, weights), made.compute(x, ids, weights)
        assert got.dtype == made.dtype
        assert (got - exact).norm() <= TOLERANCE[kind] * exact.norm()


@pytest.mark.parametrize(("hidden", "inner"), [(34, 6), (68, 100), (130, 22), (64, 300)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_sizes_may_be_any_even_numbers(build, kind, hidden, inner):
    made = case(kind, hidden, inner)
    x, (ids, weights) = torch.randn(30, hidden).to(made.dtype), choices(30)
    exact = made.compute(x, ids, weights)
    assert (made.experts(x, ids, weights) - exact).norm() <= TOLERANCE[kind] * exact.norm()


@pytest.mark.parametrize("kind", TOLERANCE)
def test_experts_are_batch_invariant(build, kind):
    made = case(kind)
    x, (ids, weights) = torch.randn(90, 512).to(made.dtype), choices(90)
    together = made.experts(x, ids, weights)
    for first, last in ((0, 1), (89, 90), (3, 5), (10, 27), (40, 90)):
        some = slice(first, last)
        assert torch.equal(made.experts(x[some], ids[some], weights[some]), together[some])
    order = torch.randperm(90)
    assert torch.equal(made.experts(x[order], ids[order], weights[order]), together[order])
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 3)
    try:
        assert torch.equal(made.experts(x, ids, weights), together)
    finally:
        torch.set_num_threads(threads)


def test_more_choices_than_are_computed_together_give_the_same_sums(build):
    made = case("float32", 32, 16)
    x, (ids, weights) = torch.randn(3000, 32), choices(3000)
    together = made.experts(x, ids, weights)
    apart = [made.experts(*some) for some in zip(x.split(700), ids.split(700), weights.split(700), strict=True)]
    assert torch.equal(together, torch.cat(apart))
    torch.testing.assert_close(together.double(), made.compute(x, ids, weights), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["float32", "int8", "Q8_0"])
def test_token_that_is_not_finite_affects_no_other_token(build, kind):
    made = case(kind)
    x, (ids, weights) = torch.randn(20, 512), choices(20)
    expected = made.experts(x, ids, weights)
    x[3, 7], x[11, 500], weights[15, 1] = math.nan, math.inf, math.nan
    got = made.experts(x, ids, weights)
    spoilt = [3, 11, 15]
    assert not got[spoilt].isfinite().any(1).all()
    others = [token for token in range(20) if token not in spoilt]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("kind", ["bfloat16", "int8", "Q8_0"])
def test_no_tokens_and_one_choice_are_computed(build, kind):
    made = case(kind)
    ids, weights = choices(5, 1)
    x = torch.randn(5, 512).to(made.dtype)
    exact = made.compute(x, ids, weights)
    assert (made.experts(x, ids, weights) - exact).norm() <= TOLERANCE[kind] * exact.norm()
    assert made.experts(x[:0], ids[:0], weights[:0]).shape == (0, 512)


def test_torch_computes_experts_that_no_kernel_computes(build, monkeypatch):
    gate_up, down = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    assert ops.pack_experts(gate_up, down, "relu") is None
    assert ops.pack_experts(gate_up.half(), down.half(), "silu") is None
    assert ops.pack_experts(torch.randn(4, 6, 32), torch.randn(4, 32, 3), "silu") is None
    with pytest.raises(ValueError, match=r"quantization='int8' .*activation 'relu'"):
        ops.pack_experts(gate_up, down, "relu", "int8")
    type = ops.BLOCK_TYPES["Q8_0"]
    blocks = [[[ops.quantize_blocks(matrix, type)] for matrix in matrices] for matrices in (gate_up, down)]
    x, ids, weights = torch.randn(9, 32), torch.randint(4, (9, 1)), torch.rand(9, 1)
    assert isinstance(ops.block_experts(*blocks, "relu", torch.float32), TorchBlockExperts)
    expected = ops.block_experts(*blocks, "silu", torch.float32)(x, ids, weights)
    monkeypatch.setattr(ops, "library", lambda: None)
    experts = ops.block_experts(*blocks, "silu", torch.float32)
    assert isinstance(experts, TorchBlockExperts)
    assert (experts(x, ids, weights) - expected).norm() <= 0.012 * expected.norm()
    with pytest.raises(ValueError, match=r"quantization='int8' needs the C\+\+ kernels"):
        ops.pack_experts(gate_up, down, "silu", "int8")
