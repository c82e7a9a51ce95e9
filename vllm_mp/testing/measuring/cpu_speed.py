"""Measure the builds of the CPU kernels: products, attention of prompts, and steps of a model with random weights."""

import copy
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from vllm_mp.core.models import build_model
from vllm_mp.core.weights.block_matrix import BlockMatrix
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.kernels.cpu.library import Library, library
from vllm_mp.kernels.cpu.packed import PackedLinear
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.attention_steps import scattered_step

TORCH = "torch"
"""The name under which torch's own products, those of oneDNN, are measured."""
_BLOCK_SIZE = 16
_PROMPT_ROWS = 128
_REPEAT_S = 0.05
_MAX_SECONDS = 1.0
"""A build that takes longer for a case does not run the larger cases of its kind."""

SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}
TINY = {**SMOLLM2_135M, "vocab_size": 500, "hidden_size": 288, "intermediate_size": 64, "num_hidden_layers": 2}
PRECISIONS = ("bfloat16", "int8", "int4")
"""Of weights. Those of four bits are in block types, as in GGUF files."""


class Sizes(NamedTuple):
    """What is measured."""

    config: dict[str, Any]
    """The model's config.json."""
    rows: tuple[int, ...]
    """Rows of products."""
    batches: tuple[int, ...]
    """Streams that decode together."""
    context: int
    """Tokens that each stream has in the cache."""
    prompts: tuple[int, ...]
    """Tokens of a prompt."""
    rounds: int


FULL = Sizes(SMOLLM2_135M, (1, 4, 16, 32, 64, 128, 512), (1, 4, 16, 64), 128, (128, 512), 3)
QUICK = Sizes(TINY, (1, 40), (1, 4), 20, (33,), 1)


class Case(NamedTuple):
    """What is measured; `size` is the number of rows, of streams or of the prompt's tokens."""

    kind: str
    precision: str
    size: int


Timed = Iterator[tuple[Case, Callable[[], object]]]


def native(sizes: Sizes) -> NativeArchitecture:
    """Return the architecture of the model that is measured."""
    arch = read_architecture(sizes.config)
    assert isinstance(arch, NativeArchitecture)
    return arch


def measure(builds: Sequence[str], sizes: Sizes) -> Iterator[list[dict[str, Any]]]:
    """Yield after each round a record for each build and case that it ran, with the median of the rounds' seconds.

    The builds take turns in each round. `TORCH` may be among the builds, which only has products.
    """
    arch = native(sizes)
    in_blocks = build_model(msgspec.structs.replace(arch, blocks="int4"), torch.bfloat16, "cpu")
    in_floats = build_model(arch, torch.bfloat16, "cpu")
    for model in (in_blocks, in_floats):
        fill_with_dummy_weights(model, 0)
    models = {precision: in_blocks if precision == "int4" else in_floats for precision in PRECISIONS}
    seconds: dict[tuple[str, Case], list[float]] = {}
    for number in range(1, sizes.rounds + 1):
        for build in builds:
            print(f"round {number} of {sizes.rounds}: {build}", file=sys.stderr)
            _measure(build, models, sizes, seconds)
        yield [
            {"build": build, **case._asdict(), "seconds": statistics.median(rounds), "rounds": rounds}
            for (build, case), rounds in seconds.items()
        ]


