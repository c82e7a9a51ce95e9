"""The path of each token from a step's message to its consumer: the work that is done for every token.

It exists twice with the same behaviour: here, and compiled in `csrc/output_path.c`, which is used if it was built.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.detokenizer import ByteText
from vllm_mp.client.outputs.stream import Awaited, GenerationStream, ReadyStreams, RequestStream
from vllm_mp.client.outputs.wake_ups import WakeUps
from vllm_mp.outputs import CompletionOutput, RequestMetrics, RequestOutput

logger = logging.getLogger(__name__)

Entry = tuple[RequestStream, Awaited]
"""A stream, and the completion or vector that it awaits in a slot."""
Touched = list[tuple[GenerationStream, Completion]]


def take_in(
    entries: Sequence[Entry | None], slots: bytes, tokens: bytes, positions: bytes, now: float
) -> tuple[Touched, Touched]:
    """Give each token of the columns of a `StepOutput` to the completion in its slot of `entries`.

    Consumers of plain streams are told of their tokens, which arrived at `now` in seconds of `time.time()`; the caller
    must call `WakeUps.start` afterwards. Return the other entries that got a token, and those whose tokens do not
    follow what they have: tokens were lost. Raises ValueError if the columns disagree.
    """
    others: Touched = []
    lost: Touched = []
    num_slots = len(entries)
    for slot, token, position in zip(*wire.unpack_columns(slots, tokens, positions), strict=True):
        entry: Any = entries[slot] if slot < num_slots else None
        if entry is None or not entry[1].is_live:
            continue
        stream, completion = entry
        token_ids = completion.token_ids
        if len(token_ids) & 0xFFFF == position:
            token_ids.append(token)
            if stream.is_plain:
                stream.wake_for_tokens(now)
            else:
                others.append(entry)
        elif (position - len(token_ids)) & 0xFFFF < 0x8000:
            completion.is_live = False
            lost.append(entry)  # else the token was received before
    return others, lost


def take_outputs(streams: Sequence[RequestStream], take_any: Callable[[RequestStream], Any]) -> list[Any]:
    """Return the outputs of `streams`, and reset their `is_ready`.

    `take_any` does that for a single stream of any kind, and returns None if it has no output.
    """
    outputs = []
    for stream in streams:
        output = take_any(stream)
        if output is not None:
            outputs.append(output)
    return outputs


def next_output(iterator: Any, stream: RequestStream) -> Awaitable[Any]:
    """Return what `OutputIterator.__anext__` must return: an awaitable of the next output of its stream."""
    coroutine: Awaitable[Any] = iterator._next()
    return coroutine


class OutputPath(NamedTuple):
    """The functions, compiled or not."""

    take_in: Callable[[Sequence[Entry | None], bytes, bytes, bytes, float], tuple[Touched, Touched]]
    take_outputs: Callable[[Sequence[RequestStream], Callable[[RequestStream], Any]], list[Any]]
    next_output: Callable[[Any, RequestStream], Awaitable[Any]]


def _load_compiled() -> OutputPath | None:
    try:
        import vllm_mp.client.outputs._output_path as compiled
    except ImportError:  # there was no compiler when the package was installed
        return None
    try:
        compiled.configure(
            Completion,
            GenerationStream,
            ReadyStreams,
            WakeUps,
            ByteText,
            RequestMetrics,
            RequestOutput,
            RequestOutput.__struct_fields__,
            CompletionOutput,
        )
    except (AttributeError, TypeError) as error:
        logger.warning(
            "the output path runs in Python, because %s was compiled for another version of the package: %s; install "
            "the package again",
            compiled.__file__,
            error,
        )
        return None
    return OutputPath(compiled.take_in, compiled.take_outputs, compiled.next_output)


PYTHON = OutputPath(take_in, take_outputs, next_output)
COMPILED = _load_compiled()
"""None if it was not built, or for another version of the package."""
current = COMPILED or PYTHON
"""The functions in use."""
