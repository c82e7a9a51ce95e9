#!/usr/bin/env python3
"""Measure `model.generate` of transformers in tokens per second: batches that decode, and single prompts.

Prints one JSON object, `{"decode": {batch: rate}, "prefill": {length: rate}}`. The decode rate excludes the prefill.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def load(folder: str, dummy: bool, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in `folder`, or with `dummy` a model of its configuration with random weights."""
    if not dummy:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()


def seconds(model: PreTrainedModel, batch: int, prompt_len: int, output_len: int) -> float:
    """Return the time from random prompts to the last token."""
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt_len), device=model.device)
    begun = time.perf_counter()
    # `tolist` copies the tokens to the host and so waits for the device.
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=output_len,
        max_new_tokens=output_len,
        pad_token_id=0,
    ).tolist()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder with the model, or with config.json only")
    parser.add_argument("--dummy", action="store_true", help="use random weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="numbers of streams that decode together")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths of prompts that are computed alone")
    parser.add_argument("--prompt-len", type=int, default=128, help="prompt tokens of each stream (%(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="output tokens of each stream (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="measured rounds after one to warm up; medians count (%(default)s)"
    )
    args = parser.parse_args()
    model = load(args.folder, args.dummy, args.device, getattr(torch, args.dtype))

    def median(*sizes: int) -> float:
        return statistics.median([seconds(model, *sizes) for _ in range(1 + args.rounds)][1:])

    decode = {}
    for batch in args.batches:
        spent = median(batch, args.prompt_len, args.output_len + 1) - median(batch, args.prompt_len, 1)
        decode[batch] = batch * args.output_len / spent
    print(json.dumps({"decode": decode, "prefill": {length: length / median(1, length, 1) for length in args.prompts}}))


if __name__ == "__main__":
    main()
