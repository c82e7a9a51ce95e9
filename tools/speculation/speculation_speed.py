#!/usr/bin/env python3
"""Measure what speculation gains: two engines, with and without drafts, answer the same requests in turns.

The corpus is in this file: edits and copies of code, answers that quote their prompt, JSON in the style of an earlier
one, and chat. Prints one JSON object: by kind of request and number of streams, the output tokens per second of each
round without and with drafts, the median of their ratio, the same for each second of processor time of the core (which
other programs hardly change), and how many tokens were drafted and accepted.

With `--llama-cpp`, llama.cpp's lookup decoding takes turns with one stream of this engine, with the same GGUF file,
requests and limit of drafts.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, Final

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm_mp.testing.measuring.gguf_peers import LlamaCpp, Weights

_CODE: Final = '''\
def read_{0}(path, encoding="utf-8"):
    """Return the {0} of the file at `path`, without those that are empty."""
    with open(path, encoding=encoding) as file:
        lines = [line.rstrip("\\n") for line in file]
    found = [parse_{0}(line) for line in lines if line.strip()]
    if not found:
        raise ValueError(f"the file {{path}} has no {0}; write at least one line")
    return sorted(found, key=lambda each: each.name)
'''
_STORY: Final = (
    "The {0} stood at the end of the long street, where the river turns to the east. Every morning the keeper of the "
    "{0} opened its doors at six, swept the steps, and wrote the weather into a book. In the year of the great flood "
    "the water reached the third step of the {0}, and the keeper wrote: it will fall again. It fell after nine days. "
)
_PERSON: Final = (
    '{{"name": "{0}", "kind": "tower", "height_in_metres": {1}, "visitors": {{"adults": {2}, "children": {3}}}}}'
)
NAMES: Final = ("mill", "tower", "bridge", "station", "library", "harbour", "market", "garden")


def _chat(text: str, begun: str = "") -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n{begun}"


def _edit(name: str) -> str:
    code = _CODE.format(name)
    begun = code[: code.index("    with")]
    return _chat(f"Rename the variable `found` to `{name}s` in this code, and change nothing else:\n\n{code}", begun)


def _copy(name: str) -> str:
    code = _CODE.format(name)
    return _chat(f"Write this code twice, with no change:\n\n{code}", code + "\n" + code[:60])


def _quote(name: str) -> str:
    text = _STORY.format(name)
    return _chat(f"Quote the whole text word for word.\n\n{text}", text[:80])


def _style(name: str) -> str:
    rows = [_PERSON.format(f"{name} {i}", 10 + i, 200 - i, 30 + i) for i in range(6)]
    return _chat(
        "Write a list of ten rows in JSON, in the style of this one:\n" + "\n".join(rows), "\n".join(rows[:2]) + "\n"
    )


_QUESTIONS: Final = (
    "What is the difference between a {0} and a house?",
    "Write a short poem about a {0}.",
    "Give me three tips for a visit to an old {0}.",
    "Explain to a child how a {0} works.",
)


def _ask(name: str) -> str:
    return _chat(_QUESTIONS[NAMES.index(name) % len(_QUESTIONS)].format(name))


KINDS: Final = {"edit": _edit, "copy": _copy, "quote": _quote, "json": _style, "chat": _ask}


def _processor_seconds(pid: int) -> float:
    """Return the processor time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _round(engine: AsyncLLM, kind: str, num_streams: int, num_tokens: int, first: int) -> tuple[float, float]:
    """Return the output tokens per second of `num_streams` requests at once, and per second of processor time.

    The first counts from the first tokens on.
    """
    pid = (await engine.core_status())["pid"]
    used = _processor_seconds(pid)
    params = SamplingParams(
        temperature=0 if kind != "chat" else 0.7, seed=first, max_tokens=num_tokens, ignore_eos=True
    )
    times: list[float] = []
    counts: list[int] = []

    async def run(name: str) -> None:
        begun, count = 0.0, 0
        async for output in engine.generate(KINDS[kind](name), params):
            begun, count = begun or time.perf_counter(), len(output.outputs[0].token_ids)
        times.append(begun)
        counts.append(count - 1)

    await asyncio.gather(*(run(f"{NAMES[(first + i) % len(NAMES)]}") for i in range(num_streams)))
    rate = sum(counts) / (time.perf_counter() - statistics.median(times))
    return rate, sum(counts) / max(0.01, _processor_seconds(pid) - used)


