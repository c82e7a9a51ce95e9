#!/usr/bin/env python3
"""Measure what a step takes on a CPU to draw tokens from logits, and to make their log-probabilities.

The logits fall with the logarithm of a token's rank, about as a language model's do. Prints one JSON object: for
each number of rows and case, the milliseconds in each round, by the C++ kernels and by their definition in torch. The
two take turns.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vllm_mp.kernels import ops, sampling
from vllm_mp.testing.measuring.call_timing import median_ms
from vllm_mp.testing.sampling_cases import draw_params

DRAWS: Final[dict[str, dict[str, Any]]] = {
    "temperature": {},
    "top_k 20, top_p 0.95": {"top_k": 20, "top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
}
NUM_LOGPROBS: Final = 5
IMPLEMENTATIONS: Final = {"C++": ops, "torch": sampling}


def random_logits(num_rows: int, vocab_size: int) -> Tensor:
    """Return logits float32 [num_rows, vocab_size]; without filters, 19 of 49,152 tokens have 95 % of the chances."""
    generator = torch.Generator().manual_seed(0)
    by_rank = 10 - 1.5 * torch.arange(1, vocab_size + 1).float().log()
    rows = [by_rank[torch.randperm(vocab_size, generator=generator)] for _ in range(num_rows)]
    return torch.stack(rows)


def calls_of(logits: Tensor, knobs: Mapping[str, Any] | None) -> dict[str, Callable[[], object]]:
    """Return the calls to compare: draws with `knobs` at temperature 0.8, or without knobs log-probabilities."""
    if knobs is None:
        chosen = logits.argmax(dim=-1)
        return {name: lambda of=of: of.logprobs(logits, chosen, NUM_LOGPROBS) for name, of in IMPLEMENTATIONS.items()}
    uniform = torch.rand(len(logits), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = draw_params([{"temperature": 0.8, **knobs}] * len(logits), uniform)
    return {name: lambda of=of: of.sample(logits, params) for name, of in IMPLEMENTATIONS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=49_152, help="%(default)s, the default model's")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="default: 1 16 64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each case and round (%(default)s)")
    args = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    for num_rows in args.rows:
        logits = random_logits(num_rows, args.vocab_size)
        for name, knobs in {**DRAWS, f"{NUM_LOGPROBS} log-probabilities": None}.items():
            times: dict[str, list[float]] = {implementation: [] for implementation in IMPLEMENTATIONS}
            for _ in range(args.rounds):
                for implementation, call in calls_of(logits, knobs).items():
                    times[implementation].append(round(median_ms(call, args.seconds, num_warm=2), 3))
            found[f"{num_rows} rows, {name}"] = times
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
