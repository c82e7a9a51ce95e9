"""Every build of the C++ kernels that this processor runs, and the kernels for tiles with a model of the tile
instructions, compared with kernels/reference.py."""

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from support.covering import covering
from support.key_groups import keys_in_groups, keys_in_order
from support.paged_batch import DECODES_EVEN, DECODES_RAGGED, IMAGES, MIXED, PREFILLS, WITH_IMAGES, PagedBatch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from vllm_mp.core.lora.targets import projections
from vllm_mp.core.models import build_model
from vllm_mp.core.models.linear import pack_projections
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops, reference
from vllm_mp.kernels.cpu import library as library_module
from vllm_mp.kernels.cpu.library import library, load
from vllm_mp.kernels.cpu.packed import PackedLinear
from vllm_mp.machine import cpu_info
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE, runnable_builds
from vllm_mp.model_config.families.registry import read_architecture

LONG = [(1, 1500), (1, 513), (1, 512), (300, 1200), (5, 600)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""The greatest error, relative to the largest value."""
FASTEST, *SLOWER_BUILDS = runnable_builds()
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def assert_near(got, expected, dtype):
    assert got.isfinite().all()
    assert (got.float() - expected.float()).abs().max() <= TOLERANCE[dtype] * expected.float().abs().max()


@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "has_bias"),
    covering([(70, 64), (960, 576), (576, 1536), (33, 2), (1, 10), (64, 46)], [*TOLERANCE], [False, True]),
)
def test_products_agree_with_torch(build, dtype, outputs, inputs, has_bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    product = PackedLinear(build, weight, bias)
    for rows in (1, 5, 12, 13, 16, 17, 33, 70):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias if bias is None else bias.double())
        assert_near(product(x), exact, dtype)
        scores = product(x, torch.float32)
        assert scores.dtype == torch.float32
        assert_near(scores, exact, torch.float32)


@DTYPES
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("inputs", [576, 68])
def test_products_are_batch_invariant(build, dtype, quantization, inputs):
    x = torch.randn(64, inputs).to(dtype)
    product = PackedLinear(build, torch.randn(100, inputs).to(dtype), None, quantization)
    together = product(x, torch.float32)
    for first, last in ((0, 1), (3, 8), (10, 27), (40, 64)):
        assert torch.equal(product(x[first:last], torch.float32), together[first:last])


def rotated(matrix):
    """Return float64 `matrix` [rows, inputs] times Hadamard matrices of 512 inputs, then 256, and so on down to 16."""
    pieces, at = [], 0
    for size in (512, 256, 128, 64, 32, 16):
        block = torch.ones(1, 1, dtype=torch.float64)
        while len(block) < size:
            block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
        while at + size <= matrix.shape[1]:
            pieces.append(matrix[:, at : at + size].double() @ block / size**0.5)
            at += size
    return torch.cat([*pieces, matrix[:, at:].double()], 1)


def rounded_to_8_bits(matrix):
    """Return `matrix` [rows, inputs] rounded to 8 bits with one scale for each row."""
    scale = matrix.abs().amax(1, keepdim=True) / 127
    return (matrix / scale).round() * scale


@DTYPES
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 64), (960, 576), (40, 1020), (33, 4), (64, 68)])
def test_int8_products_are_those_of_rotated_and_rounded_weights_and_rows(build, dtype, outputs, inputs):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    rounded = rounded_to_8_bits(rotated(weight))
    product = PackedLinear(build, weight, bias, "int8")
    for rows in (1, 7, 9, 30):
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        exact = torch.nn.functional.linear(rounded_to_8_bits(rotated(x)), rounded, bias.double())
        # A value between two integers may become the other one, because the kernels rotate in float32.
        bound = (3e-4 if inputs > 4 else 0.01) * exact.norm()
        assert (product(x, torch.float32) - exact).norm() <= bound
        assert (product(x) - exact).norm() <= bound + TOLERANCE[dtype] * exact.norm()


@DTYPES
def test_int8_products_are_accurate_for_rows_with_outliers(build, dtype):
    weight, x = torch.randn(64, 576).to(dtype), torch.randn(8, 576).to(dtype)
    x[:, 100] *= 100
    exact = torch.nn.functional.linear(x.double(), weight.double())
    assert (PackedLinear(build, weight, None, "int8")(x) - exact).norm() <= 0.02 * exact.norm()


@DTYPES
def test_row_that_is_not_finite_affects_no_other_row_in_int8(build, dtype):
    x = torch.randn(5, 64).to(dtype)
    product = PackedLinear(build, torch.randn(40, 64).to(dtype), None, "int8")
    expected = product(x)
    x[1, 3], x[3, 60] = float("nan"), float("inf")
    got = product(x)
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[[0, 2, 4]], expected[[0, 2, 4]])


def test_weights_of_an_unsuitable_size_are_not_quantized(build):
    weight, x = torch.randn(40, 6), torch.randn(3, 6)
    assert torch.equal(PackedLinear(build, weight, None, "int8")(x), PackedLinear(build, weight, None)(x))


@pytest.mark.parametrize(("dtype", "quantization", "outputs"), covering([*TOLERANCE], [None, "int8"], [1, 31, 70, 500]))
def test_argmax_finds_the_first_of_the_highest_outputs(build, dtype, quantization, outputs):
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, 64, generator=generator).to(dtype)
    weight[outputs // 2 :] = weight[: outputs - outputs // 2].clone()  # each occurs twice
    bias = torch.randn(outputs, generator=generator).to(dtype)
    bias[outputs // 2 :] = bias[: outputs - outputs // 2].clone()
    product = PackedLinear(build, weight, bias, quantization)
    for rows in (1, 2, 13, 40):
        x = torch.randn(rows, 64, generator=generator).to(dtype)
        assert torch.equal(product.argmax(x), reference.argmax(product(x, torch.float32)))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_argmax_takes_only_tokens_that_a_mask_allows(build, quantization):
    product = PackedLinear(build, torch.randn(70, 64), None, quantization)
    x = torch.randn(20, 64)
    x[5, 3] = float("nan")
    logits = product(x, torch.float32)
    masks = torch.randint(-(2**31), 2**31, (4, 3)).int()
    masks[1] = 0
    given = ops.TokenMasks(masks, torch.tensor([17, 0, 5, 9]))
    assert torch.equal(product.argmax(x, given), ops.masked_argmax(logits, given))
    assert product.argmax(x, given)[[0, 5]].tolist() == [ops.NO_PLACE] * 2


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_argmax_of_a_row_that_is_not_finite_is_no_place(build, quantization):
    product = PackedLinear(build, torch.randn(70, 64), None, quantization)
    x = torch.randn(20, 64)
    expected = product.argmax(x)
    x[3, 5], x[17, 60] = float("nan"), float("inf")
    expected[[3, 17]] = ops.NO_PLACE
    assert torch.equal(product.argmax(x), expected)
    assert torch.equal(reference.argmax(product(x)), expected)


def adapted_case(build, dtype, part_sizes, inputs, quantization=None):
    """Return a product of random weights, four slots of adapters for it, and the same slots as torch reads them.

    Slot 1 was never loaded, and slot 2 changes only the last part.
    """
    product = PackedLinear(build, torch.randn(sum(part_sizes), inputs).to(dtype) / 8, None, quantization)
    max_rank = 20
    packed = product.adapter_stack(part_sizes, 4, max_rank)
    stack = ops.AdapterStack(inputs, part_sizes, 4, max_rank, dtype, torch.device("cpu"))
    for slot, ranks in {0: [7] * len(part_sizes), 2: [3], 3: [20, 1, 16][: len(part_sizes)]}.items():
        own = [
            ops.Factors((torch.randn(rank, inputs) / 8).to(dtype), (torch.randn(outputs, rank) / 4).to(dtype))
            for rank, outputs in zip(ranks, part_sizes[-len(ranks) :], strict=True)
        ]
        factors = [None] * (len(part_sizes) - len(own)) + own
        for memory in (packed, stack):
            memory.load(slot, [ops.Factors(torch.ones(max_rank, inputs), torch.ones(n, max_rank)) for n in part_sizes])
            memory.load(slot, factors)
    return product, packed, stack


PART_SIZES = [(70,), (64, 32, 32), (40, 12, 12), (8, 4, 4), (150, 150)]


@pytest.mark.parametrize(
    ("part_sizes", "dtype", "quantization"),
    covering([(sizes,) for sizes in PART_SIZES], [*TOLERANCE], [None, "int8"]),
    ids=str,
)
def test_adapters_add_to_products_what_the_reference_adds(build, dtype, part_sizes, quantization):
    product, packed, stack = adapted_case(build, dtype, part_sizes, 96, quantization)
    for rows in (1, 2, 30, 70):
        x = torch.randn(rows, 96).to(dtype)
        slots = torch.randint(-1, 4, (rows,), dtype=torch.int32)
        plain, got = product(x), product(x, None, packed, slots)
        expected = product(x, torch.float32)
        reference.add_adapters(expected, x.float(), slots, stack.a.float(), stack.b.float(), part_sizes)
        assert_near(got, expected, dtype)
        assert torch.equal(got[(slots == -1) | (slots == 1)], plain[(slots == -1) | (slots == 1)])
        assert torch.equal(product(x, None, packed, torch.full_like(slots, -1)), plain)
        assert torch.equal(product(x, None, packed, None), plain)


@DTYPES
def test_products_with_adapters_are_batch_invariant_and_the_same_in_every_slot(build, dtype):
    product, packed, stack = adapted_case(build, dtype, (64, 32, 32), 96)
    factors = [ops.Factors(a[:7], b[:7].T) for a, b in zip(stack.a[0], stack.b[0].split((64, 32, 32), 1), strict=True)]
    x, slots = torch.randn(64, 96).to(dtype), torch.randint(-1, 4, (64,), dtype=torch.int32)
    together = product(x, None, packed, slots)
    for first, last in ((0, 1), (3, 8), (10, 27), (40, 64)):
        assert torch.equal(product(x[first:last], None, packed, slots[first:last]), together[first:last])
    packed.load(1, factors)
    assert torch.equal(product(x, None, packed, slots.masked_fill(slots == 0, 1))[slots == 0], together[slots == 0])


@DTYPES
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.usefixtures("three_threads")
def test_many_rows_that_threads_divide_give_what_fewer_rows_give(build, dtype, quantization):
    product, packed, _ = adapted_case(build, dtype, (64, 32, 37), 96, quantization)
    x, slots = torch.randn(401, 96).to(dtype), torch.randint(-1, 4, (401,), dtype=torch.int32)
    together, parts = product(x, None, packed, slots), zip(x.split(100), slots.split(100), strict=True)
    assert torch.equal(together, torch.cat([product(some, None, packed, of_some) for some, of_some in parts]))
    assert torch.equal(product.argmax(x), torch.cat([product.argmax(some) for some in x.split(100)]))


@DTYPES
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_row_that_is_not_finite_affects_no_other_row_of_its_adapter(build, dtype, quantization):
    product, packed, _ = adapted_case(build, dtype, (64, 32, 32), 96, quantization)
    x, slots = torch.randn(5, 96).to(dtype), torch.zeros(5, dtype=torch.int32)
    expected = product(x, None, packed, slots)
    x[1, 3], x[3, 60] = float("nan"), float("inf")
    got = product(x, None, packed, slots)
    assert not got[[1, 3]].isfinite().any()
    assert torch.equal(got[[0, 2, 4]], expected[[0, 2, 4]])


def attend(batch, dtype, *options):
    return ops.paged_attention(batch.q.to(dtype), batch.k_cache.to(dtype), batch.v_cache.to(dtype), *options)


@functools.cache
def attention_case(rows, sizes, dtype, window, soft_cap):
    """Return a batch and the reference's attention, which are computed once for all builds."""
    batch = PagedBatch(list(rows), *sizes)
    batch.round_to(dtype)
    return batch, reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.11, window, soft_cap
    )


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "block_size", "value_dim", "window", "soft_cap", "dtype"),
    covering(
        [DECODES_EVEN, DECODES_RAGGED, PREFILLS, MIXED, LONG],
        [(9, 3, 64, 16, 64), (4, 4, 40, 4, 40), (8, 1, 128, 16, 128), (4, 2, 64, 8, 96), (2, 1, 256, 32, 256)],
        [None, 7, 600],
        [None, 5.0],
        [*TOLERANCE],
    ),
    ids=str,
)
def test_attention_agrees_with_the_reference(
    build, dtype, rows, heads, kv_heads, head_dim, block_size, value_dim, window, soft_cap
):
    sizes = (heads, kv_heads, head_dim, block_size, value_dim)
    batch, expected = attention_case(tuple(rows), sizes, dtype, window, soft_cap)
    got = attend(batch, dtype, batch.metadata, 0.11, window, soft_cap)
    assert got.dtype == dtype
    assert_near(got, expected, dtype)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.float32, 90), (torch.bfloat16, 7)])
