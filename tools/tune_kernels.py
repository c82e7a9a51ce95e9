#!/usr/bin/env python3
"""Find the fastest launch options of the Triton kernels on this GPU, and save them.

The file lies beside kernels/triton/launch.py, is named after the compute capability, and is read by the kernels from
then on. For each entry of the launch table, every candidate is timed over the shapes of some models, and the candidate
with the least geometric mean of its times is kept. Candidates that do not fit into the GPU's memory are skipped.
Float32, which is rarely used on a GPU, keeps its options. Most of the time is compilation; `--only` tunes some kernels
and adds to the file.
"""

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton import launch, operations
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.sampling_cases import draw_params

BLOCK_SIZE = 16
Run = Callable[[], Any]

CANDIDATES: dict[str, dict[str, list[int]]] = {
    "prefill": {"ROWS": [64, 128], "KEYS": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]},
    "decode": {"KEYS": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3, 4]},
    "merge": {"num_warps": [1, 2, 4, 8]},
    "splits": {"PROGRAMS": [1, 2, 3, 4, 6], "TOKENS": [64, 128, 256, 512]},
    "fp8": {"ROWS": [16, 32, 64, 128], "OUTPUT_TILE": [32, 64, 128], "num_warps": [4, 8], "num_stages": [3, 4, 6]},
    "fp8_parts": {"PROGRAMS": [1, 2, 3, 4], "TILES": [2, 4, 8]},
    "fp8_library": {"ROWS": [0, 16, 32, 64, 128]},
    "lora_shrink": {"ROWS": [16, 32, 64], "INPUT_TILE": [64, 128, 256], "num_warps": [4, 8], "num_stages": [2, 3]},
    "lora_expand": {"ROWS": [16, 32, 64], "OUTPUT_TILE": [64, 128, 256], "num_warps": [4, 8], "num_stages": [2, 3]},
    "norm": {"ELEMENTS": [1024, 2048, 4096], "num_warps": [2, 4, 8, 16]},
    "elementwise": {"ELEMENTS": [512, 1024, 2048, 4096], "num_warps": [2, 4, 8]},
    "heads": {"ELEMENTS": [512, 1024, 2048, 4096], "num_warps": [1, 2, 4, 8]},
    "argmax": {"ELEMENTS": [1024, 2048, 4096, 8192], "num_warps": [4, 8, 16]},
    "sample": {"ELEMENTS": [2048, 4096, 8192], "num_warps": [8, 16, 32]},
}
"""The values to try, by kind of kernel: the first part of the keys of its entries."""


def cases(key: str, device: torch.device, quick: bool) -> Iterator[Run]:
    """Yield the calls by which an entry of the launch table is timed."""
    kind, *details = key.split("/")
    tokens = [4] if quick else [1, 64, 2048]
    if kind in ("prefill", "decode"):
        for rows in _attention_rows(kind, quick):
            cache_dtype = FLOAT8 if details[0] == "8" else torch.bfloat16
            yield _attention(rows, 8, 2, int(details[1]), device, cache_dtype)
    elif kind.startswith("fp8"):
        # torch takes over large products unless weights have block scales.
        most = int(details[0]) if details else 64
        for count in [4] if quick else [most // 2, most] if most < 128 else [128, 2048]:
            for outputs, inputs in [(64, 256)] if quick else [(6144, 4096), (4096, 14_336), (28_672, 4096)]:
                yield _fp8_product(count, outputs, inputs, most == 128, device)
    elif kind.startswith("lora"):
        few = int(details[0]) == 16
        for count in [4 if few else 20] if quick else [1, 16] if few else [64, 2048]:
            for outputs, inputs in [(64, 256)] if quick else [(4096, 4096), (4096, 14_336), (14_336, 4096)]:
                yield _adapters(count, outputs, inputs, device)
    elif kind in ("merge", "splits"):
        for rows in _attention_rows("decode", quick):
            yield _attention(rows, 8, 2, 128, device)
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
    return torch.randn(shape, device=device).bfloat16()


def _fp8_product(rows: int, outputs: int, inputs: int, has_blocks: bool, device: torch.device) -> Run:
    x, weight = _random((rows, inputs), device), _random((outputs, inputs), device).to(FLOAT8)
    shape = (outputs // 64, -(-inputs // 128)) if has_blocks else (outputs, 1)
    scale = torch.ones(shape, device=device)
    return lambda: operations.fp8_linear(x, weight, scale)


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
) -> Run:
    metadata, num_blocks = scattered_step(rows, BLOCK_SIZE, device)
    num_tokens = sum(queries for queries, _ in rows)
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


def best(key: str, device: torch.device, quick: bool) -> tuple[launch.Options, float]:
    """Return the fastest options of an entry, and their time as a share of the time with the options before."""
    table = launch.table(device)
    before = table[key]
    runs = list(cases(key, device, quick))
    values = CANDIDATES[key.split("/")[0]]
    candidates = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    # An entry keeps its own option names; entries of the interpreter have fewer.
    candidates = [{name: value for name, value in candidate.items() if name in before} for candidate in candidates]
    times: list[tuple[float, launch.Options]] = []
    for options in [before, *(candidates[:2] if quick else candidates)]:
        table[key] = options
        try:
            spent = [seconds(run, device) for run in runs]
        except triton.OutOfResources:
            continue
        times.append((math.exp(sum(map(math.log, spent)) / len(spent)), options))
    if not times:
        table[key] = before
        raise RuntimeError(f"no options of {key} fit this GPU; add smaller tiles to CANDIDATES")
    least, options = min(times, key=lambda timed: timed[0])
    table[key] = options
    return options, least / times[0][0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to save (default: where the kernels look)")
    parser.add_argument("--only", nargs="+", metavar="KIND", choices=CANDIDATES, help="kinds of kernels to tune")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try this tool in the interpreter")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and two candidates, to try this tool")
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    out = arguments.out or launch.tuned_file(torch.cuda.get_device_capability(device))
    tuned: dict[str, launch.Options] = json.loads(out.read_text()) if out.exists() else {}
    has_float8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
    for key in list(launch.table(device)):
        kind, *details = key.split("/")
        if not has_float8 and (kind.startswith("fp8") or "8" in details):
            continue
        if (arguments.only and kind not in arguments.only) or (kind in ("prefill", "decode") and details[0] == "32"):
            continue
        options, share = best(key, device, arguments.quick)
        tuned[key] = dict(options)
        print(f"{key}: {dict(options)}, {share:.0%} of the time before", file=sys.stderr, flush=True)
        out.write_text(json.dumps(tuned, indent=1) + "\n")


if __name__ == "__main__":
    main()
