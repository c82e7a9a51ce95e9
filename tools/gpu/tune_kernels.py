#!/usr/bin/env python3
"""Find the fastest launch options of the Triton kernels on this GPU, and save them.

The file lies beside kernels/triton/launch.py, is named after the compute capability, and is read by the kernels from
then on. For each entry of the launch table, every candidate is timed over the shapes of some models, and the candidate
with the least geometric mean of its times is kept. All candidates of an entry are compiled first, in several processes,
and those that cannot be fast are dropped: that do not compile or fit, that spill registers, of which a multiprocessor
holds too few programs, or whose code is that of another candidate. Float32, which is rarely used on a GPU, keeps its
options. Products of few rows are tuned for each shape of Llama-3.1-8B, and beside torch's products: MAX_ROWS is the
number of rows up to which they are at least as fast. `--only` tunes some kernels and adds to the file.
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import TritonError

from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton import launch, operations
from vllm_mp.machine.file_owner import write_output
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.sampling_cases import draw_params

BLOCK_SIZE = 16
Run = Callable[[], Any]

CANDIDATES: dict[str, dict[str, list[int]]] = {
    "prefill": {"ROWS": [64, 128], "KEYS": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]},
    "decode": {"KEYS": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]},
    "merge": {"num_warps": [1, 2, 4, 8]},
    "splits": {"PROGRAMS": [1, 2, 3, 4, 6], "TOKENS": [64, 128, 256, 512]},
    "looping": {"PREFILL": [1, 2, 4], "DECODE": [4, 8, 16], "MERGE": [5, 10, 20]},
    "linear": {"OUTPUT_TILE": [16, 32, 64], "PARTS": [1, 2, 4], "num_warps": [2, 4], "num_stages": [3, 4, 6]},
    "fp8": {"ROWS": [32, 64, 128], "OUTPUT_TILE": [32, 64, 128], "num_warps": [4, 8], "num_stages": [3, 4, 6]},
    "fp8_parts": {"PROGRAMS": [1, 2, 3, 4], "TILES": [2, 4, 8]},
    "fp8_library": {"ROWS": [16, 32, 64, 128]},
    "dependent_launch": {"PREFETCH": [0, 32 * 1024, 64 * 1024, 128 * 1024]},
    "lora_shrink": {"ROWS": [16, 32, 64], "INPUT_TILE": [64, 128, 256], "num_warps": [4, 8], "num_stages": [2, 3]},
    "lora_expand": {"ROWS": [16, 32, 64], "OUTPUT_TILE": [64, 128, 256], "num_warps": [4, 8], "num_stages": [2, 3]},
    "norm": {"ELEMENTS": [1024, 2048, 4096], "num_warps": [2, 4, 8, 16]},
    "elementwise": {"ELEMENTS": [512, 1024, 2048, 4096], "num_warps": [2, 4, 8]},
    "heads": {"ELEMENTS": [512, 1024, 2048, 4096], "num_warps": [1, 2, 4, 8]},
    "argmax": {"ELEMENTS": [1024, 2048, 4096, 8192], "num_warps": [4, 8, 16]},
    "sample": {"ELEMENTS": [512, 1024, 2048], "num_warps": [4, 8, 16]},
}
"""The values to try, by kind of kernel: the first part of the keys of its entries."""
LEAST_PROGRAMS = {"prefill": 1, "linear": 1, "fp8": 1}
"""Programs that a multiprocessor must hold at a time; 2 for other kinds, which wait for memory."""
PRODUCTS = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]
"""Outputs and inputs of the products of Llama-3.1-8B; the last, the head, has 16-bit weights only."""
FEW_ROWS = (1, 2, 4, 8, 16)


def entries(device: torch.device, quick: bool) -> list[str]:
    """Return the entries to tune: those of the launch table, with one for each shape of a product of few rows."""
    shapes = {"16": PRODUCTS, "8": PRODUCTS[:-1]}
    if quick:
        shapes = {weights: [(64, 256)] for weights in shapes}
    products = [launch.linear_key(*shape, weights) for weights, of_kind in shapes.items() for shape in of_kind]
    return [*products, *(key for key in launch.table(device) if not key.startswith("linear/"))]


def cases(key: str, device: torch.device, quick: bool) -> Iterator[Run]:
    """Yield the calls by which an entry of the launch table is timed."""
    kind, *details = key.split("/")
    tokens = [4] if quick else [1, 64, 2048]
    if kind in ("prefill", "decode"):
        for rows in _attention_rows(kind, quick):
            cache_dtype = FLOAT8 if details[0] == "8" else torch.bfloat16
            yield _attention(rows, 8, 2, int(details[1]), device, cache_dtype)
    elif kind == "linear":
        for count in [4] if quick else [1, 8]:
            yield _product(count, key, device)
    elif kind.startswith("fp8"):
        # torch takes over large products unless weights have block scales.
        most = int(details[0]) if details else 64
        for count in [20] if quick else [most // 2, most] if most < 128 else [128, 2048]:
            for outputs, inputs in [(64, 256)] if quick else [PRODUCTS[0], PRODUCTS[2], PRODUCTS[3]]:
                yield _fp8_product(count, outputs, inputs, most == 128, device)
    elif kind == "dependent_launch":
        for outputs, inputs in [(64, 256)] if quick else PRODUCTS[:3]:
            yield _norm_and_product(outputs, inputs, device)
    elif kind.startswith("lora"):
        few = int(details[0]) == 16
        for count in [4 if few else 20] if quick else [1, 16] if few else [64, 2048]:
            for outputs, inputs in [(64, 256)] if quick else [(4096, 4096), (4096, 14_336), (14_336, 4096)]:
                yield _adapters(count, outputs, inputs, device)
    elif kind in ("merge", "splits"):
        for rows in _attention_rows("decode", quick):
            yield _attention(rows, 8, 2, 128, device)
    elif kind == "looping":
        for rows in [[(1, 20), (20, 30)]] if quick else [[(1, 1024)] * 64 + [(448, 448)], [(1, 1024)] * 500]:
            yield _attention(rows, 8, 2, 128, device, in_graph_of=20 if quick else 512)
    elif kind == "norm":
        dim = 64 if quick else int(details[0])
        for count in tokens:
            x, weight = _random((count, dim), device), _random((dim,), device)
            yield lambda x=x, weight=weight: operations.add_rms_norm(x, x, weight, 1e-5)
    elif kind == "elementwise":
        for count in tokens:
            x = _random((count, 128 if quick else 28_672), device)
            yield lambda x=x: operations.silu_and_mul(x)
    elif kind == "heads":
        for count in tokens:
            yield _rotation(count, device)
    else:
        for count in [2] if quick else [1, 16, 256]:
            logits = _random((count, 200 if quick else 128_256), device)
            yield _draw(logits) if kind == "sample" else lambda logits=logits: operations.argmax(logits)


def _attention_rows(kind: str, quick: bool) -> list[list[tuple[int, int]]]:
    """Return some steps: (query tokens, context) of each row."""
    if quick:
        return [[(1, 20), (1, 5)]] if kind == "decode" else [[(20, 30)]]
    if kind == "decode":
        return [[(1, 1024)], [(1, 16_384)], [(1, 2048)] * 16, [(1, 512)] * 256]
    return [[(2048, 2048)], [(512, 4096)], [(128, 128)] * 16]


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return random numbers; zeros on the CPU, which only compiles or tries this tool."""
    values = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    return values if device.type == "cpu" else values.normal_()


