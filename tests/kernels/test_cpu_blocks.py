"""Products with weights in block types in every build of the C++ kernels, against their definition in torch."""

import dataclasses
import functools
import math

import pytest
import torch
from support.random_blocks import SCALES_AT, random_weight

from vllm_mp.kernels import ops, reference
from vllm_mp.kernels.block_linear import TorchBlockLinear
from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockWeight
from vllm_mp.kernels.cpu import block_linear, packed
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.machine.host_memory import HostMemory

ROUNDING_OF_ROWS = 0.008
"""The greatest error, relative and root mean square, that rows of 8 bits may add."""


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_products_agree_with_the_dequantized_weights_in_batches_of_any_size(build, name):
    weight, bias = random_weight(name, 51), torch.randn(51)
    product = BlockLinear(build, [weight], bias, torch.float32)
    x = torch.randn(33, 512)
    exact = TorchBlockLinear([weight], bias, torch.float32)(x)
    together = product(x)
    assert (together - exact).norm() <= ROUNDING_OF_ROWS * (exact - bias).norm()
    for first, last in ((0, 1), (3, 6), (8, 15), (9, 25)):
        assert torch.equal(product(x[first:last]), together[first:last])
    rounded = BlockLinear(build, [weight], bias, torch.bfloat16)
    assert torch.equal(rounded(x.bfloat16()), product(x.bfloat16().float()).bfloat16())
    assert torch.equal(rounded(x.bfloat16(), torch.float32), product(x.bfloat16().float()))


@pytest.fixture
def rounds_weights(build, monkeypatch):
    """Make products that need not be batch-invariant. Return whether this build multiplies many rows on tiles."""
    monkeypatch.setattr(build, "is_batch_invariant", False)
    return build.name.startswith("amx")


@pytest.mark.parametrize("is_batch_invariant", [True, False])
@pytest.mark.usefixtures("three_threads")
def test_many_rows_that_threads_divide_give_what_fewer_rows_give(build, is_batch_invariant, monkeypatch):
    monkeypatch.setattr(build, "is_batch_invariant", is_batch_invariant)
    weights, bias = [random_weight("Q4_K", 40), random_weight("Q8_0", 11)], torch.randn(51)
    product = BlockLinear(build, weights, bias, torch.bfloat16)
    x = torch.randn(401, 512).bfloat16()
    assert torch.equal(product(x), torch.cat([product(some) for some in x.split(101)]))
    assert torch.equal(product.argmax(x), torch.cat([product.argmax(some) for some in x.split(101)]))


@pytest.mark.parametrize("in_place", ["0", "1"])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_many_rows_are_multiplied_with_rounded_weights_if_batches_may_differ(
    build, name, in_place, rounds_weights, monkeypatch
):
    monkeypatch.setenv(block_linear.IN_PLACE_VARIABLE, in_place)
    weights, bias = [random_weight(name, 40), random_weight("Q8_0", 11)], torch.randn(51)
    x = torch.randn(33, 512).bfloat16()
    product = BlockLinear(build, weights, bias, torch.bfloat16)
    build.is_batch_invariant = True
    invariant = BlockLinear(build, weights, bias, torch.bfloat16)(x, torch.float32)
    got = product(x, torch.float32)
    assert torch.equal(product(x[:23], torch.float32), invariant[:23])
    if not rounds_weights:
        assert torch.equal(got, invariant)
        return
    rounded = torch.cat([weight.dequantized() for weight in weights]).bfloat16()
    exact = x.double() @ rounded.double().T + bias
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    assert torch.equal(product(x[5:29], torch.float32), got[5:29])
    assert torch.equal(product(x), got.bfloat16())


