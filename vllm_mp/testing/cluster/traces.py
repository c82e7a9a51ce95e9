"""Requests of a simulated cluster: drawn ones, and requests of traces in public formats.

A prefix is known by a hash for each whole chunk of the router's `CHUNK_TOKENS`.
"""

import bisect
import csv
import datetime
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.client.cores.router import CHUNK_TOKENS, prefix_hashes

_MOONCAKE_BLOCK = 512
"""Tokens for which a Mooncake trace has a hash."""

_LEAD_CHATS = 3
"""Mean lengths of a chat before the start during which chats begin."""


class TraceRequest(NamedTuple):
    """A request that arrives at a known time, whatever happens to others."""

    arrival: float
    """Seconds since the start."""
    num_prompt: int
    num_output: int
    """Tokens that the request generates: at least one."""
    hashes: Sequence[int]
    """A hash for each whole chunk of the prompt, and as far as they are known, of the answer after it."""
    chat: int
    """The conversation that the request belongs to."""


class Lengths(NamedTuple):
    """A distribution of lengths in tokens: log-normal, or uniform if `sigma` is 0."""

    median: int
    sigma: float
    """Standard deviation of the logarithm; 0: uniform from half of the median to one and a half."""

    def draw(self, chance: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """Return `count` lengths [count] of at least one token."""
        if self.sigma:
            drawn = chance.lognormal(np.log(self.median), self.sigma, count)
        else:
            drawn = chance.uniform(0.5 * self.median, 1.5 * self.median, count)
        return np.maximum(1, drawn.astype(np.int64))


class Drawing(NamedTuple):
    """Parameters of drawn requests: chats that begin at random times (Poisson) and have one or several turns."""

    num_requests: int
    rate: float
    """Requests per second."""
    prompt: Lengths
    """Lengths of what a user writes in a turn."""
    output: Lengths
    turns: float = 1.0
    """Mean number of turns of a chat, at least 1 (geometric)."""
    think_s: float = 0.0
    """Mean seconds between the arrivals of two turns (exponential)."""
    num_systems: int = 0
    """Number of system prompts, one of which begins each chat; 0: none."""
    system_tokens: int = 0
    max_tokens: int = 4096
    """Tokens that a request may have, prompt and answer together; a chat ends before a turn that would have more."""


def draw(drawing: Drawing, seed: int) -> list[TraceRequest]:
    """Return drawn requests in the order of their arrivals; equal seeds give equal requests."""
    chance = np.random.default_rng(seed)
    systems = [
        chance.integers(0, 2**31, drawing.system_tokens, dtype=np.int32).tobytes() for _ in range(drawing.num_systems)
    ]
    requests: list[TraceRequest] = []
    # Chats that began before the start let later turns arrive from the start on.
    begins, chat = -_LEAD_CHATS * drawing.turns * drawing.think_s, 0
    while len(requests) < drawing.num_requests or begins < requests[drawing.num_requests - 1].arrival:
        num_turns = int(chance.geometric(1 / drawing.turns))
        begins += chance.exponential(drawing.turns / drawing.rate)
        system = systems[int(chance.integers(len(systems)))] if systems else b""
        turns = _chat(drawing, chance, chat, begins, num_turns, system)
        for turn in turns:
            if turn.arrival >= 0:
                bisect.insort(requests, turn, key=lambda request: request.arrival)
        chat += 1
    return requests[: drawing.num_requests]


def _chat(
    drawing: Drawing, chance: np.random.Generator, chat: int, begins: float, num_turns: int, system: bytes
) -> list[TraceRequest]:
    """Return the turns of a chat; each prompt is all that was said before, and what the user writes."""
    length, arrival, turns = len(system) // 4, begins, []
    asked, answered = drawing.prompt.draw(chance, num_turns), drawing.output.draw(chance, num_turns)
    waits = chance.exponential(drawing.think_s, num_turns) if drawing.think_s else np.zeros(num_turns)
    for prompt, output, wait in zip(asked.tolist(), answered.tolist(), waits.tolist(), strict=True):
        prompt = min(prompt, drawing.max_tokens - length - 1)
        if prompt < 1:
            break
        output = min(output, drawing.max_tokens - length - prompt)
        turns.append((arrival, length + prompt, output))
        length += prompt + output
        arrival += wait
    said = chance.integers(0, 2**31, length - len(system) // 4, dtype=np.int32).tobytes()
    hashes = prefix_hashes(system + said, None)
    return [
        TraceRequest(at, prompt, output, hashes[: (prompt + output) // CHUNK_TOKENS], chat)
        for at, prompt, output in turns
    ]


def read_azure(path: Path) -> list[TraceRequest]:
    """Return the requests of an Azure LLM inference trace: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    Nothing is known of their prefixes. Raises ValueError if a line has no such values.
    """
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(lines.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}; an Azure LLM inference trace has it")
        found = []
        for number, line in enumerate(lines):
            try:
                seconds = datetime.datetime.fromisoformat(line["TIMESTAMP"]).timestamp()
                tokens = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number + 2}: {error}") from error
            found.append(TraceRequest(seconds, *tokens, (), number))
    return _from_start(found)


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Return the requests of a Mooncake trace: JSON lines with timestamp, input_length, output_length and hash_ids.

    The timestamp is in milliseconds, and each of `hash_ids` stands for 512 tokens and all before them. Nothing is known
    of the tokens of answers. Raises ValueError if a line has no such values.
    """
    found, parts = [], _MOONCAKE_BLOCK // CHUNK_TOKENS
    with path.open() as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                num_prompt, num_output = int(fields["input_length"]), int(fields["output_length"])
                hashes = [parts * int(block) + part for block in fields["hash_ids"] for part in range(parts)]
                seconds = float(fields["timestamp"]) / 1000
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number + 1}: {error!r}; a Mooncake trace has the field") from error
            found.append(TraceRequest(seconds, num_prompt, num_output, hashes[: num_prompt // CHUNK_TOKENS], number))
    return _from_start(found)


def read(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace: of Mooncake if the file ends with .jsonl, else of Azure."""
    return read_mooncake(path) if path.suffix == ".jsonl" else read_azure(path)


def _from_start(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return requests in the order of their arrivals, with times since the first; those without tokens are left out."""
    kept = [request for request in requests if request.num_prompt > 0 and request.num_output > 0]
    kept.sort(key=lambda request: request.arrival)
    return [request._replace(arrival=request.arrival - kept[0].arrival) for request in kept]


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return `requests` at other times, so that `rate` of them arrive per second on average."""
    if len(requests) < 2 or not requests[-1].arrival:
        return list(requests)
    factor = (len(requests) - 1) / rate / requests[-1].arrival
    return [request._replace(arrival=request.arrival * factor) for request in requests]