def test_tokens_of_an_image_see_one_another(build, dtype, window):
    batch = PagedBatch(WITH_IMAGES, 6, 2, 64, 16, images=IMAGES)
    batch.round_to(dtype)
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.11, window)
    got = attend(batch, dtype, batch.metadata, 0.11, window)
    assert_near(got, expected, dtype)
    isolated = attend(batch, dtype, batch.metadata._replace(isolates=True), 0.11, window)
    assert torch.equal(isolated, got), "results are batch-invariant"


def raise_scores(batch, count):
    """Let the scores of the first row's keys after the first 64 be far above the others, for most of the queries.

    All `count` keys of the row are in the step.
    """
    cells = batch.metadata.cell_mapping[64:count]
    batch.k_cache.flatten(0, 1)[cells] *= 40
    batch.q[::3] /= 100


@DTYPES
def test_scores_far_above_those_of_the_first_keys_are_weighed(build, dtype):
    batch = PagedBatch([(700, 700)], 6, 2, 64, 16)
    raise_scores(batch, 700)
    batch.round_to(dtype)
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, 0.11)
    got = attend(batch, dtype, batch.metadata, 0.11)
    scores = 0.11 * torch.einsum(
        "qhd,khd->qhk", batch.q[:, ::3], batch.k_cache.flatten(0, 1)[batch.metadata.cell_mapping]
    )
    assert (scores.amax(-1) - scores[..., :64].amax(-1) > 150).any(), "float32 holds no such power"
    # Errors of scores of some hundreds are errors of weights.
    assert (got.float() - expected).abs().max() <= {torch.float32: 2e-3, torch.bfloat16: 3e-2}[dtype]


