"""Measure what a format of the weights costs in accuracy: the perplexity of a text for each of several formats.

A format is made of words joined by "+": a dtype (bfloat16, float32), a value of --quantization (int8, int4, fp8, ...),
kv-fp8 or kv-int8 for a KV cache in 8 bits, not-batch-invariant for `batch_invariant=False`, or a model to use in place
of --model, such as a GGUF file. The text is split into windows of tokens, which the engine scores by its
log-probabilities of a prompt. All formats are compared with the first; the standard error is that of the mean
difference between the scores of the same tokens.
"""

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

WINDOW: Final = 1024
CHARACTERS: Final = 30_000
DTYPES: Final = ("float32", "bfloat16", "float16")
STREAMS: Final = (1, 4, 16, 64)
PROMPT_LENGTHS: Final = (128, 512)
NEW_TOKENS: Final = 64


def reference_text() -> str:
    """Return English text that every Python contains: the beginning of the language reference that `help()` shows."""
    return "\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]


def options_of(name: str, args: AsyncEngineArgs) -> AsyncEngineArgs:
    """Return `args` with the format `name`. Raises ValueError, as the engine does, for an unknown word."""
    changed: dict[str, Any] = {}
    for word in name.split("+"):
        if word in DTYPES:
            changed["dtype"] = word
        elif word in ("kv-fp8", "kv-int8"):
            changed["kv_cache_dtype"] = word.removeprefix("kv-")
        elif word == "not-batch-invariant":
            changed["batch_invariant"] = False
        elif Path(word).exists():
            changed["model"] = word
        else:
            changed["quantization"] = word
    return dataclasses.replace(args, **changed)


async def scores(engine: AsyncLLM, text: str) -> list[float]:
    """Return the log-probability of each scored token of `text`: of all but the first of each window."""
    ids = (await engine.get_tokenizer()).encode(text)
    window = min(WINDOW, engine.model_config.max_model_len - 1)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for start in range(0, len(ids), window):
        piece = ids[start : start + window]
        async for output in engine.generate({"prompt_token_ids": piece}, params):
            of_window = output.prompt_logprobs
        found += [logprobs[token].logprob for token, logprobs in zip(piece[1:], of_window[1:], strict=True)]
    return found


async def speed(engine: AsyncLLM, streams: int) -> float:
    """Return the tokens per second that `streams` requests at once get."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True)

    async def run(number: int) -> None:
        async for _ in engine.generate({"prompt_token_ids": [10 + number, 20, 30]}, params):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(run(number) for number in range(streams)))
    return streams * NEW_TOKENS / (time.perf_counter() - start)


async def prompt_speed(engine: AsyncLLM, length: int) -> float:
    """Return the tokens per second of a random prompt of `length` tokens, from sending it to its first output token."""
    prompt = random.choices(range(engine.model_config.get_vocab_size()), k=length)
    start = time.perf_counter()
    async for _ in engine.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=1)):
        pass
    return length / (time.perf_counter() - start)


def measure(formats: dict[str, AsyncEngineArgs], text: str, rounds: int) -> list[dict[str, Any]]:
    """Return the figures of each format; speeds are medians of `rounds` after one, in which they take turns."""
    results: list[dict[str, Any]] = []
    engines: list[AsyncLLM] = []
    first: list[float] = []
    with asyncio.Runner() as runner:
        try:
            for name, args in formats.items():
                engines.append(AsyncLLM.from_engine_args(args))
                found = runner.run(scores(engines[-1], text))
                first = first or found
                results.append({"format": name, "tokens": len(found), "perplexity": math.exp(-statistics.fmean(found))})
                if len(engines) > 1 and len(found) == len(first):
                    more = [a - b for a, b in zip(first, found, strict=True)]
                    results[-1]["percent_more"] = 100 * math.expm1(statistics.fmean(more))
                    results[-1]["standard_error"] = 100 * statistics.stdev(more) / math.sqrt(len(more))
                if not rounds:
                    engines[-1].shutdown()
            cases = [(f"decode_{streams}", speed, streams) for streams in STREAMS]
            cases += [(f"prompt_{length}", prompt_speed, length) for length in PROMPT_LENGTHS]
            for name, run, size in cases if rounds else ():
                turns = [[runner.run(run(engine, size)) for engine in engines] for _ in range(1 + rounds)]
                for figures, speeds in zip(results, zip(*turns[1:], strict=True), strict=True):
                    figures[name] = statistics.median(speeds)
        finally:
            for engine in engines:
                engine.shutdown()
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Return the figures as a table of Markdown."""
    names = list({name: None for figures in results for name in figures})
    rows = [[shown(figures.get(name)) for name in names] for figures in results]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, ["---"] * len(names), *rows])


def shown(value: float | str | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "int8"], help="formats (bfloat16 int8)")
    parser.add_argument("--text", type=Path, help="file with the text (part of Python's language reference)")
    parser.add_argument("--rounds", type=int, default=0, help="also measure speed, in N rounds (0)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    AsyncEngineArgs.add_cli_args(parser)
    parser.set_defaults(disable_log_requests=True)
    options = parser.parse_args()
    args = AsyncEngineArgs.from_cli_args(options)
    formats = {name: options_of(name, args) for name in options.formats}
    text = options.text.read_text() if options.text else reference_text()
    results = measure(formats, text, options.rounds)
    print(json.dumps(results, indent=1) if options.json else table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
