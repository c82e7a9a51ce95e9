#!/usr/bin/env python3
"""Estimate the time of a decode step of Llama-3.1-8B at one stream on an H200, from compiled code; no GPU is needed.

Prints a JSON object for bfloat16 and for FP8 weights with FP8 cache: microseconds of a step, and the share of the
bandwidth that its weights take. It is an estimate, not a measurement. A product starts, and then takes as long as the
multiprocessor with the most programs needs for their weights. That reads at the lowest of four rates: its share of the
bandwidth; the bytes that its programs copy ahead, by the shared memory of the compiled code, once per latency of the
memory; and the weights of a step of the loop per time to issue its instructions, and per time to write and read weights
and rows in the shared memory. Every other kernel has a fixed time.
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
BYTES_PER_S = 4.3e12
"""What an H200 reads."""
ISSUED_PER_S = 4 * 1.755e9
"""Instructions that a multiprocessor issues."""
SHARED_BYTES_PER_S = 128 * 1.755e9
"""What the shared memory of a multiprocessor reads or writes."""
MEMORY_LATENCY_S = 1e-6
"""From the request of a byte to its arrival, while the memory is busy."""
START_S = 1.7e-6
"""From the end of a kernel in a graph to the first bytes of the next."""
KERNEL_S = 2e-6
"""A kernel that reads little, with its start."""
OTHER_KERNELS = {"bf16": 7, "fp8": 8}
"""Of a layer, in units of `KERNEL_S`: two norms, rotation, SiLU, merge, and decode, which counts as two; with FP8
weights also what quantizes the attended values."""
OUTSIDE_LAYERS_S = 15e-6
"""Inputs of the step, embedding, last norm and choice of the token."""


class Product(NamedTuple):
    """A projection."""

    outputs: int
    inputs: int


LAYER = (
    Product((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    Product(HIDDEN, HEADS * HEAD_DIM),
    Product(2 * INNER, HIDDEN),
    Product(HIDDEN, INNER),
)
HEAD = Product(VOCAB_SIZE, HIDDEN)


def product_seconds(product: Product, dtype: torch.dtype) -> float:
    """Return the estimated seconds of one row times the weight of `product` in `dtype`."""
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
    ahead = code.shared // step_bytes * tile_bytes * min(code.programs, of_busiest)
    rate = min(
        BYTES_PER_S / NUM_PROCESSORS,
        ahead / MEMORY_LATENCY_S,
        tile_bytes / (code.loop * code.warps / ISSUED_PER_S),
        tile_bytes / (2 * step_bytes / SHARED_BYTES_PER_S),
    )
    read = of_busiest * -(-steps // options["PARTS"]) * tile_bytes
    return START_S + read / rate + (KERNEL_S if options["PARTS"] > 1 else 0)


def step(kind: str) -> dict[str, float]:
    """Return the record of a step with weights "bf16" or "fp8"; the head always has 16 bits."""
    dtype = FLOAT8 if kind == "fp8" else DTYPE
    layer = sum(product_seconds(product, dtype) for product in LAYER) + OTHER_KERNELS[kind] * KERNEL_S
    seconds = LAYERS * layer + product_seconds(HEAD, DTYPE) + OUTSIDE_LAYERS_S
    weights = LAYERS * sum(outputs * inputs for outputs, inputs in LAYER) * dtype.itemsize
    weights += HEAD.outputs * HEAD.inputs * DTYPE.itemsize
    return {"step_us": 1e6 * seconds, "share_of_bandwidth": weights / BYTES_PER_S / seconds}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps({kind: step(kind) for kind in OTHER_KERNELS}))


if __name__ == "__main__":
    main()
