#!/usr/bin/env python3
"""Measure the products of a layer of Llama-3.1-8B and of its head, for 1 to 512 rows.

Prints one JSON object, `{"products": [...]}`: for each product and number of rows the seconds in bfloat16, by the
engine and by torch; the seconds in 8-bit floats, by the engine with the rounding of its inputs, and by torch's product
alone (null on a CPU); and the least bytes and operations. On a GPU, captured graphs are timed, and no weight is still
in the cache of the device.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels import ops
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.testing.measuring.graph_timing import seconds

_WEIGHT_BYTES = 256 * 2**20
"""The 16-bit weights that are read in turns: even half of it, in 8 bits, is more than a device keeps in its cache."""


class Product(NamedTuple):
    """A matrix of the model."""

    name: str
    outputs: int
    inputs: int


FULL = [
    Product("qkv", 6144, 4096),
    Product("o", 4096, 4096),
    Product("gate_up", 28_672, 4096),
    Product("down", 4096, 14_336),
    Product("head", 128_256, 4096),
]
QUICK = [Product("o", 64, 128)]
FULL_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 8)


def _in_turns(weights: list[Tensor], multiply: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    """Return a call that multiplies with each of `weights`, and returns the last product."""

    def run() -> Tensor:
        for weight in weights:
            out = multiply(weight)
        return out

    return run


@torch.inference_mode()
def measure(product: Product, rows: int, device: torch.device, weight_bytes: int) -> dict[str, Any]:
    """Return the record of one product; weights of `weight_bytes` are read in turns."""
    name, outputs, inputs = product
    x = torch.randn(rows, inputs, device=device).bfloat16()
    count = max(1, weight_bytes // (2 * outputs * inputs))
    wide = [torch.randn(outputs, inputs, device=device).bfloat16() for _ in range(count)]
    narrow = [weight.to(FLOAT8) for weight in wide]
    scale = torch.ones(outputs, 1, device=device)

    def time_of(weights: list[Tensor], multiply: Callable[[Tensor], Tensor]) -> float:
        return seconds(_in_turns(weights, multiply), device) / len(weights)

    def scaled(weight: Tensor) -> Tensor:
        return torch._scaled_mm(narrow_x, weight.t(), x_scale, scale.t(), out_dtype=torch.bfloat16)

    narrow_x, x_scale = ops.quantize_rows(x, 1)
    found: dict[str, Any] = {
        "product": name,
        "rows": rows,
        "seconds": time_of(wide, lambda weight: ops.linear(x, weight)),
        "torch_seconds": time_of(wide, lambda weight: F.linear(x, weight)),
        "fp8_seconds": time_of(narrow, lambda weight: ops.linear(x, weight, None, scale)),
        "memory_bytes": 2 * (outputs * inputs + rows * (outputs + inputs)),
        "fp8_memory_bytes": outputs * inputs + 2 * rows * (outputs + inputs),
        "flops": 2 * rows * outputs * inputs,
    }
    found["fp8_torch_seconds"] = time_of(narrow, scaled) if device.type == "cuda" else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small product, to try this tool")
    args = parser.parse_args()
    products, rows, weight_bytes = (QUICK, QUICK_ROWS, 0) if args.quick else (FULL, FULL_ROWS, _WEIGHT_BYTES)
    device = torch.device(args.device)
    print(json.dumps({"products": [measure(one, count, device, weight_bytes) for one in products for count in rows]}))


if __name__ == "__main__":
    main()
