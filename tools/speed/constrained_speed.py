#!/usr/bin/env python3
"""Measure what structured output costs: streams of which half must match a JSON schema, beside streams without.

Prints one JSON object: for greedy and for random sampling, tokens per second of all streams, the longest and the 99th
percentile of the gaps between tokens, and the ratios of both cases. All streams begin together, and what counts begins
when each has a token. Each round measures all cases one after the other. Then the time to the first token of a request
on an idle engine, with a schema that was seen before and without.
"""

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import time
from typing import Any

from vllm_mp import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}


async def run_streams(llm: AsyncLLM, args: argparse.Namespace, temperature: float, share: float) -> dict[str, float]:
    """Return tokens per second and gaps in seconds while all streams decode, of which `share` is constrained."""
    num_running = num_tokens = 0
    start = end = math.inf  # of the time that counts
    gaps: list[float] = []

    async def stream(number: int) -> None:
        nonlocal num_running, num_tokens, start, end
        form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            max_tokens=args.max_tokens,
            ignore_eos=True,
            structured_outputs=form if number < share * args.streams else None,
            output_kind=RequestOutputKind.DELTA,
        )
        latest = None
        outputs = llm.generate(f"{number}. Write a list of people as JSON:", params)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                now = time.perf_counter()
                if now > start + args.seconds:
                    return
                if latest is None:
                    num_running += 1
                    if num_running == args.streams:
                        start = now
                elif latest >= start:
                    gaps.append(now - latest)
                    num_tokens += len(output.outputs[0].token_ids)
                    end = now  # the end of a step, so that each counted step counts as a whole
                latest = now
        raise ValueError(f"stream {number} ended after {args.max_tokens} tokens: give more --max-tokens")

    await asyncio.gather(*(stream(number) for number in range(args.streams)))
    gaps.sort()
    return {
        "tokens per second": num_tokens / (end - start),
        "p99 gap": gaps[int(len(gaps) * 0.99)],
        "longest gap": gaps[-1],
    }


async def first_token(llm: AsyncLLM, form: StructuredOutputsParams | None) -> float:
    """Return the seconds to the first token of a request."""
    params = SamplingParams(temperature=0.0, max_tokens=1, structured_outputs=form)
    started = time.perf_counter()
    async for _ in llm.generate("Write a list of people as JSON:", params):
        break
    return time.perf_counter() - started


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [(temperature, share) for temperature in (0.0, 1.0) for share in (0.0, 0.5)]
    found: dict[tuple[float, float], list[dict[str, float]]] = {case: [] for case in cases}
    engine_args = AsyncEngineArgs(args.model, device=args.device, dtype=args.dtype, enable_prefix_caching=False)
    async with await AsyncLLM.start(engine_args) as llm:
        for number in range(args.rounds + 1):
            for case in cases:
                result = await run_streams(llm, args, *case)
                if number:  # the first round warms up
                    found[case].append(result)
        form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        firsts = [(await first_token(llm, None), await first_token(llm, form)) for _ in range(30)]
    report: dict[str, Any] = {}
    for temperature, name in ((0.0, "greedy"), (1.0, "random")):
        free, half = found[temperature, 0.0], found[temperature, 0.5]
        for key in free[0]:
            report[f"{name}: {key}"] = {
                "free": statistics.median(result[key] for result in free),
                "half constrained": statistics.median(result[key] for result in half),
                "ratio": statistics.median(b[key] / a[key] for a, b in zip(free, half, strict=True)),
            }
    report["first token"] = {
        "free": statistics.median(free for free, _ in firsts),
        "constrained": statistics.median(constrained for _, constrained in firsts),
    }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=1000, help="most tokens of a stream (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each case that count (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one to warm up (%(default)s)")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
