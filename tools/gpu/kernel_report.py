#!/usr/bin/env python3
"""Compile the Triton kernels as an engine launches them, and print what their machine code takes of a GPU.

It needs Triton, and no GPU. The launches are those of a model in the shape of Llama-3.1-8B in bfloat16, with an 8-bit
cache and 8-bit weights besides. Instructions are counted as they stand in the code; `loop` counts the longest innermost
loop, which for attention computes one tile of keys. `programs` is the number of programs that a multiprocessor
holds at a time. With `--json` the table is printed as JSON.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch

from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, QuantizedRows
from vllm_mp.kernels.step_columns import StepColumns
from vllm_mp.kernels.triton import operations
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.compiled_kernels import compiling, read_code
from vllm_mp.testing.sampling_cases import draw_params

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
HIDDEN, INNER, VOCAB_SIZE = 4096, 14_336, 128_256
DTYPE = torch.bfloat16


def attend(rows: list[tuple[int, int]], cache_dtype: torch.dtype, splits: int = 1, *, in_graph: bool = False) -> None:
    """Attend in a step of `rows`, or in a graph of steps with prefills."""
    metadata, num_blocks = scattered_step(rows, BLOCK_SIZE, "cpu")
    if in_graph:
        metadata = metadata._replace(num_decodes=0, row_counts=torch.zeros(2, dtype=torch.int32))
    q = torch.empty(sum(queries for queries, _ in rows), HEADS, HEAD_DIM, dtype=DTYPE)
    caches = torch.empty(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=cache_dtype).unbind()
    operations.paged_attention(q, *caches, metadata._replace(decode_splits=splits), HEAD_DIM**-0.5)


def decode(cache_dtype: torch.dtype) -> None:
    """Attend in one part, and in several that are merged."""
    for splits in (1, 16):
        attend([(1, 300)] * 4, cache_dtype, splits)


def rotate(cache_dtype: torch.dtype) -> None:
    q, k, v = torch.empty(8, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE).split((HEADS, KV_HEADS, KV_HEADS), 1)
    positions, table = torch.zeros(8, dtype=torch.int64), torch.empty(64, HEAD_DIM, dtype=DTYPE)
    caches = torch.empty(2, 4, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=cache_dtype).unbind()
    operations.rotary_write_kv(q, k, v, positions, table, *caches, positions)


def normalise() -> None:
    x, weight = torch.empty(8, HIDDEN, dtype=DTYPE), torch.empty(HIDDEN, dtype=DTYPE)
    operations.rms_norm(x, weight, 1e-5)
    operations.add_rms_norm(x, x, weight, 1e-5)


def quantize() -> None:
    """Quantize what a layer multiplies, with its norm, with its activation and alone."""
    x, weight = torch.empty(8, HIDDEN, dtype=DTYPE), torch.empty(HIDDEN, dtype=DTYPE)
    operations.add_rms_norm_rows(x, x, weight, 1e-5, 1)
    operations.silu_and_mul_rows(torch.empty(8, 2 * INNER, dtype=DTYPE), 1)
    operations.quantize_rows(x, 1)


def multiply(rows: int, dtype: torch.dtype, has_blocks: bool = False) -> None:
    """Multiply as the narrowest and the widest projection do; 8-bit weights have scales for outputs or for blocks."""
    x: torch.Tensor | QuantizedRows
    for outputs, inputs in ((HIDDEN + 2 * KV_HEADS * HEAD_DIM, HIDDEN), (2 * INNER, HIDDEN)):
        x, weight, scale = torch.empty(rows, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype), None
        if dtype == FLOAT8:
            groups = inputs // FLOAT8_GROUP if has_blocks else 1
            scale = torch.empty(outputs // FLOAT8_GROUP if has_blocks else outputs, groups)
            x = QuantizedRows(x, torch.empty(rows, groups), DTYPE)
        operations.linear(x, weight, None, scale)


def draw() -> None:
    logits = torch.empty(4, VOCAB_SIZE, dtype=DTYPE)
    knobs = [{"temperature": 0.9, "top_k": 50, "top_p": 0.9}] * len(logits)
    operations.sample(logits, draw_params(knobs, torch.zeros(len(logits), dtype=torch.float64)))


def copy_step() -> None:
    tokens, rows = torch.zeros(256, dtype=torch.int64), torch.zeros(257, dtype=torch.int32)
    table, of_rows = torch.zeros(256, 64, dtype=torch.int32), rows[:256]
    columns = StepColumns(tokens, tokens, tokens, rows, of_rows, table, None, of_rows)
    operations.copy_step(columns, columns, 256)


LAUNCHES: dict[str, Callable[[], Any]] = {
    "decode": lambda: decode(DTYPE),
    "decode-fp8": lambda: decode(FLOAT8),
    "prefill": lambda: attend([(300, 300)], DTYPE),
    "prefill-fp8": lambda: attend([(300, 300)], FLOAT8),
    "mixed": lambda: attend([(1, 300), (300, 300)], DTYPE, 16, in_graph=True),
    "mixed-fp8": lambda: attend([(1, 300), (300, 300)], FLOAT8, 16, in_graph=True),
    "rotary": lambda: rotate(DTYPE),
    "rotary-fp8": lambda: rotate(FLOAT8),
    "norm": normalise,
    "silu": lambda: operations.silu_and_mul(torch.empty(8, 2 * INNER, dtype=DTYPE)),
    "quantize": quantize,
    "linear": lambda: multiply(4, DTYPE),
    "linear-fp8": lambda: multiply(4, FLOAT8),
    "linear-fp8-blocks": lambda: multiply(4, FLOAT8, has_blocks=True),
    "linear-fp8-64": lambda: multiply(64, FLOAT8),
    "linear-fp8-2048": lambda: multiply(2048, FLOAT8),
    "sample": draw,
    "step": copy_step,
}
COLUMNS = ("registers", "spills", "shared", "warps", "programs", "instructions", "loop", "tensor")


def report(name: str, capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Return one row for each kernel that the launch called `name` compiles."""
    with compiling(capability) as compiler:
        LAUNCHES[name]()
    return [
        {"launch": name, "kernel": key[0], **read_code(kernel, capability)._asdict()}
        for key, kernel in compiler.kernels.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    cells = [["launch", "kernel", *COLUMNS, "shared loads", "global loads"]]
    for row in rows:
        loads = (
            ", ".join(f"{count} x {width}" for width, count in row[kind].items()) or "-"
            for kind in ("shared_loads", "global_loads")
        )
        cells.append([row["launch"], row["kernel"], *(f"{row[column]:,}" for column in COLUMNS), *loads])
    return "\n".join("| " + " | ".join(line) + " |" for line in [cells[0], ["---"] * len(cells[0]), *cells[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", default="9.0", help="compute capability (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="LAUNCH", choices=LAUNCHES, default=list(LAUNCHES))
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: %(default)s)")
    arguments = parser.parse_args()
    major, minor = map(int, arguments.capability.split("."))
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        found = pool.starmap(report, [(name, (major, minor)) for name in arguments.only], chunksize=1)
    rows = [row for of_launch in found for row in of_launch]
    print(json.dumps(rows) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