def test_argmax_of_many_rows_has_one_of_the_highest_outputs_of_rounded_weights(build, rounds_weights):
    weight, x = random_weight("Q4_K", 200), torch.randn(30, 512).bfloat16()
    indices = BlockLinear(build, [weight], None, torch.bfloat16).argmax(x)
    outputs = x.double() @ weight.dequantized().bfloat16().double().T
    chosen, highest = outputs.gather(1, indices[:, None])[:, 0], outputs.amax(1)
    assert (chosen >= highest - (1e-3 if rounds_weights else 0.05) * highest.abs()).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rewritten_rows_give_the_results_of_rows_where_they_lie(build, name, monkeypatch):
    weights = [random_weight(name, outputs) for outputs in (40, 5, 30)]
    x, released = torch.randn(20, 512), []
    parts = [dataclasses.replace(weight, release=functools.partial(released.append, weight)) for weight in weights]
    rewritten = BlockLinear(build, parts, torch.arange(75.0), torch.float32)
    assert released == weights
    monkeypatch.setenv(block_linear.IN_PLACE_VARIABLE, "1")
    in_place = BlockLinear(build, parts, torch.arange(75.0), torch.float32)
    assert len(released) == len(weights)
    for weight in weights[:2]:
        weight.data.zero_()  # only products that read it where it lies see this
    for rows in (1, 3, 7, 20):
        got, expected = rewritten(x[:rows]), in_place(x[:rows])
        assert torch.equal(got[:, 45:], expected[:, 45:])
        assert not torch.equal(got[:, :45], expected[:, :45])


