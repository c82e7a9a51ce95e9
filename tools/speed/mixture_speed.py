#!/usr/bin/env python3
"""Measure steps of a mixture of experts on a CPU: with fused layers, and operation by operation as on several ranks.

Both have the same random weights, of a small mixture or of the config.json in --folder, and take turns. Prints one JSON
object: for each kind of weights and each step, the milliseconds of a step in each round, by the way it is computed.
"""

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from vllm_mp.core.models import build_model
from vllm_mp.core.models.linear import pack_projections
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.measuring.call_timing import median_ms

SMALL: Final = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
WEIGHTS: Final = ("bfloat16", "int8", "int4")
"""What the weights are rounded to; activations are bfloat16."""
BLOCK_SIZE: Final = 16


def models(arch: Any, weights: str) -> dict[str, Any]:
    """Return the same model, packed for each way to compute it."""
    quantization = "int8" if weights == "int8" else None
    fused = build_model(
        msgspec.structs.replace(arch, blocks="int4") if weights == "int4" else arch, torch.bfloat16, "cpu"
    )
    fill_with_dummy_weights(fused, 0)
    by_operation = copy.deepcopy(fused)
    fused.pack(quantization, torch.bfloat16)
    pack_projections(by_operation, quantization)
    return {"fused": fused, "by operation": by_operation}


def step(model: Any, rows: list[tuple[int, int]]) -> Callable[[], object]:
    """Return a call that computes the hidden states of rows of (query tokens, context)."""
    metadata, num_blocks = scattered_step(rows, BLOCK_SIZE, "cpu")
    caches = [
        tuple(torch.zeros(num_blocks, BLOCK_SIZE, *shape, dtype=torch.bfloat16) for shape in layer)
        for layer in model.kv_shapes
    ]
    positions = torch.cat([torch.arange(context - queries, context) for queries, context in rows])
    ids = torch.randint(model.arch.vocab_size, (len(positions),), generator=torch.Generator().manual_seed(0))
    return lambda: model(ids, positions, caches, metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with the config.json of another mixture")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="default: all")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="streams that decode together")
    parser.add_argument("--context", type=int, default=128, help="context of the decodes in tokens (%(default)s)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each case and round (%(default)s)")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    arch = read_architecture(SMALL if args.folder is None else json.loads((args.folder / "config.json").read_text()))
    steps = {f"decode, {batch} streams": [(1, args.context)] * batch for batch in args.batches}
    steps |= {f"prompt of {count} tokens": [(count, count)] for count in args.prompts}
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for weights in args.weights:
        ways = models(arch, weights)
        found[weights] = {name: {way: [] for way in ways} for name in steps}
        for _ in range(args.rounds):
            for name, rows in steps.items():
                for way, model in ways.items():
                    found[weights][name][way].append(round(median_ms(step(model, rows), args.seconds, num_warm=5), 3))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
