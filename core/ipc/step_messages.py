"""What a step brought, as messages to the clients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from vllm_mp import wire
from vllm_mp.core.scheduler.scheduler import ModelOutput, StepUpdate

# Well below the most that a client takes in one message.
MAX_PART_BYTES = wire.MAX_MESSAGE_BYTES // 4

T = TypeVar("T")


def step_outputs(
    incarnation: int, step: int, result: StepUpdate, computed: ModelOutput
) -> Iterator[tuple[int, wire.StepOutput]]:
    """(client, message) for everybody whom the step concerns; a client gets several where one would be too long.

    What belongs to one token, its log-probabilities and the end that it brings, is in one message. Vectors and what
    belongs to prompts may go ahead.
    """
    gone = result.gone
    ends = by_client(result.finished)
    cached = by_client((client, (slot, count)) for client, slot, count in result.cached)
    vectors = by_client((client, (slot, vector.astype("<f4").tobytes())) for client, slot, vector in result.vectors)
    logprobs, of_prompts = (
        by_client(one for one in owned if not gone or (one[0], one[1].slot) not in gone)
        for owned in (computed.logprobs, computed.prompt_logprobs)
    )
    for client in {*result.clients.tolist(), *ends, *of_prompts}:
        *ahead, last = _parts(of_prompts.get(client, []), _num_bytes)
        for messages in ahead:
            yield client, wire.StepOutput(incarnation, step, b"", b"", b"", prompt_logprobs=messages)
        *many, few = _parts(vectors.get(client, []), lambda pair: len(pair[1]))
        for pairs in many:
            yield client, wire.StepOutput(incarnation, step, b"", b"", b"", vectors=pairs)
        rows = np.flatnonzero(result.clients == client)
        size_of = {message.slot: _num_bytes(message) for message in logprobs.get(client, [])}
        parts = [rows]
        if size_of:
            sizes = [size_of.get(slot, 0) for slot in result.slots[rows].tolist()]
            parts = [rows[part] for part in _parts(range(len(rows)), sizes.__getitem__)]
        part_of = {int(result.slots[row]): i for i, part in enumerate(parts) for row in part} if parts[1:] else {}
        for i, part in enumerate(parts):
            columns = wire.pack_tokens(result.slots[part].astype(np.int64), result.tokens[part], result.positions[part])
            yield (
                client,
                wire.StepOutput(
                    incarnation,
                    step,
                    *columns,
                    finished=[end for end in ends.get(client, []) if part_of.get(end.slot, 0) == i],
                    cached=[pair for pair in cached.get(client, []) if part_of.get(pair[0], 0) == i],
                    logprobs=[one for one in logprobs.get(client, []) if part_of.get(one.slot, 0) == i],
                    prompt_logprobs=last if i == 0 else [],
                    vectors=few if i == 0 else [],
                ),
            )


def _parts(things: Sequence[T], size: Callable[[T], int]) -> list[list[T]]:
    """`things` in runs of at most `MAX_PART_BYTES`, or of one thing; one empty run of nothing."""
    parts: list[list[T]] = [[]]
    total = 0
    for thing in things:
        total += size(thing)
        if parts[-1] and total > MAX_PART_BYTES:
            parts.append([])
            total = size(thing)
        parts[-1].append(thing)
    return parts


def _num_bytes(message: wire.TokenLogprobs) -> int:
    return len(message.token_ids) + len(message.values)


def by_client(owned: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """What belongs to each client, of pairs of a client and something of its."""
    belongings: dict[int, list[T]] = {}
    for client, thing in owned:
        belongings.setdefault(client, []).append(thing)
    return belongings
