#!/usr/bin/env python3
"""Measure the best rates of a device: bytes read, bytes copied, and operations of a matrix product, per second.

Prints one JSON object, which also describes the device. No engine on this device can be faster than these rates.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 7
_WARM_UP_ROUNDS = 2
_OPERATIONS_PER_ROUND = 8


def describe(device: str) -> dict[str, Any]:
    """Return PyTorch's description of the device; memory in bytes."""
    if device == "cpu":
        return {"name": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def copy_bytes_per_s(device: str, size: int) -> float:
    """Measure a copy of `size` bytes within the device. Bytes read and bytes written both count."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def read_bytes_per_s(device: str, size: int) -> float:
    """Measure a sum over `size` bytes."""
    source = torch.ones(size // 4, device=device)
    return size / _median_seconds(lambda: source.sum(), device)


def matmul_flops_per_s(device: str, size: int, dtype: torch.dtype) -> float:
    """Measure the product of two random matrices [size, size] of type `dtype`."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    out = torch.empty_like(a)
    return 2 * size**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device)


def _median_seconds(operation: Callable[[], Any], device: str) -> float:
    """Return the time of one operation. A round runs several, so that launch and synchronization do not count."""
    rounds = []
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(_OPERATIONS_PER_ROUND):
            operation()
        _synchronize(device)
        rounds.append((time.perf_counter() - started) / _OPERATIONS_PER_ROUND)
    return statistics.median(rounds[_WARM_UP_ROUNDS:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--copy-bytes", type=int, default=4 * 2**30, help="bytes to copy (%(default)s)")
    parser.add_argument("--matrix-size", type=int, default=8192, help="rows of the matrices (%(default)s)")
    args = parser.parse_args()
    result = {
        "device": describe(args.device),
        "read_bytes_per_s": read_bytes_per_s(args.device, args.copy_bytes),
        "copy_bytes_per_s": copy_bytes_per_s(args.device, args.copy_bytes),
        "matmul_flops_per_s": matmul_flops_per_s(args.device, args.matrix_size, getattr(torch, args.dtype)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
