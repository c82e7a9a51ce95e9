#!/usr/bin/env python3
"""Measure what LoRA adapters cost: steps of the model alone, with an adapter for all requests, and with several.

Prints one JSON object: for decodes and prefills, the median seconds of a step and its ratio to the step of the model
alone. Each round measures all cases one after the other. Adapters are random and change all linear layers.
"""

import argparse
import itertools
import json
import statistics
import time
from typing import Any, cast

import torch
from torch import Tensor

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.lora.slots import AdapterSlots
from vllm_mp.core.lora.targets import projections
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.worker.device import choose_device, choose_dtype, choose_threads
from vllm_mp.kernels.ops import Factors
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.testing.attention_steps import scattered_step

BLOCK_SIZE = 16


def random_adapter(arch: NativeArchitecture, rank: int, dtype: torch.dtype) -> Adapter:
    factors = {
        part: Factors((0.01 * torch.randn(rank, found.inputs)).to(dtype), (0.01 * torch.randn(size, rank)).to(dtype))
        for found in projections(arch)
        for part, size in zip(found.parts, found.outputs, strict=True)
    }
    return Adapter(factors, sum(tensor.nbytes for pair in factors.values() for tensor in pair))


class Steps:
    """A model, and steps of equal rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        config = AsyncEngineArgs(
            args.model,
            dtype=args.dtype,
            device=args.device,
            quantization=args.quantization,
            skip_tokenizer_init=True,
        ).create_engine_config()
        self.device = choose_device(config)
        self.dtype = choose_dtype(config, self.device)
        torch.set_num_threads(choose_threads(config))
        self.model: Any = load_model(config.model_config, self.dtype, self.device)
        self.arch = cast("NativeArchitecture", config.model_config.architecture)
        slots = AdapterSlots(self.arch, args.adapters, args.max_rank or args.rank)
        slots.bind(self.model)
        for slot in range(args.adapters):
            slots.load(slot, random_adapter(self.arch, args.rank, self.dtype))

    @torch.inference_mode()
    def seconds(self, rows: list[tuple[int, int]], num_adapters: int) -> float:
        """Return the time of a step in which row i has the adapter i modulo `num_adapters`, if that is not 0."""
        metadata, num_blocks = scattered_step(rows, BLOCK_SIZE, self.device)
        slots = (
            [i % num_adapters for i, (queries, _) in enumerate(rows) for _ in range(queries)] if num_adapters else []
        )
        if slots:
            metadata = metadata._replace(adapter_slots=torch.tensor(slots, dtype=torch.int32, device=self.device))
        caches = [
            tuple(torch.zeros(num_blocks, BLOCK_SIZE, *shape, dtype=self.dtype, device=self.device) for shape in layer)
            for layer in self.model.kv_shapes
        ]
        positions = torch.cat([torch.arange(context - queries, context) for queries, context in rows]).to(self.device)
        ends = torch.tensor([*itertools.accumulate(queries for queries, _ in rows)], device=self.device) - 1
        ids = positions % self.arch.vocab_size
        started = time.perf_counter()
        hidden = self.model(ids, positions, caches, metadata)
        tokens: Tensor = self.model.argmax(hidden[ends])
        tokens.tolist()  # waits for the device
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--max-rank", type=int, default=None, help="max_lora_rank; by default the rank")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step of decodes (%(default)s)")
    parser.add_argument("--context", type=int, default=128, help="context of the decodes in tokens (%(default)s)")
    parser.add_argument("--prompts", type=int, default=8, help="rows of a step of prefills (%(default)s)")
    parser.add_argument("--prompt-len", type=int, default=64, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds after two to warm up (%(default)s)")
    args = parser.parse_args()
    steps = Steps(args)
    kinds = {
        "decode": [(1, args.context)] * args.batch,
        "prefill": [(args.prompt_len, args.prompt_len)] * args.prompts,
    }
    spent: dict[tuple[str, int], list[float]] = {case: [] for case in itertools.product(kinds, (0, 1, args.adapters))}
    for _ in range(2 + args.rounds):
        for (kind, num_adapters), seconds in spent.items():
            seconds.append(steps.seconds(kinds[kind], num_adapters))
    medians = {case: statistics.median(seconds[2:]) for case, seconds in spent.items()}
    print(
        json.dumps(
            [
                {
                    "step": kind,
                    "adapters": num_adapters,
                    "seconds": median,
                    "ratio": statistics.median(
                        mine / alone
                        for mine, alone in zip(spent[kind, num_adapters][2:], spent[kind, 0][2:], strict=True)
                    ),
                }
                for (kind, num_adapters), median in medians.items()
            ],
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