def test_long_rows_that_stay_in_memory_are_not_copied(build):
    outputs, inputs = 5, 4096
    data = torch.randint(60, (outputs, inputs // 32 * 18), dtype=torch.uint8)
    weight = BlockWeight(data, BLOCK_TYPES["Q4_0"], inputs)
    of_file = dataclasses.replace(weight, release=lambda: None)
    copied = [
        BlockLinear(build, [weight], None, torch.float32),
        BlockLinear(build, [of_file], None, torch.float32, is_kept=True),
    ]
    kept = BlockLinear(build, [weight], None, torch.float32, is_kept=True)
    x = torch.randn(3, inputs)
    expected = kept(x)
    data.zero_()
    assert not kept(x).any()
    for product in copied:
        assert torch.equal(product(x), expected)


def test_rows_stay_where_they_lie_where_memory_is_short(build, monkeypatch):
    weight, released = random_weight("Q4_0", 40), []
    part = dataclasses.replace(weight, release=functools.partial(released.append, weight))
    monkeypatch.setattr(packed, "host_memory", lambda: HostMemory(2**40, 2**38, 2**30))
    BlockLinear(build, [part], None, torch.float32)
    assert released == [weight]
    monkeypatch.setattr(packed, "host_memory", lambda: HostMemory(2**40, 2**28, 2**30))
    BlockLinear(build, [part], None, torch.float32)
    assert released == [weight]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_sums_of_the_largest_integers_do_not_overflow(build, name, sign):
    block_type = BLOCK_TYPES[name]
    blocks = torch.full((19, 512 // block_type.weights, block_type.num_bytes), 255, dtype=torch.uint8)
    for at in SCALES_AT.get(name, (0,)):
        blocks[..., at : at + 2] = torch.tensor([0.01]).half().view(torch.uint8)
    weight = BlockWeight(blocks.flatten(1), block_type, 512)
    x = torch.full((9, 512), sign)  # 127 or -127 in 8 bits
    exact = TorchBlockLinear([weight], None, torch.float32)(x)
    product = BlockLinear(build, [weight], None, torch.float32)
    for rows in (1, 9):
        torch.testing.assert_close(product(x[:rows]), exact[:rows], rtol=1e-5, atol=1e-3)


def test_products_do_not_depend_on_the_number_of_threads(build):
    product = BlockLinear(build, [random_weight("Q5_K", 70)], None, torch.float32)
    x, threads = torch.randn(33, 512), torch.get_num_threads()
    expected = [product(x[:1]), product(x)]
    torch.set_num_threads(1 if threads > 1 else 3)
    try:
        assert all(torch.equal(product(x[: len(rows)]), rows) for rows in expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (17, 30, 3), (64, 16, 16), (5, 40, 100)], ids=str)
def test_parts_of_several_types_lie_one_below_another(build, sizes):
    parts = [random_weight(name, outputs) for name, outputs in zip(("Q4_K", "Q6_K", "Q8_0"), sizes, strict=True)]
    product = BlockLinear(build, parts, None, torch.float32)
    for rows in (1, 2, 20):
        x = torch.randn(rows, 512)
        apart = [BlockLinear(build, [part], None, torch.float32)(x) for part in parts]
        assert torch.equal(product(x), torch.cat(apart, 1))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0"])
@pytest.mark.parametrize("outputs", [1, 31, 70])
def test_argmax_finds_the_first_of_the_highest_outputs(build, name, outputs):
    weight = random_weight(name, outputs)
    weight.data[outputs // 2 :] = weight.data[: outputs - outputs // 2].clone()  # each occurs twice
    product = BlockLinear(build, [weight], None, torch.float32)
    for rows in (1, 13):
        x = torch.randn(rows, 512)
        assert torch.equal(product.argmax(x), reference.argmax(product(x)))


@pytest.mark.parametrize("rows", [3, 20])
def test_row_that_is_not_finite_affects_no_other_row(build, rows):
    product = BlockLinear(build, [random_weight("Q4_1", 40)], None, torch.float32)
    x = torch.randn(rows, 512)
    expected, places = product(x), product.argmax(x)
    x[1, 3], x[2, 500] = math.nan, -math.inf
    got = product(x)
    assert got[1:3].isnan().all()
    others = [row for row in range(rows) if row not in (1, 2)]
    assert torch.equal(got[others], expected[others])
    places[1:3] = ops.NO_PLACE
    assert torch.equal(product.argmax(x), places)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_any_bytes_of_a_file_give_a_result(build, name):
    block_type = BLOCK_TYPES[name]
    data = torch.randint(256, (40, 3 * block_type.num_bytes), dtype=torch.uint8)
    weight = BlockWeight(data, block_type, 3 * block_type.weights)
    expected = TorchBlockLinear([weight], None, torch.float32)
    product = BlockLinear(build, [weight], None, torch.float32)
    x = torch.randn(7, weight.inputs)
    x[2:] *= 0
    for rows in (x[:1], x):
        assert torch.equal(product(rows).isfinite(), expected(rows).isfinite())
    finite = weight.dequantized().isfinite().all(1)
    assert not product(x)[2:, finite].any()


@pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-30, 1e30, 3e38])
def test_rows_of_any_magnitude_are_multiplied(build, magnitude):
    weight = random_weight("Q8_0", 20)
    weight.data.view(20, -1, 34)[:, :, :2] = torch.tensor([1e-5]).half().view(torch.uint8)
    x = torch.rand(2, 512) * magnitude
    got = BlockLinear(build, [weight], None, torch.float32)(x)
    exact = x.double() @ weight.dequantized().double().T
    assert (got - exact).norm() <= max(ROUNDING_OF_ROWS * exact.norm(), 1e-36)


@pytest.mark.parametrize("part_sizes", [(70,), (40, 12, 12), (8, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_add_to_products_what_the_reference_adds(build, dtype, part_sizes):
    parts = [random_weight(name, size) for name, size in zip(("Q4_K", "Q4_K", "Q6_K"), part_sizes, strict=False)]
    product = BlockLinear(build, parts, None, dtype)
    packed = product.adapter_stack(part_sizes, 3, 8)
    stack = ops.AdapterStack(512, part_sizes, 3, 8, dtype, torch.device("cpu"))
    for slot, rank in ((0, 8), (2, 3)):
        factors = [
            ops.Factors((torch.randn(rank, 512) / 8).to(dtype), (torch.randn(size, rank) / 4).to(dtype))
            for size in part_sizes
        ]
        for memory in (packed, stack):
            memory.load(slot, factors)
    for rows in (1, 30):
        x, slots = torch.randn(rows, 512).to(dtype), torch.randint(-1, 3, (rows,), dtype=torch.int32)
        expected = product(x, torch.float32)
        reference.add_adapters(expected, x.float(), slots, stack.a.float(), stack.b.float(), part_sizes)
        got = product(x, None, packed, slots)
        assert (got.float() - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 8e-3) * expected.abs().max()
        assert torch.equal(got[slots == -1], product(x)[slots == -1])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_embedding_dequantizes_the_rows_of_the_ids(build, name):
    weight, ids = random_weight(name, 20), torch.tensor([[3, 19], [0, 3]])
    expected = weight.dequantized()[ids]
    assert (ops.block_embedding(weight, ids, torch.float32) - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert ops.block_embedding(weight, ids, torch.bfloat16).dtype == torch.bfloat16


def test_products_are_computed_in_torch_where_no_kernel_computes_them(monkeypatch):
    monkeypatch.setattr(ops, "library", lambda: None)
    weight = random_weight("Q4_0", 5)
    assert isinstance(ops.block_linear([weight], None, torch.float32), TorchBlockLinear)
    ids = torch.tensor([4, 1])
    assert torch.equal(ops.block_embedding(weight, ids, torch.float32), weight.dequantized()[ids])