class LookupTurns:
    """The turns of llama.cpp's lookup decoding with one kind of request."""

    def __init__(self, peer: LlamaCpp, kind: str, num_tokens: int, num_drafts: int) -> None:
        self._peer = peer
        self._kind = kind
        self._num_tokens = num_tokens
        self._num_drafts = num_drafts
        self._rates: dict[str, list[float]] = {"without": [], "with": []}
        self._counts = {"num_draft_tokens": 0, "num_accepted_tokens": 0}

    def take(self, number: int) -> None:
        """Run the request of this round without and with drafts."""
        prompt, temperature = KINDS[self._kind](NAMES[number % len(NAMES)]), 0 if self._kind != "chat" else 0.7
        for name, num_drafts in (("without", 0), ("with", self._num_drafts)):
            found = self._peer.lookup(prompt, self._num_tokens, num_drafts, temperature, seed=number)
            self._rates[name].append(round(found.tokens_per_s, 1))
            self._counts["num_draft_tokens"] += found.num_drafted
            self._counts["num_accepted_tokens"] += found.num_accepted

    def figures(self) -> dict[str, Any]:
        """Return the rates of all rounds, and the median, the lowest and the highest of their ratios."""
        ratios = [b / a for a, b in zip(self._rates["without"], self._rates["with"], strict=True)]
        spread = {"ratio": round(statistics.median(ratios), 3), "range": [round(min(ratios), 3), round(max(ratios), 3)]}
        return self._rates | spread | self._counts


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all kinds and numbers of streams."""
    options: dict[str, Any] = {"model": args.model, "dtype": args.dtype, "quantization": args.quantization}
    options |= {"max_model_len": 2048, "max_num_seqs": max(args.streams), "enable_prefix_caching": True}
    peer = None
    if args.llama_cpp is not None:
        peer = LlamaCpp(args.llama_cpp, Weights(args.llama_cpp), "lookup", Path(args.model))
        peer.prepare()
    plain = await AsyncLLM.start(AsyncEngineArgs(**options))
    speculation = {"method": args.method, "num_speculative_tokens": args.spec_tokens}
    if args.draft_model is not None:
        speculation |= {"model": args.draft_model, "quantization": args.draft_quantization}
    drafted = await AsyncLLM.start(AsyncEngineArgs(**options, speculative_config=speculation))
    figures: dict[str, Any] = {}
    async with plain, drafted:
        for kind in args.kinds:
            for num_streams in args.streams:
                lookup = LookupTurns(peer, kind, args.tokens, args.spec_tokens) if peer and num_streams == 1 else None
                rates: dict[str, list[float]] = {"without": [], "with": []}
                processor: dict[str, list[float]] = {"without": [], "with": []}
                before = await drafted.core_status()
                for number in range(args.rounds + 1):
                    turns = [("without", plain), ("with", drafted)]
                    for name, engine in turns if number % 2 else turns[::-1]:
                        rate, per_processor_second = await _round(engine, kind, num_streams, args.tokens, number)
                        if number:  # the first round warms up
                            rates[name].append(round(rate, 1))
                            processor[name].append(per_processor_second)
                    if lookup and number:
                        lookup.take(number)
                after = await drafted.core_status()
                of_processor = [b / a for a, b in zip(processor["without"], processor["with"], strict=True)]
                ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
                figures[f"{kind}, {num_streams}"] = (
                    rates
                    | {
                        "ratio": round(statistics.median(ratios), 3),
                        "range": [round(min(ratios), 3), round(max(ratios), 3)],
                        "processor ratio": round(statistics.median(of_processor), 3),
                        "processor range": [round(min(of_processor), 3), round(max(of_processor), 3)],
                    }
                    | {name: after[name] - before[name] for name in ("num_draft_tokens", "num_accepted_tokens")}
                )
                if lookup:
                    figures[f"{kind}, {num_streams}"]["llama.cpp"] = lookup.figures()
                print(kind, num_streams, json.dumps(figures[f"{kind}, {num_streams}"]), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--draft-model", default=None, help="the model of --method draft_model")
    parser.add_argument("--draft-quantization", default=None)
    parser.add_argument("--spec-tokens", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="FOLDER",
        help="measure llama.cpp's lookup decoding beside one stream; the folder is that of `tools/bench compare "
        "--engine llama.cpp`, such as ~/.cache/vllm_mp/peers/llama.cpp, and --model must be a .gguf file",
    )
    args = parser.parse_args()
    if args.llama_cpp is not None and not (args.model.endswith(".gguf") and Path(args.model).is_file()):
        parser.error(f"--llama-cpp needs a .gguf file that both engines read, not --model {args.model}; name one")
    print(json.dumps(asyncio.run(measure(args)), indent=1))


if __name__ == "__main__":
    main()