@DTYPES
@pytest.mark.parametrize(("window", "rises"), [(None, False), (90, False), (None, True)])
def test_attention_is_batch_invariant_and_the_same_in_any_chunk(build, dtype, window, rises):
    whole = PagedBatch([(700, 700), (30, 50)], 6, 2, 64, 16)
    if rises:
        raise_scores(whole, 700)
    together = attend(whole, dtype, whole.metadata, 1.0, window)
    for first, last in itertools.pairwise([0, 1, 2, 100, 163, *range(500, 512), 600, 604, 612, 699, 700]):
        metadata = whole.metadata._replace(
            query_start=torch.tensor([0, last - first], dtype=torch.int32),
            seq_lens=torch.tensor([last], dtype=torch.int32),
            block_table=whole.metadata.block_table[:1],
            cell_mapping=whole.metadata.cell_mapping[first:last],
            query_lens=[last - first],
            host_seq_lens=[last],
            num_decodes=int(last - first == 1),
            max_seq_len=last,
        )
        caches = (whole.k_cache.to(dtype), whole.v_cache.to(dtype))
        alone = ops.paged_attention(whole.q[first:last].to(dtype), *caches, metadata, 1.0, window)
        assert torch.equal(alone, together[first:last])


@DTYPES
def test_nan_reaches_only_the_queries_that_see_it(build, dtype):
    batch = PagedBatch([(1, 40), (60, 100), (3, 9)], 4, 2, 64, 16)
    expected = attend(batch, dtype, batch.metadata, 0.125)
    nan_cell = batch.metadata.cell_mapping[1 + 20]
    batch.v_cache.flatten(0, 1)[nan_cell] = float("nan")
    got = attend(batch, dtype, batch.metadata._replace(isolates=True), 0.125)
    seeing = slice(1 + 20, 1 + 60)
    assert got[seeing].isnan().all()
    others = torch.ones(len(got), dtype=torch.bool)
    others[seeing] = False
    assert torch.equal(got[others], expected[others])


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "biases": LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True, "intermediate_size": 150}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "one-kv-head": LlamaConfig(**{**SIZES, "hidden_size": 90, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "gemma2": Gemma2Config(
        **SIZES, head_dim=32, sliding_window=9, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=9, sliding_window_pattern=2),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, partial_rotary_factor=0.75),
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.22, embedding_multiplier=12.0, logits_scaling=8.0),
    "olmo2": Olmo2Config(**SIZES),
}


