"""The messages that tell clients what a step changed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from vllm_mp import wire
from vllm_mp.core.scheduler.request import RequestKey
from vllm_mp.core.scheduler.step import ModelOutput, StepUpdate, pack_only_client

MAX_PART_BYTES = wire.MAX_MESSAGE_BYTES // 4
"""Limit of the bytes of log-probabilities, or of vectors, in a message, which may carry several kinds of them."""

T = TypeVar("T")


def step_outputs(
    incarnation: int, number: int, update: StepUpdate, output: ModelOutput
) -> Iterator[tuple[int, wire.StepOutput]]:
    """Yield (client, message) for every client that step `number` concerns; several messages for results that are long.

    A token, its log-probabilities and the end of its request are in one message. Vectors and log-probabilities of
    prompts may be sent in messages before it.
    """
    only = _only_client(update, output)
    if only is not None:
        client, packed_slots = only
        results = wire.pack_results(update.tokens, update.positions)
        yield client, wire.StepOutput(incarnation, number, packed_slots, *results)
        return
    ends = by_client(update.finished)
    cached = by_client((client, (slot, count)) for client, slot, count in update.cached)
    queued = by_client((client, (slot, seconds)) for client, slot, seconds in update.queued)
    adapters = by_client((client, (slot, digest)) for client, slot, digest in update.adapters)
    vectors = by_client((client, (slot, vector.astype("<f4").tobytes())) for client, slot, vector in update.vectors)
    logprobs = by_client(_without_gone(output.logprobs, update.gone))
    prompt_logprobs = by_client(_without_gone(output.prompt_logprobs, update.gone))
    for client in {*update.clients.tolist(), *ends, *prompt_logprobs}:
        *earlier_prompt_logprobs, last_prompt_logprobs = _parts(prompt_logprobs.get(client, []), _num_bytes)
        for messages in earlier_prompt_logprobs:
            yield client, wire.StepOutput(incarnation, number, b"", b"", b"", prompt_logprobs=messages)
        *earlier_vectors, last_vectors = _parts(vectors.get(client, []), lambda pair: len(pair[1]))
        for pairs in earlier_vectors:
            yield client, wire.StepOutput(incarnation, number, b"", b"", b"", vectors=pairs)
        entries = np.flatnonzero(update.clients == client)
        size_of = {message.slot: _num_bytes(message) for message in logprobs.get(client, [])}
        parts = [entries]
        if size_of:
            of_slot = by_client(zip(update.slots[entries].tolist(), entries.tolist(), strict=True))
            sizes = {slot: size_of.get(slot, 0) for slot in of_slot}
            slots = _parts(list(of_slot), sizes.__getitem__)
            parts = [np.array([entry for slot in part for entry in of_slot[slot]], np.int64) for part in slots]
        # A request without a new token is in the first part.
        part_of = {int(update.slots[entry]): i for i, part in enumerate(parts) for entry in part} if parts[1:] else {}
        for i, part in enumerate(parts):
            columns = wire.pack_tokens(update.slots[part].astype(np.int64), update.tokens[part], update.positions[part])
            yield (
                client,
                wire.StepOutput(
                    incarnation,
                    number,
                    *columns,
                    finished=[end for end in ends.get(client, []) if part_of.get(end.slot, 0) == i],
                    cached=[pair for pair in cached.get(client, []) if part_of.get(pair[0], 0) == i],
                    logprobs=[message for message in logprobs.get(client, []) if part_of.get(message.slot, 0) == i],
                    prompt_logprobs=last_prompt_logprobs if i == 0 else [],
                    vectors=last_vectors if i == 0 else [],
                    queued=[pair for pair in queued.get(client, []) if part_of.get(pair[0], 0) == i],
                    adapters=[pair for pair in adapters.get(client, []) if part_of.get(pair[0], 0) == i],
                ),
            )


def _only_client(update: StepUpdate, output: ModelOutput) -> tuple[int, bytes] | None:
    """Return (client, packed slots) if the step concerns a single client and has brought tokens alone; else None."""
    clients = update.clients
    if (
        not len(clients)
        or update.finished
        or update.cached
        or update.vectors
        or update.queued
        or update.adapters
        or output.logprobs
        or output.prompt_logprobs
    ):
        return None
    return update.only_client or pack_only_client(clients, update.slots)


def by_client(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Return the items of `pairs` (client, item) by client, in their order."""
    groups: dict[int, list[T]] = {}
    for client, item in pairs:
        groups.setdefault(client, []).append(item)
    return groups


def _without_gone(
    logprobs: Sequence[tuple[int, wire.TokenLogprobs]], gone: set[RequestKey]
) -> Iterable[tuple[int, wire.TokenLogprobs]]:
    """Return `logprobs` without the messages of requests that ended while the step was pending."""
    if not gone:
        return logprobs
    return ((client, message) for client, message in logprobs if (client, message.slot) not in gone)


def _parts(items: Sequence[T], size: Callable[[T], int]) -> list[list[T]]:
    """Split `items` into parts of at most `MAX_PART_BYTES`; a larger item is a part by itself.

    `size` returns the bytes of an item. Without items there is one part, which is empty.
    """
    parts: list[list[T]] = [[]]
    total = 0
    for item in items:
        total += size(item)
        if parts[-1] and total > MAX_PART_BYTES:
            parts.append([])
            total = size(item)
        parts[-1].append(item)
    return parts


def _num_bytes(message: wire.TokenLogprobs) -> int:
    return len(message.token_ids) + len(message.values)
