#!/usr/bin/env python3
"""Let a model answer the schemas of a suite at temperature 1, and check the answers with an independent validator.

A suite is a folder of JSON files as for tools/quality/structured_output_suite.py. Each schema has one answer. Prints
how many schemas were accepted, how many answers finished before the limit of tokens, and how many of those are valid,
with the schema and the answer of each that is not. Needs the package jsonschema-rs.
"""

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs

from vllm_mp import AsyncEngineArgs, AsyncLLM, ConstraintError, SamplingParams, StructuredOutputsParams

_AT_A_TIME = 32


def schemas_of(suites: list[Path], limit: int) -> list[tuple[str, Any]]:
    """Return (name, schema) of all cases, or of `limit` files that are drawn at random."""
    files = [file for suite in suites for file in sorted(suite.rglob("*.json"))]
    if limit and limit < len(files):
        files = random.Random(0).sample(files, limit)
    found = []
    for file in files:
        content = json.loads(file.read_text())
        cases = content if isinstance(content, list) else [content]
        found += [(f"{file.stem}[{index}]", case["schema"]) for index, case in enumerate(cases)]
    return found


async def measure(args: argparse.Namespace) -> bool:
    """Print the figures; return whether every finished answer is valid."""
    schemas = schemas_of(args.suite, args.limit)
    counts = {"accepted": 0, "finished": 0, "valid": 0, "not judged": 0}
    turn = asyncio.Semaphore(_AT_A_TIME)

    async def ask(llm: AsyncLLM, number: int, name: str, schema: Any) -> None:
        try:
            form = StructuredOutputsParams(json=schema, whitespace_pattern=r"[ \n]{0,2}")
        except (ValueError, TypeError):
            return
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=args.max_tokens, structured_outputs=form)
        prompt = f"JSON that matches the schema {json.dumps(schema)[:600]}:\n"
        output = None
        async with turn:
            try:
                async for latest in llm.generate(prompt, params):
                    output = latest
            except ConstraintError:
                return
        assert output is not None
        counts["accepted"] += 1
        [completion] = output.outputs
        if completion.finish_reason != "stop":
            return
        counts["finished"] += 1
        try:
            validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        except (ValueError, jsonschema_rs.ValidationError):
            counts["not judged"] += 1  # the validator does not know the schema
            return
        try:
            is_valid = validator.is_valid(json.loads(completion.text))
        except ValueError:
            is_valid = False
        counts["valid"] += is_valid
        if not is_valid:
            print(f"{name}: {json.dumps(schema)[:500]} is not matched by {completion.text[:300]!r}", file=sys.stderr)

    engine_args = AsyncEngineArgs(args.model, enable_prefix_caching=False)
    async with await AsyncLLM.start(engine_args) as llm:
        await asyncio.gather(*(ask(llm, number, *case) for number, case in enumerate(schemas)))
    print(json.dumps({"schemas": len(schemas), **counts}))
    return counts["valid"] == counts["finished"] - counts["not judged"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, nargs="+")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--limit", type=int, default=0, help="number of files, drawn at random; 0: all")
    parser.add_argument("--max-tokens", type=int, default=256)
    sys.exit(0 if asyncio.run(measure(parser.parse_args())) else 1)


if __name__ == "__main__":
    main()
