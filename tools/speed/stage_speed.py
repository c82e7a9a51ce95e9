"""Measure what two stages on two CPUs generate, beside one process with one thread and one with two.

Two stages with a thread each can at best be as fast as one process with two threads. What is missing is the cost of the
pipeline: a step has half of the rows and reads all weights of its stage for them, and stages wait for one another. The
engines take turns, so that other work on the machine slows all of them. Processor time tells what an idle machine would
allow: a stage computes no more tokens than its processor time permits. The figures are medians.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any, Final

import psutil

from vllm_mp import LLM, SamplingParams

ENGINES: Final[dict[str, dict[str, Any]]] = {
    "one thread": {"num_threads": 1},
    "two threads": {"num_threads": 2},
    "two stages": {"num_threads": 2, "pipeline_parallel_size": 2},
}
NUM_TOKENS: Final = 48
PROMPT: Final = "The history of the steam engine begins"


class Engine:
    """An engine, and its processes."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        before = set(psutil.Process().children(recursive=True))
        self._llm = LLM(model, device="cpu", max_model_len=512, enable_prefix_caching=False, **options)
        self._processes = set(psutil.Process().children(recursive=True)) - before

    def run(self, num_requests: int) -> tuple[float, float]:
        """Generate `NUM_TOKENS` for each request; return tokens per second, and processor time per token.

        The time is that of the busiest process, in microseconds. It includes the prefills of short prompts.
        """
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        total = num_requests * NUM_TOKENS
        before, start = self._times(), time.perf_counter()
        self._llm.generate([PROMPT] * num_requests, params, use_tqdm=False)
        elapsed, after = time.perf_counter() - start, self._times()
        return total / elapsed, 1e6 * max(after[pid] - before[pid] for pid in after) / total

    def _times(self) -> dict[int, float]:
        return {process.pid: sum(process.cpu_times()[:2]) for process in self._processes}


def main() -> int:
    """Print the figures of each engine for some numbers of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="Measure this model.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="Measure N rounds.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 8, 32], metavar="N")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    args = parser.parse_args()
    engines = {name: Engine(args.model, options) for name, options in ENGINES.items()}
    cases = []
    for num_requests in args.requests:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for round_number in range(args.rounds + 1):
            for name, engine in engines.items():
                figures = engine.run(num_requests)
                if round_number:  # the first round warms up
                    runs[name].append(figures)
        for name, of_engine in runs.items():
            speed, processor_us = (statistics.median(column) for column in zip(*of_engine, strict=True))
            cases.append({"requests": num_requests, "engine": name, "speed": speed, "processor_us": processor_us})
    if args.json:
        print(json.dumps({"model": args.model, "cases": cases}))
    else:
        for case in cases:
            print(
                f"{case['requests']:>3} requests, {case['engine']}: {case['speed']:.0f} tokens/s, "
                f"{case['processor_us']:.0f} us of processor time a token in the busiest process"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