@pytest.mark.parametrize(
    ("dtype", "quantization"), [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")], ids=str
)
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_decoder_agrees_with_its_modules(build, dtype, quantization, name, monkeypatch):
    config = CONFIGS[name]
    architecture = type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    arch = read_architecture({**config.to_dict(), "architectures": [architecture]})
    modules, packed = (build_model(arch, dtype, "cpu") for _ in range(2))
    fill_with_dummy_weights(modules, 0)
    with torch.no_grad():
        for parameter in modules.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) / 10)
    packed.load_state_dict(modules.state_dict())
    packed.pack(quantization, dtype)
    if quantization == "int8":
        pack_projections(modules, quantization)
    stacks = [model.make_adapter_stacks(3, 10) for model in (modules, packed)]
    for projection, *of_models in zip(projections(arch), *stacks, strict=True):
        for slot, rank in ((0, 10), (2, 3)):
            a, b = (
                torch.randn(rank, projection.inputs) / 8,
                [torch.randn(size, rank) / 8 for size in projection.outputs],
            )
            for stack in of_models:
                stack.load(slot, [ops.Factors(a.to(dtype), of_part.to(dtype)) for of_part in b])
    # Groups of keys divide blocks of 32 tokens, but not of 18.
    for rows, adapters, block_size in (
        (MIXED, None, 32),
        (MIXED, [2, 0, -1, 2], 18),
        (PREFILLS, [0, -1, 2], 16),
    ):
        batch = PagedBatch(rows, arch.num_heads, arch.num_kv_heads, arch.head_dim, block_size)
        caches = [
            tuple(torch.randn_like(cache).mul(cache.sign()).to(dtype) for cache in (batch.k_cache, batch.v_cache))
            for _ in range(arch.num_layers)
        ]
        metadata = batch.metadata
        if adapters is not None:
            slots = torch.tensor(adapters, dtype=torch.int32).repeat_interleave(torch.tensor(metadata.query_lens))
            metadata = metadata._replace(adapter_slots=slots)
        positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
        ids = torch.arange(len(positions)) % 100
        outputs = []
        for model in (modules, packed):
            own = [(keys_in_groups(k, build) if model is packed else k.clone(), v.clone()) for k, v in caches]
            with torch.inference_mode(), monkeypatch.context() as patch:
                if model is modules:
                    patch.setattr(ops, "library", lambda: None)
                hidden = model(ids, positions, own, metadata)
                logits = model.compute_logits(hidden)
                assert torch.equal(model.argmax(hidden), reference.argmax(logits))
                keys = keys_in_order(own[-1][0], build) if model is packed else own[-1][0]
                outputs.append((hidden, logits, keys.nan_to_num()))
                if model is packed:
                    later = torch.zeros_like(ids)
                    prepared = packed.prepare_step(later, positions, own, metadata)
                    later[:] = ids
                    for call in (*prepared.forward, prepared.argmax):
                        call()
                    assert torch.equal(prepared.hidden, hidden)
                    assert prepared.tokens.tolist() == model.argmax(hidden).tolist()
                    if arch.logits_soft_cap is None and arch.logits_divisor == 1.0:
                        compute_logits, own_logits = prepared.prepare_logits()
                        compute_logits()
                        assert torch.equal(own_logits, logits)
                    else:
                        assert prepared.prepare_logits() is None
        # In 8 bits too, the least difference may round a value to the next integer.
        bound = 0.02 if dtype == torch.bfloat16 or quantization else 1e-5
        for got, expected in zip(outputs[1], outputs[0], strict=True):
            assert (got.float() - expected.float()).norm() <= bound * expected.float().norm()