@torch.inference_mode()
def _measure(build: str, models: dict[str, Any], sizes: Sizes, seconds: dict[tuple[str, Case], list[float]]) -> None:
    for cases in _kinds(build, models, sizes):
        for case, run in cases:
            spent = _seconds(run)
            seconds.setdefault((build, case), []).append(spent)
            if spent > _MAX_SECONDS:
                break


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call after a first call; short calls are repeated for a while."""

    def timed() -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    if (first := timed()) > _MAX_SECONDS:
        return first
    repeats = 1 + int(_REPEAT_S / max(first, _REPEAT_S / 10))
    return statistics.median(timed() for _ in range(repeats))


def _kinds(build: str, models: dict[str, Any], sizes: Sizes) -> Iterator[Timed]:
    """Yield the cases of each kind; the memory of a kind is released with the next."""
    if build == TORCH:
        yield _products(None, models["bfloat16"], sizes, "bfloat16")
        return
    try:
        os.environ[KERNELS_VARIABLE] = build
        library.cache_clear()
        for precision, model in models.items():
            yield _products(library(), model, sizes, precision)
        yield _attention(sizes)
        for precision, model in models.items():
            yield from _steps(model, sizes, precision)
    finally:
        del os.environ[KERNELS_VARIABLE]
        library.cache_clear()


class Product(NamedTuple):
    """The product of rows with a matrix."""

    outputs: int
    inputs: int
    multiply: Callable[[torch.Tensor], object]


def _linears(kernels: Library | None, model: Any, precision: str) -> Iterator[Product]:
    """Yield the products with all matrices of `model`, computed by torch without `kernels`."""
    if precision == "int4":
        assert kernels is not None
        for matrix in model.modules():
            if isinstance(matrix, BlockMatrix):
                outputs, inputs = sum(rows for rows, _ in matrix.shapes), matrix.shapes[0][1]
                yield Product(outputs, inputs, BlockLinear(kernels, matrix.parts, None, torch.bfloat16))
        return
    quantization = "int8" if precision == "int8" else None
    for weight in model.parameters():
        if weight.dim() == 2:
            if kernels is None:
                yield Product(
                    weight.shape[0], weight.shape[1], functools.partial(torch.nn.functional.linear, weight=weight)
                )
            else:
                yield Product(weight.shape[0], weight.shape[1], PackedLinear(kernels, weight, None, quantization))


def _products(kernels: Library | None, model: Any, sizes: Sizes, precision: str) -> Timed:
    """Yield the products of all linear layers and the head; from 128 rows on, as in a prompt, the head has one row."""
    products = list(_linears(kernels, model, precision))
    x = {product.inputs: torch.randn(max(sizes.rows), product.inputs).bfloat16() for product in products}

    def run(rows: int) -> None:
        for product in products:
            needs_one = product.outputs == sizes.config["vocab_size"] and rows >= _PROMPT_ROWS
            product.multiply(x[product.inputs][: 1 if needs_one else rows])

    for rows in sizes.rows:
        yield Case("linears", precision, rows), functools.partial(run, rows)


def _attention(sizes: Sizes) -> Timed:
    """Yield the attention of one layer for a whole prompt."""
    arch = native(sizes)
    for count in sizes.prompts:
        metadata, num_blocks = scattered_step([(count, count)], _BLOCK_SIZE, "cpu")
        q = torch.randn(count, arch.num_heads, arch.head_dim).bfloat16()
        k_cache, v_cache = torch.randn(2, num_blocks, _BLOCK_SIZE, arch.num_kv_heads, arch.head_dim).bfloat16()
        yield (
            Case("attention in one layer", "bfloat16", count),
            functools.partial(ops.paged_attention, q, k_cache, v_cache, metadata, 0.125),
        )


def _steps(model: Any, sizes: Sizes, precision: str) -> Iterator[Timed]:
    """Yield decodes and prompts of the whole model, without a client and a scheduler."""
    packed = copy.deepcopy(model)
    packed.pack("int8" if precision == "int8" else None, torch.bfloat16)

    def step(rows: list[tuple[int, int]]) -> Callable[[], object]:
        metadata, num_blocks = scattered_step(rows, _BLOCK_SIZE, "cpu")
        caches = [
            tuple(torch.zeros(num_blocks, _BLOCK_SIZE, *shape, dtype=torch.bfloat16) for shape in layer)
            for layer in packed.kv_shapes
        ]
        positions = torch.cat([torch.arange(context - queries, context) for queries, context in rows])
        ends = torch.tensor([*itertools.accumulate(queries for queries, _ in rows)]) - 1
        return lambda: packed.argmax(packed(positions % 100, positions, caches, metadata)[ends])

    yield ((Case("decode", precision, batch), step([(1, sizes.context)] * batch)) for batch in sizes.batches)
    yield ((Case("prompt", precision, count), step([(count, count)])) for count in sizes.prompts)
