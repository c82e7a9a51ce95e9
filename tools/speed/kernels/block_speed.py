#!/usr/bin/env python3
"""Measure products with weights in block types on a CPU, beside bfloat16 weights and what the memory allows.

Prints a table in Markdown for each shape: for each number of rows the milliseconds of bfloat16 weights and, as
multiples of their speed, the speed of each block type; for one row also the share of the bandwidth of reading that the
weights' bytes are read with. All cases take turns in each round; the figures are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockWeight
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.cpu.packed import PackedLinear

CACHE_BYTES = 150 * 10**6
"""The least memory that products read before they read the same weights again: more than the caches hold."""
DTYPE = torch.bfloat16


class Case:
    """Matrices of one shape and type, multiplied in turns, so that none of them is in a cache."""

    def __init__(self, num_bytes: int, make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        self.num_bytes = num_bytes
        self.products = [make() for _ in range(-(-CACHE_BYTES // num_bytes))]

    def seconds(self, x: Tensor) -> float:
        """Return the time of one product."""
        products = self.products if len(x) <= 64 else self.products[:1]
        started = time.perf_counter()
        for product in products:
            product(x)
        return (time.perf_counter() - started) / len(products)


def cases(names: list[str], outputs: int, inputs: int) -> dict[str, Case]:
    """Return a case for bfloat16 and for each block type that the number of inputs allows."""
    kernels = library()
    if kernels is None:
        raise SystemExit("the C++ kernels are not built; install a C++ compiler, and then this package again")
    weight = torch.randn(outputs, inputs).to(DTYPE)
    made = {"bfloat16": Case(2 * weight.numel(), lambda: PackedLinear(kernels, weight, None))}
    for name in names:
        block_type = BLOCK_TYPES[name]
        if inputs % block_type.weights == 0:
            size = inputs // block_type.weights * block_type.num_bytes

            def make(block_type=block_type, size=size):
                data = torch.randint(256, (outputs, size), dtype=torch.uint8)
                weight = BlockWeight(data, block_type, inputs, release=lambda: None)  # as of a mapped file
                return BlockLinear(kernels, [weight], None, DTYPE)

            made[name] = Case(outputs * size, make)
    return made


def bandwidth(memory: Tensor) -> float:
    """Return the bytes per second with which all threads read `memory`."""
    started = time.perf_counter()
    memory.sum()
    return memory.nbytes / (time.perf_counter() - started)


def measure(names: list[str], outputs: int, inputs: int, all_rows: list[int], rounds: int, memory: Tensor) -> None:
    """Print the table of one shape."""
    of_shape = cases(names, outputs, inputs)
    table = [["type", "bits per weight", *(f"{rows} rows" for rows in all_rows), "of the bandwidth"]]
    table += [["---"] * len(table[0])]
    lines = {name: [name, f"{8 * case.num_bytes / outputs / inputs:.3g}"] for name, case in of_shape.items()}
    shares = {}
    for rows in all_rows:
        x = torch.randn(rows, inputs).to(DTYPE)
        times: dict[str, list[float]] = {name: [] for name in of_shape}
        rates = []
        for _ in range(rounds):
            for name, case in of_shape.items():
                times[name].append(case.seconds(x))
            rates.append(bandwidth(memory))
        medians = {name: statistics.median(of_case) for name, of_case in times.items()}
        for name, case in of_shape.items():
            speed = f"{medians['bfloat16'] / medians[name]:.2f}"
            lines[name].append(f"{1e3 * medians[name]:.3g} ms" if name == "bfloat16" else speed)
            if rows == 1:
                share = case.num_bytes / medians[name] / statistics.median(rates)
                shares[name] = f"{100 * share:.0f} %"
    table += [[*line, shares.get(name, "")] for name, line in lines.items()]
    print(f"\n{outputs} outputs, {inputs} inputs\n")
    print("\n".join(f"| {' | '.join(line)} |" for line in table), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=BLOCK_TYPES, default=list(BLOCK_TYPES), help="block types")
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["49152x576", "3072x576", "576x1536", "14336x4096", "4096x14336"],
        help="outputs and inputs of the matrices",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 512], help="rows of a product")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which the cases take turns")
    args = parser.parse_args()
    memory = torch.ones(CACHE_BYTES // 2)
    print(f"{torch.get_num_threads()} threads, reading {bandwidth(memory) / 1e9:.1f} GB/s")
    for shape in args.shapes:
        outputs, inputs = map(int, shape.split("x"))
        measure(args.types, outputs, inputs, args.rows, args.rounds, memory)


if __name__ == "__main__":
    main()