def _product(rows: int, key: str, device: torch.device) -> Run:
    """Return a product of few rows, in the shape of the entry `key`."""
    outputs, inputs, weights = _shape_of(key)
    if weights == "8":
        return _fp8_product(rows, outputs, inputs, False, device)
    x, weight = _random((rows, inputs), device), _random((outputs, inputs), device)
    return lambda: operations.linear(x, weight)


def _norm_and_product(outputs: int, inputs: int, device: torch.device) -> Run:
    """Return a norm of one row and a product that may start before the norm has ended."""
    x, weight = _random((1, inputs), device), _random((outputs, inputs), device)
    return lambda: operations.linear(operations.rms_norm(x, x[0], 1e-5), weight)


def _shape_of(key: str) -> tuple[int, int, str]:
    """Return what `launch.linear_key` made `key` of."""
    _, weights, shape = key.split("/")
    outputs, inputs = map(int, shape.split("x"))
    return outputs, inputs, weights


def _fp8_product(rows: int, outputs: int, inputs: int, has_blocks: bool, device: torch.device) -> Run:
    x, weight = _random((rows, inputs), device), _random((outputs, inputs), device).to(FLOAT8)
    shape = (outputs // 64, -(-inputs // 128)) if has_blocks else (outputs, 1)
    scale = torch.ones(shape, device=device)
    return lambda: operations.linear(x, weight, None, scale)


def _adapters(count: int, outputs: int, inputs: int, device: torch.device) -> Run:
    """Return a call with tokens of 8 adapters of rank 16 in turns."""
    x, out = _random((count, inputs), device), _random((count, outputs), device)
    a, b = _random((8, 1, 16, inputs), device), _random((8, 16, outputs), device)
    slots = (torch.arange(count, device=device) % 8).int()
    return lambda: operations.add_adapters(out, x, slots, a, b, [outputs])


def _attention(
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    cache_dtype: torch.dtype = torch.bfloat16,
    in_graph_of: int = 0,
) -> Run:
    """Return attention in a step of `rows`; with `in_graph_of`, in a graph of so many rows, which may be more."""
    metadata, num_blocks = scattered_step(rows, BLOCK_SIZE, device)
    num_tokens = sum(queries for queries, _ in rows)
    if in_graph_of:
        counts = torch.tensor([metadata.num_decodes, len(rows)], dtype=torch.int32, device=device)
        of_rows = torch.nn.functional.pad(metadata.seq_lens, (0, in_graph_of - len(rows)))
        metadata = metadata._replace(num_decodes=0, seq_lens=of_rows, row_counts=counts)
        num_tokens = max(num_tokens, in_graph_of)
    q = _random((num_tokens, heads, head_dim), device)
    caches = _random((2, num_blocks, BLOCK_SIZE, kv_heads, head_dim), device).to(cache_dtype).unbind()
    return lambda: operations.paged_attention(q, *caches, metadata, head_dim**-0.5)


def _rotation(count: int, device: torch.device) -> Run:
    q, k, v = _random((count, 48, 128), device).split((32, 8, 8), 1)
    table = _random((4096, 128), device)
    caches = torch.empty(2, -(-count // BLOCK_SIZE), BLOCK_SIZE, 8, 128, dtype=torch.bfloat16, device=device).unbind()
    cells = torch.arange(count, device=device)
    return lambda: operations.rotary_write_kv(q, k, v, cells, table, *caches, cells)


def _draw(logits: Tensor) -> Run:
    uniform = torch.full((len(logits),), 0.45, dtype=torch.float64, device=logits.device)
    params = draw_params([{"temperature": 0.9, "top_k": 50, "top_p": 0.9}] * len(logits), uniform)
    return lambda: operations.sample(logits, params)


def seconds(run: Run, device: torch.device) -> float:
    """Return the seconds of one run; on a GPU, the median of many."""
    if device.type == "cuda":
        return triton.testing.do_bench(run, warmup=10, rep=40, return_mode="median") / 1e3
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def candidates(key: str, before: launch.Options, quick: bool) -> list[launch.Options]:
    """Return the options to try for an entry, the present ones first; options without candidates stay."""
    # Entries of the interpreter have fewer options.
    values = {name: tried for name, tried in CANDIDATES[key.split("/")[0]].items() if name in before}
    found = [{**before, **dict(zip(values, chosen, strict=True))} for chosen in itertools.product(*values.values())]
    return [before, *(options for options in (found[:2] if quick else found) if options != before)]


def compiled(options: launch.Options, key: str, capability: tuple[int, int], table: dict[str, Any]) -> tuple[str, str]:
    """Return a hash of the code that an entry compiles with `options`, and why it cannot be fast, or ""."""
    from vllm_mp.testing.compiled_kernels import compiling, read_code

    try:
        with compiling(capability, {**table, key: options}) as compiler:
            for run in cases(key, torch.device("cpu"), quick=False):
                run()
        codes = [read_code(kernel, capability) for kernel in compiler.kernels.values()]
    except Exception as error:  # the compiler raises many types, and other candidates may compile
        return "", f"{type(error).__name__}: {str(error).splitlines()[-1] if str(error) else ''}"
    digest = hashlib.sha256(b"".join(kernel.asm["cubin"] for kernel in compiler.kernels.values())).hexdigest()
    digest += f" in {options.get('PARTS', 1)} parts"  # which are programs of the same code
    spills, programs = sum(code.spills for code in codes), min(code.programs for code in codes)
    if any(code.unswizzled for code in codes):
        return digest, "rows of a tile in the same banks of the shared memory"
    if spills:
        return digest, f"{spills} spills"
    if programs < LEAST_PROGRAMS.get(key.split("/")[0], 2):
        return digest, f"{programs} programs per multiprocessor"
    return digest, ""


def worth_timing(
    key: str, tried: list[launch.Options], table: dict[str, launch.Options], device: torch.device, pool: Pool
) -> Iterable[launch.Options]:
    """Yield the first of `tried`, with which the others are compared, and those that may be faster."""
    capability = torch.cuda.get_device_capability(device)
    compile_with = functools.partial(compiled, key=key, capability=capability, table=dict(table))
    known: set[str] = set()
    for i, (options, (digest, problem)) in enumerate(zip(tried, pool.map(compile_with, tried), strict=True)):
        problem = problem or ("same code as another candidate" if digest in known else "")
        known.add(digest)
        if i == 0 or not problem:
            yield options
        else:
            print(f"{key}: {dict(options)} dropped: {problem}", file=sys.stderr, flush=True)


def best(key: str, device: torch.device, quick: bool, pool: Pool | None) -> tuple[launch.Options, float]:
    """Return the fastest options of an entry, and their time as a share of the time with the options before.

    `pool` compiles the candidates; None: none is dropped before it is timed.
    """
    table = launch.table(device)
    before = _present(key, device)
    tried: Iterable[launch.Options] = candidates(key, before, quick)
    # Options of the grid do not change the code.
    if pool is not None and "num_warps" in before:
        tried = list(worth_timing(key, list(tried), table, device, pool))
    runs = list(cases(key, device, quick))
    times: list[tuple[float, launch.Options]] = []
    for options in tried:
        table[key] = options
        try:
            spent = [seconds(run, device) for run in runs]
        except TritonError as error:
            print(f"{key}: {dict(options)} dropped: {error}", file=sys.stderr, flush=True)
            continue
        times.append((math.exp(sum(map(math.log, spent)) / len(spent)), options))
    if not times:
        table[key] = before
        raise RuntimeError(f"no options of {key} fit this GPU; add smaller tiles to CANDIDATES")
    least, options = min(times, key=lambda timed: timed[0])
    table[key] = options
    return options, least / times[0][0]


def _present(key: str, device: torch.device) -> launch.Options:
    """Return the options that an entry has; the kernel for products of few rows takes all of them."""
    if not key.startswith("linear/"):
        return launch.table(device)[key]
    return {**launch.linear_options(*_shape_of(key), device), "MAX_ROWS": max(FEW_ROWS)}


def limit_rows(key: str, device: torch.device, quick: bool) -> None:
    """Set MAX_ROWS of a product of few rows to the rows up to which the kernel takes no longer than without it."""
    table = launch.table(device)
    options, most = table[key], 0
    for rows in FEW_ROWS[:1] if quick else FEW_ROWS:
        run, spent = _product(rows, key, device), []
        for limit in (rows, 0):
            table[key] = {**options, "MAX_ROWS": limit}
            spent.append(seconds(run, device))
        print(f"{key}, {rows} rows: {1e6 * spent[0]:.1f} µs, {1e6 * spent[1]:.1f} without", file=sys.stderr, flush=True)
        if spent[0] > spent[1]:
            break
        most = rows
    table[key] = {**options, "MAX_ROWS": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to save (default: where the kernels look)")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="entries to tune, or kinds: decode/8/128, or decode")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try this tool in the interpreter")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and two candidates, to try this tool")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds after which no entry is begun")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile (default: %(default)s)")
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    begun, keys = time.monotonic(), entries(device, arguments.quick)
    unknown = {*(arguments.only or ())} - {*CANDIDATES, *keys}
    if unknown:
        parser.error(f"--only: no such entry: {', '.join(sorted(unknown))}; kinds are {', '.join(CANDIDATES)}")
    out = arguments.out or launch.tuned_file(torch.cuda.get_device_capability(device))
    tuned: dict[str, launch.Options] = json.loads(out.read_text()) if out.exists() else {}
    has_float8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    is_cuda = device.type == "cuda"
    pool = multiprocessing.get_context("spawn").Pool(arguments.processes) if is_cuda else None
    for key in keys:
        kind, *details = key.split("/")
        if not has_float8 and (kind.startswith("fp8") or "8" in details):
            continue
        if arguments.only is None:
            is_chosen = kind not in ("prefill", "decode") or details[0] != "32"
        else:
            is_chosen = key in arguments.only or kind in arguments.only
        if not is_chosen:
            continue
        if time.monotonic() - begun > arguments.budget_s:
            print(f"{key}: left out for lack of time", file=sys.stderr, flush=True)
            continue
        options, share = best(key, device, arguments.quick, pool)
        if kind == "linear":
            limit_rows(key, device, arguments.quick)
            options = launch.table(device)[key]
        tuned[key] = dict(options)
        print(f"{key}: {dict(options)}, {share:.0%} of the time before", file=sys.stderr, flush=True)
        write_output(out, json.dumps(tuned, indent=1) + "\n")


if __name__ == "__main__":
    main()