def test_build_of_another_version_is_not_used(monkeypatch, caplog):
    assert load(FASTEST) is not None
    monkeypatch.setitem(library_module._SIGNATURES, "argmax", library_module._SIGNATURES["argmax"][1:])
    assert load(FASTEST) is None
    assert "was compiled for another version of the package" in caplog.text


@pytest.mark.parametrize(
    "name", [FASTEST, *(pytest.param(other, marks=pytest.mark.extended) for other in SLOWER_BUILDS)]
)
def test_environment_chooses_the_build(monkeypatch, name):
    monkeypatch.setenv(KERNELS_VARIABLE, name)
    try:
        library.cache_clear()
        assert library().panel_columns == load(name).panel_columns
    finally:
        library.cache_clear()


def test_environment_chooses_torch_and_an_unknown_name_is_refused(monkeypatch):
    try:
        monkeypatch.setenv(KERNELS_VARIABLE, "none")
        library.cache_clear()
        assert library() is None
        assert ops.pack_linear(torch.zeros(4, 4), None) is None
        monkeypatch.setenv(KERNELS_VARIABLE, "fastest")
        library.cache_clear()
        with pytest.raises(
            ValueError,
            match=f"{KERNELS_VARIABLE}='fastest': give one of amx, avx512, avx512_vnni, avx2, portable, none",
        ):
            library()
    finally:
        monkeypatch.undo()
        library.cache_clear()


def test_another_build_runs_and_the_log_says_why_if_the_system_refuses_tiles(monkeypatch, caplog):
    flags = cpu_info.cpu_flags() | cpu_info.KERNEL_BUILDS["amx"]
    monkeypatch.setattr(cpu_info, "cpu_flags", lambda: flags)
    monkeypatch.setattr(cpu_info, "_XFEATURE_XTILEDATA", 62)  # a feature that no processor has
    monkeypatch.setattr(library_module, "load", lambda name: name)
    refusal = cpu_info.refusal("amx")
    assert refusal.startswith("amx: the system refuses permission for tiles (")
    try:
        library.cache_clear()
        assert library() == "avx512"
        assert [record.getMessage() for record in caplog.records if refusal in record.getMessage()] == [
            f"the fastest build of the C++ kernels cannot run: {refusal}"
        ]
        monkeypatch.setenv(KERNELS_VARIABLE, "amx")
        library.cache_clear()
        with pytest.raises(ValueError, match=f"{KERNELS_VARIABLE}='amx': {re.escape(refusal)}; give one of avx512, "):
            library()
    finally:
        monkeypatch.undo()
        library.cache_clear()
