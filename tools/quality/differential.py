#!/usr/bin/env python3
"""Run random requests together and alone, compare their outputs, and verify them against transformers.

    python tools/quality/differential.py --requests 400 --seed 1 --rounds 3

Prints what was compared and every difference that no near-tie explains; the exit code is 1 if there is a difference.
--small uses a model with random weights: many times faster, with wilder text.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="number of requests in each round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds, each with the next seed (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round's requests (%(default)s)")
    parser.add_argument("--small", action="store_true", help="use a small model with random weights")
    parser.add_argument("--spec-method", help="draft tokens by this method where requests run together")
    parser.add_argument("--no-reference", action="store_true", help="do not verify the outputs against transformers")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vllm_mp.model_config.families.registry import read_architecture
    from vllm_mp.model_store.resolve import DEFAULT_MODEL, resolve_model
    from vllm_mp.testing.differential import PRIVATE_OPTIONS, Judge, play, random_cases, shared_options
    from vllm_mp.testing.engines import running_engine
    from vllm_mp.testing.greedy_parity import num_preemptions
    from vllm_mp.testing.random_models import save_small_model

    totals: Counter[str] = Counter()
    num_differences = 0
    with ExitStack() as stack:
        folder = resolve_model(DEFAULT_MODEL)
        if options.small:
            small = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = save_small_model(small, folder)
            folder = small
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        bytes_per_token = read_architecture(model.config.to_dict()).kv_bytes_per_token(4)
        shared = stack.enter_context(
            running_engine(folder, **shared_options(bytes_per_token), spec_method=options.spec_method)
        )
        private = stack.enter_context(running_engine(folder, **PRIVATE_OPTIONS))
        for seed in range(options.seed, options.seed + options.rounds):
            began, preempted = time.monotonic(), num_preemptions(shared)
            judge = Judge(model, tokenizer, shared.model_config.eos_token_ids)
            for case, together, lone in play(shared, private, random_cases(seed, options.requests, tokenizer)):
                judge.compare(case, together, lone)
                if not options.no_reference:
                    judge.verify(case, lone)
            judge.counts["preemptions"] = num_preemptions(shared) - preempted
            judge.counts["differences"] = len(judge.differences)
            totals.update(judge.counts)
            num_differences += len(judge.differences)
            compared = ", ".join(f"{judge.counts[name]:,} {name}" for name in ("requests", "completions", "tokens"))
            took = f"{time.monotonic() - began:.0f} s"
            print(f"seed {seed}: {compared}, {len(judge.differences)} differences, {took}", flush=True)
            for difference in judge.differences:
                print(
                    f"  completion {difference.completion_index}: {difference.what}\n    {difference.case}", flush=True
                )
    for name, count in sorted(totals.items()):
        print(f"{name:>28}  {count:>9,}")
    return 1 if num_differences else 0


if __name__ == "__main__":
    sys.exit(main())
