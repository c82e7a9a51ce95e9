"""Measure ik_llama.cpp as llama.cpp's own benchmarks measure that engine: steps of random tokens, without sampling.

`tools/bench` runs this program in the environment of the package ik-llama-cpp-python, which has no benchmark. The
package's `IkLlama` runs one stream and samples in Python, token by token of the vocabulary. So the steps here go
through its bindings of llama.h, with several streams in a batch, and with the options that `IkLlama` chooses.

Standard input holds JSON: the path of a GGUF file, the number of threads, the size of the vocabulary, the numbers of
streams, the lengths of their prompts and outputs, the lengths of lone prompts, and the numbers of measured rounds. The
last line of the output is JSON: the tokens per second of each round, by number of streams and by length of prompt.
"""

import json
import random
import sys
import time
from typing import Any

from ik_llama_cpp import IkLlama
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkContext

MICRO_BATCH = 512
"""Tokens of a call of `llama_decode`; the package's default size of a micro-batch."""


def decode(context: IkContext, tokens: list[tuple[int, int, int]], outputs: set[int]) -> None:
    """Compute tokens, each given with its position and stream; those with an index in `outputs` give logits."""
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, (token, position, stream) in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        batch.logits[i] = i in outputs
    code = context.decode(batch)
    api.llama_batch_free(batch)
    if code:
        sys.exit(f"llama_decode of {len(tokens)} tokens failed with code {code}")
    context.get_logits(len(tokens) - 1)  # waits for the results


def compute_prompts(context: IkContext, prompts: list[list[int]]) -> None:
    """Compute the prompts of all streams in an empty cache."""
    context.kv_cache_clear()
    tokens = [(token, i, stream) for stream, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
    for begin in range(0, len(tokens), MICRO_BATCH):
        part = tokens[begin : begin + MICRO_BATCH]
        ends = {i for i, (_, position, stream) in enumerate(part) if position == len(prompts[stream]) - 1}
        decode(context, part, ends | {len(part) - 1})


def decode_rates(context: IkContext, task: dict[str, Any], streams: int, chance: random.Random) -> list[float]:
    """Return the tokens per second of `streams` streams that decode together, of each round after the first."""
    rates = []
    for _ in range(1 + task["decode_rounds"]):
        compute_prompts(
            context, [chance.choices(range(task["vocab_size"]), k=task["prompt_len"]) for _ in range(streams)]
        )
        begun = time.perf_counter()
        for step in range(task["output_len"]):
            tokens = chance.choices(range(task["vocab_size"]), k=streams)
            together = [(token, task["prompt_len"] + step, stream) for stream, token in enumerate(tokens)]
            decode(context, together, set(range(streams)))
        rates.append(streams * task["output_len"] / (time.perf_counter() - begun))
    return rates[1:]


def prefill_rates(context: IkContext, task: dict[str, Any], length: int, chance: random.Random) -> list[float]:
    """Return the tokens per second of a lone prompt of `length` tokens, of each round after the first."""
    rates = []
    for _ in range(1 + task["prefill_rounds"]):
        prompt = chance.choices(range(task["vocab_size"]), k=length)
        begun = time.perf_counter()
        compute_prompts(context, [prompt])
        rates.append(length / (time.perf_counter() - begun))
    return rates[1:]


def main() -> None:
    task = json.load(sys.stdin)
    chance = random.Random(0)
    # The class chooses flash attention by the processor, because it fails on some.
    engine = IkLlama(task["file"], n_ctx=1024, n_threads=task["threads"], verbose=False)
    flash_attention = engine._has_vnni
    streams = max([1, *task["batches"]])
    each = max(task["prompt_len"] + task["output_len"], *task["prompts"], 1)
    context = IkContext(
        engine._model,
        n_ctx=streams * (task["prompt_len"] + task["output_len"]) + each,
        n_threads=task["threads"],
        flash_attn=flash_attention,
        n_seq_max=streams,
    )
    found = {
        "decode": {batch: decode_rates(context, task, batch, chance) for batch in task["batches"]},
        "prefill": {length: prefill_rates(context, task, length, chance) for length in task["prompts"]},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
