#!/usr/bin/env python3
"""Estimate the time of a decode step at one stream on an H200, from compiled code; no GPU is needed.

Prints a JSON object for Llama-3.1-8B in bfloat16, with FP8 weights and FP8 cache, and for Qwen3-0.6B: microseconds of a
step, and the share of the rate of copies at which its weights are read. A product starts, and then takes as long as the
multiprocessor with the most programs needs for their weights. That reads at the lowest of five rates: its share of what
the device streams; the bytes that its programs copy ahead, by the shared memory of the compiled code, once per latency
of the memory; and the weights of a step of the loop per time to issue its instructions, per time in which a warp gets
through them, and per time to write and read weights and rows in the shared memory.

The times of other kernels and of gaps are those of a profile of an H200 (docs/figures/gpu.md). The rate of streams, the
start of a product and the pace of a warp are fitted to steps of that run, in which no kernel started before another
ended: without such launches ("in_turn"), the estimate reproduces that run. With them, a product's programs prefetch
weights while the kernel before runs; what they save ("starting_early") is a prediction.
"""

import argparse
import json
from typing import NamedTuple

import torch
from kernel_report import DTYPE, HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB_SIZE
from torch import Tensor

from vllm_mp.kernels.reference import FLOAT8, QuantizedRows
from vllm_mp.kernels.triton import launch, operations
from vllm_mp.testing.compiled_kernels import NUM_PROCESSORS, compiling, read_code

CAPABILITY = (9, 0)
LAYERS = 32
BYTES_PER_S = 4.24e12
"""What an H200 copies, measured."""
STREAMED_BYTES_PER_S = 4.1e12
"""What products of few rows read between their start and their end; fitted, with `START_S`, to both profiled models."""
ISSUED_PER_S = 4 * 1.755e9
"""Instructions that a multiprocessor issues."""
WARP_ISSUES_PER_S = 1.755e9 / 6
"""Instructions that a single warp issues, since most wait for one before them; fitted to the step with FP8 weights, of
which there is no profile."""
SHARED_BYTES_PER_S = 128 * 1.755e9
"""What the shared memory of a multiprocessor reads or writes."""
MEMORY_LATENCY_S = 1e-6
"""From the request of a byte to its arrival, while the memory is busy."""
START_S = 3.2e-6
"""What a product takes beside its stream: until the first bytes arrive, and from the last bytes to the result."""
GAP_S = 0.45e-6
"""From the end of a kernel in a graph to the start of the next, measured."""
ADDITION_S = 2e-6
"""The kernel that adds the parts of a product."""
PREFETCHED = launch.reasoned(CAPABILITY)["dependent_launch"]["PREFETCH"]
"""Bytes that a program of a product prefetches."""
OUTSIDE_LAYERS_S = 15e-6
"""Inputs of the step, embedding, last norm and choice of the token."""


class Product(NamedTuple):
    """A projection."""

    outputs: int
    inputs: int


class Model(NamedTuple):
    """What a step of a model reads and launches."""

    layers: int
    projections: tuple[Product, ...]
    """Of a layer."""
    head: Product
    dtype: torch.dtype
    """Of the projections; the head always has 16 bits."""
    before: tuple[float, ...]
    """Seconds of the kernel before each projection, measured."""
    others: tuple[float, ...]
    """The same for the other kernels of a layer."""


