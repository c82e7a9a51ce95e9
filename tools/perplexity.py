"""Measure what quantization costs in accuracy: the perplexity of a text for the unquantized and the quantized model.

The weights are quantized by default (`--quantization int8`); with `--kv-cache-dtype fp8` the KV cache is, or both are.
The text is split into windows of tokens, which the engine scores by its log-probabilities of a prompt.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

WINDOW = 1024
CHARACTERS = 30_000


def reference_text() -> str:
    """Return English text that every Python contains: the beginning of the language reference that `help()` shows."""
    return "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]


async def perplexity(engine: AsyncLLM, text: str) -> tuple[float, int]:
    """Return the perplexity of `text`, and the number of scored tokens: all but the first of each window."""
    ids = (await engine.get_tokenizer()).encode(text)
    window = min(WINDOW, engine.model_config.max_model_len - 1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for start in range(0, len(ids), window):
        piece = ids[start : start + window]
        async for output in engine.generate({"prompt_token_ids": piece}, params):
            scores = output.prompt_logprobs
        for token, logprobs in zip(piece[1:], scores[1:], strict=True):
            total += logprobs[token].logprob
            count += 1
    return math.exp(-total / count), count


def measure(args: AsyncEngineArgs, text: str) -> tuple[float, int]:
    """Return what `perplexity` returns for an engine with these options."""
    engine = AsyncLLM.from_engine_args(args)
    try:
        return asyncio.run(perplexity(engine, text))
    finally:
        engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="file with the text (part of Python's language reference)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_requests=True)
    args = parser.parse_args()
    if args.quantization is None and args.kv_cache_dtype == "auto":
        args.quantization = "int8"
    quantized = AsyncEngineArgs.from_cli_args(args)
    text = args.text.read_text() if args.text else reference_text()
    plain, count = measure(dataclasses.replace(quantized, quantization=None, kv_cache_dtype="auto"), text)
    reduced, _ = measure(quantized, text)
    figures: dict[str, Any] = {
        "model": quantized.model,
        "quantization": quantized.quantization,
        "kv_cache_dtype": quantized.kv_cache_dtype,
        "tokens": count,
        "perplexity": plain,
        "perplexity_quantized": reduced,
        "percent_more": 100 * (reduced / plain - 1),
    }
    if args.json:
        print(json.dumps(figures, indent=1))
    else:
        print(
            "\n".join(
                f"{name:<22}{value:.4g}" if isinstance(value, float) else f"{name:<22}{value}"
                for name, value in figures.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
