"""Measure structured output on suites of JSON schemas with instances.

A suite is a folder of JSON files. A file holds a list of objects with `schema` and `tests`, as in the JSON Schema Test
Suite, or one such object, as in MaskBench; each test has `data` and `valid`. The figures are: the schemas that are
accepted, the accepted schemas for which no invalid instance is allowed, the valid instances that are allowed, the
invalid instances that are refused, and times of compiling and of the masks along the instances. Instances are written
as `json.dumps` writes them. A grammar fixes the order of properties, so it refuses some valid instances.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import LLGuidanceLibrary
from vllm_mp.model_config.json_file import read_json
from vllm_mp.requests.structured_outputs import Constraint

MAX_TOKENS = 256
"""Longer instances are left out."""


class Case(NamedTuple):
    """A schema with its instances."""

    name: str
    schema: Any
    instances: list[tuple[str, bool]]
    """(text, whether it is valid)."""


class Figures:
    """What was counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.compile_s: list[float] = []
        self.mask_s: list[float] = []


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, nargs="+", help="folder of JSON files, or a file")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and tokenizer.json")
    parser.add_argument("--limit", type=int, default=0, help="number of files, drawn at random; 0: all")
    parser.add_argument("--show", type=int, default=0, help="number of wrongly allowed instances and reasons to print")
    options = parser.parse_args(arguments)
    source = _source(options.model)
    tokenizer = GrammarTokenizer(source)
    cases = list(_cases(options.suite, options.limit))
    library = LLGuidanceLibrary(source)
    library.load()
    figures = Figures()
    for case in cases:
        _measure(library, tokenizer, case, figures)
    _print(figures, options.show)
    return 0


def _source(folder: Path) -> TokenizerSource:
    config = read_json(folder / "config.json", dict) or {}
    generation = read_json(folder / "generation_config.json", dict) or {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return TokenizerSource(str(folder), config["vocab_size"], eos if isinstance(eos, list) else [eos])


def _cases(suites: list[Path], limit: int) -> Iterator[Case]:
    files = [file for suite in suites for file in (sorted(suite.rglob("*.json")) if suite.is_dir() else [suite])]
    if limit and limit < len(files):
        files = random.Random(0).sample(files, limit)
    for file in files:
        content = json.loads(file.read_text())
        for index, case in enumerate(content if isinstance(content, list) else [content]):
            instances = [(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in case["tests"]]
            yield Case(f"{file.stem}[{index}] {case.get('description', '')}", case["schema"], instances)


def _measure(library: LLGuidanceLibrary, tokenizer: GrammarTokenizer, case: Case, figures: Figures) -> None:
    counts = figures.counts
    counts["schemas"] += 1
    constraint = Constraint("json", json.dumps(case.schema))
    began = time.perf_counter()
    try:
        _, grammar = library.compile_constraint(constraint)
    except GrammarError as error:
        figures.reasons[str(error).split(": ", 1)[-1][:60]] += 1
        return
    finally:
        figures.compile_s.append(time.perf_counter() - began)
    counts["accepted"] += 1
    mask = np.zeros((tokenizer.source.vocab_size + 31) // 32, np.int32)
    is_exact = True
    for text, is_valid in case.instances:
        tokens = tokenizer.llguidance().tokenize_str(text)
        if len(tokens) > MAX_TOKENS:
            continue
        counts["valid" if is_valid else "invalid"] += 1
        matcher = grammar.matcher()
        is_allowed = True
        try:
            for token in [*tokens, tokenizer.source.eos_token_ids[0]]:
                began = time.perf_counter()
                matcher.fill(mask)
                figures.mask_s.append(time.perf_counter() - began)
                is_allowed = bool(mask[token // 32] >> (token % 32) & 1)
                if not is_allowed:
                    break
                matcher.accept([token])
        except GrammarError as error:
            is_allowed = False
            figures.reasons[f"while it is followed: {str(error)[:60]}"] += 1
        if is_valid:
            counts["valid allowed"] += is_allowed
        elif is_allowed:
            is_exact = False
            figures.wrong.append(f"{case.name}: {json.dumps(case.schema)[:300]} allows {text[:80]}")
        else:
            counts["invalid refused"] += 1
    counts["exact"] += is_exact


def _print(figures: Figures, show: int) -> None:
    counts = figures.counts

    def share(part: str, whole: str) -> str:
        return f"{counts[part]:,} of {counts[whole]:,} ({100 * counts[part] / max(1, counts[whole]):.1f} %)"

    def times(values: list[float], unit: float) -> str:
        quantiles = [statistics.median(values), *np.quantile(values, [0.99, 0.999]), max(values)]
        return ", ".join(f"{value / unit:,.2f}" for value in quantiles)

    print(f"  schemas accepted            {share('accepted', 'schemas')}")
    print(f"  no invalid instance allowed {share('exact', 'schemas')}")
    print(f"  valid instances allowed     {share('valid allowed', 'valid')}")
    print(f"  invalid instances refused   {share('invalid refused', 'invalid')}")
    print(f"  compile, ms: median, p99, p99.9, max  {times(figures.compile_s, 1e-3)}")
    print(f"  mask, us: median, p99, p99.9, max     {times(figures.mask_s, 1e-6)}  ({len(figures.mask_s):,} masks)")
    for reason, count in figures.reasons.most_common(show):
        print(f"    {count:6} {reason}")
    for wrong in figures.wrong[:show]:
        print(f"    {wrong}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
