#!/usr/bin/env python3
"""Measure decodes on a CPU over KV caches of several types: steps of a model's fused layers, without a client.

The model has random weights and the shapes of the default model, SmolLM2-135M, or of the config.json in --folder.
Prints one JSON object: for each context and number of streams, the milliseconds of a step in each round, by the cache's
type. The types take turns.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vllm_mp.core.models import build_model
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import int8_cache
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.measuring.call_timing import median_ms

SMOLLM2: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
}
BLOCK_SIZE: Final = 16


def packed_model(arch: Any, dtype: torch.dtype) -> Any:
    model: Any = build_model(arch, dtype, "cpu")
    fill_with_dummy_weights(model, 0)
    model.pack(None, dtype)
    return model


def decode(model: Any, streams: int, context: int, dtype: torch.dtype) -> Callable[[], object]:
    """Return a call that computes a decode of `streams` streams over caches of `dtype`."""
    metadata, num_blocks = scattered_step([(1, context)] * streams, BLOCK_SIZE, "cpu")

    def cache(shape: tuple[int, int]) -> Tensor:
        new = torch.empty(num_blocks, BLOCK_SIZE, *shape, dtype=dtype)
        new.view(torch.uint8).fill_(0x3C)  # a small number in every type, and a scale of 0.01
        return new

    caches = [tuple(cache(shape) for shape in layer) for layer in int8_cache.stored_shapes(model.kv_shapes, dtype)]
    positions = torch.full((streams,), context - 1)
    return lambda: model(positions % 1000, positions, caches, metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with the config.json of another model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: float32")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8000], help="default: 512 2048 8000")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], help="default: 1 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case and round (%(default)s)")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    dtype = getattr(torch, args.dtype)
    model = packed_model(
        read_architecture(SMOLLM2 if args.folder is None else json.loads((args.folder / "config.json").read_text())),
        dtype,
    )
    found: dict[str, dict[str, list[float]]] = {}
    for context in args.contexts:
        for streams in args.streams:
            times: dict[str, list[float]] = {args.dtype: [], "int8": []}
            calls = {name: decode(model, streams, context, getattr(torch, name)) for name in times}
            for _ in range(args.rounds):
                for name, call in calls.items():
                    times[name].append(round(median_ms(call, args.seconds, num_warm=2), 2))
            found[f"{streams} streams, context {context}"] = times
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
