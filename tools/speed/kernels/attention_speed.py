#!/usr/bin/env python3
"""Measure paged attention over scattered blocks, and torch's own attention over contiguous keys and values.

Prints one JSON object, `{"steps": [...]}`: for each step the seconds of both, and the least number of bytes and
operations that it needs. Heads have the shapes of Llama-3.1-8B. On a GPU, captured graphs are timed, without launches.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels import ops
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.measuring.graph_timing import seconds

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Case(NamedTuple):
    """A step of equal rows; lengths in tokens."""

    num_rows: int
    queries: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.queries == 1 else "prefill"
        return f"{kind} {self.num_rows} x {self.queries} of {self.context}"

    def least(self, itemsize: int) -> dict[str, int]:
        """Return the bytes that must be moved, with each key and value read once, and the operations."""
        elements = 2 * KV_HEADS * self.context + 2 * HEADS * self.queries
        seen = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return {
            "memory_bytes": self.num_rows * elements * HEAD_DIM * itemsize,
            "flops": self.num_rows * 4 * HEADS * HEAD_DIM * seen,
        }


FULL = [
    *(Case(rows, 1, context) for rows, context in ((1, 32_768), (16, 4096), (64, 2048), (256, 1024))),
    *(Case(rows, queries, context) for rows, queries, context in ((1, 2048, 2048), (16, 512, 512), (1, 2048, 8192))),
]
QUICK = [Case(2, 1, 40), Case(2, 20, 20), Case(1, 8, 40)]


def paged(case: Case, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of our attention."""
    metadata, num_blocks = scattered_step([(case.queries, case.context)] * case.num_rows, BLOCK_SIZE, device)
    q = torch.randn(case.num_rows * case.queries, HEADS, HEAD_DIM, dtype=dtype, device=device)
    caches = torch.randn(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype, device=device).unbind()
    return lambda: ops.paged_attention(q, *caches, metadata, HEAD_DIM**-0.5)


def contiguous(case: Case, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor] | None:
    """Return a call of torch's attention; None for chunks after others, whose mask rules out its best kernel."""
    if 1 < case.queries < case.context:
        return None
    q = torch.randn(case.num_rows, HEADS, case.queries, HEAD_DIM, dtype=dtype, device=device)
    k, v = torch.randn(2, case.num_rows, KV_HEADS, case.context, HEAD_DIM, dtype=dtype, device=device).unbind()
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.queries > 1, enable_gqa=True)


@torch.inference_mode()
def measure(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the record of one step."""
    theirs = contiguous(case, dtype, device)
    return {
        "step": case.name,
        "seconds": seconds(paged(case, dtype, device), device),
        "sdpa_seconds": None if theirs is None else seconds(theirs, device),
        **case.least(dtype.itemsize),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="small steps, to try this tool")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    print(json.dumps({"steps": [measure(case, dtype, device) for case in (QUICK if args.quick else FULL)]}))


if __name__ == "__main__":
    main()