LLAMA_LAYER = (
    Product((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    Product(HIDDEN, HEADS * HEAD_DIM),
    Product(2 * INNER, HIDDEN),
    Product(HIDDEN, INNER),
)
LLAMA_BEFORE = (2.15e-6, 2.44e-6, 2.15e-6, 1.4e-6)
"""Norm, merge, norm, SiLU."""
LLAMA_OTHERS = (1.74e-6, 4.63e-6)
"""Rotation, decode."""
FP8_BEFORE = (2.6e-6, 2e-6, 2.6e-6, 4.5e-6)
"""Norm, quantization of attended values, norm, SiLU; estimates, as no profile with FP8 is recorded.

One program quantizes a row: for SiLU's 14,336 elements it reads 57 KB, and 16 warps issue 1,000 instructions each.
"""
HEAD = Product(VOCAB_SIZE, HIDDEN)
MODELS = {
    "bf16": Model(32, LLAMA_LAYER, HEAD, DTYPE, LLAMA_BEFORE, LLAMA_OTHERS),
    "fp8": Model(32, LLAMA_LAYER, HEAD, FLOAT8, FP8_BEFORE, (*LLAMA_OTHERS, 2.44e-6)),
    "qwen3-0.6b": Model(
        28,
        (Product(4096, 1024), Product(1024, 2048), Product(6144, 1024), Product(1024, 3072)),
        Product(151_936, 1024),
        DTYPE,
        (1.46e-6, 2.19e-6, 1.46e-6, 1.15e-6),
        (1.46e-6, 1.46e-6, 1.51e-6, 4.45e-6),
    ),
}


def product_seconds(product: Product, dtype: torch.dtype, before: float = 0.0) -> float:
    """Return the estimated seconds of one row times the weight of `product` in `dtype`.

    `before` is the time of the kernel before, in which programs that start early prefetch weights.
    """
    outputs, inputs = product
    rows, scale = torch.empty(1, inputs, dtype=dtype), None
    x: Tensor | QuantizedRows = rows
    if dtype == FLOAT8:
        x, scale = QuantizedRows(rows, torch.empty(1, 1), DTYPE), torch.empty(outputs, 1)
    with compiling(CAPABILITY) as compiler:
        operations.linear(x, torch.empty(outputs, inputs, dtype=dtype), None, scale)
        options = launch.linear_options(outputs, inputs, str(8 * dtype.itemsize), torch.device("cpu"))
    codes = {key[0]: read_code(kernel, CAPABILITY) for key, kernel in compiler.kernels.items()}
    code = codes["_few_rows_kernel"]
    row_bytes = options["SLICES"] * options["SLICE_INPUTS"] * dtype.itemsize
    tile_bytes = options["OUTPUT_TILE"] * row_bytes
    steps = -(-inputs * dtype.itemsize // row_bytes)
    programs = -(-outputs // options["OUTPUT_TILE"]) * options["PARTS"]
    of_busiest = -(-programs // NUM_PROCESSORS)
    step_bytes = tile_bytes + launch.MAX_FEW_ROWS * row_bytes
    residents = min(code.programs, of_busiest)
    ahead = code.shared // step_bytes * tile_bytes * residents
    rate = min(
        STREAMED_BYTES_PER_S / NUM_PROCESSORS,
        ahead / MEMORY_LATENCY_S,
        tile_bytes / (code.loop * code.warps / ISSUED_PER_S),
        residents * tile_bytes / (code.loop / WARP_ISSUES_PER_S),
        tile_bytes / (2 * step_bytes / SHARED_BYTES_PER_S),
    )
    read = of_busiest * -(-steps // options["PARTS"]) * tile_bytes
    prefetched = min(PREFETCHED, options["OUTPUT_TILE"] * inputs * dtype.itemsize)
    prefetched *= min(programs, NUM_PROCESSORS * residents)
    saved = min(prefetched / STREAMED_BYTES_PER_S, before + GAP_S) if before else 0.0
    return GAP_S + START_S - saved + read / rate + (GAP_S + ADDITION_S if options["PARTS"] > 1 else 0)


def step(model: Model, starts_early: bool) -> dict[str, float]:
    """Return the record of a step of `model`, in which products may start before the kernel before them has ended."""
    before = [seconds * starts_early for seconds in model.before]
    timed = zip(model.projections, before, strict=True)
    layer = sum(product_seconds(product, model.dtype, early) for product, early in timed)
    layer += sum((*model.before, *model.others)) + len((*model.before, *model.others)) * GAP_S
    seconds = model.layers * layer + product_seconds(model.head, DTYPE, before[0]) + OUTSIDE_LAYERS_S
    weights = model.layers * sum(outputs * inputs for outputs, inputs in model.projections) * model.dtype.itemsize
    weights += model.head.outputs * model.head.inputs * DTYPE.itemsize
    return {"step_us": 1e6 * seconds, "share_of_bandwidth": weights / BYTES_PER_S / seconds}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    steps = {"in_turn": False, "starting_early": True}
    print(
        json.dumps({name: {key: step(model, early) for key, early in steps.items()} for name, model in MODELS.items()})
    )


if __name__ == "__main__":
    main()
