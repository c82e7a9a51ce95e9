"""A file of prompts: a text with a prompt in each line, or JSON lines."""

import asyncio
import codecs
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from vllm_mp.requests.sampling_params import PARAMETERS

_READ_AHEAD = 64
"""Number of lines that are read before they are needed."""
_SAMPLING_FIELDS = PARAMETERS.keys() - {
    "n",
    "best_of",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "output_kind",
}
"""The fields of `SamplingParams` that a line may have: those that leave a result one text."""


class PromptLine(NamedTuple):
    """A prompt of the file."""

    number: int
    """Number of its line in the file, from 1."""
    id: str | int
    """The id of the line, or else its number."""
    prompt: Any = None
    """Text or token ids; None if the line has messages."""
    messages: Any = None
    sampling: Mapping[str, Any] = MappingProxyType({})
    """Fields of `SamplingParams`."""
    error: ValueError | None = None
    """Why the line is not a prompt."""


async def prompt_lines(file: BinaryIO) -> AsyncIterator[PromptLine]:
    """Yield the prompts of a file, without its empty lines; a line that is not a prompt has an `error`.

    The file holds JSON lines if its first line begins with "{". Raises OSError if it cannot be read.
    """
    is_json: bool | None = None
    number = 0
    async for data in _lines(file):
        number += 1
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        data = data.rstrip(b"\r\n")
        if not data.strip():
            continue
        if is_json is None:
            is_json = data.lstrip().startswith(b"{")
        yield _read(number, data, is_json)


def _read(number: int, data: bytes, is_json: bool) -> PromptLine:
    """Return the prompt of a line."""
    line = PromptLine(number, number)
    try:
        text = data.decode()
        if not is_json:
            return line._replace(prompt=text)
        fields = json.loads(text)
    except UnicodeDecodeError as error:
        return line._replace(error=ValueError(f"the line is not UTF-8 (byte {data[error.start]:#x} at {error.start})"))
    except RecursionError:
        return line._replace(error=ValueError("the line is nested too deeply"))
    except ValueError as error:
        return line._replace(error=ValueError(f"the line is not valid JSON: {error}"))
    if not isinstance(fields, dict):
        return line._replace(error=ValueError("the line must be a JSON object with prompt or messages"))
    name = fields.pop("id", number)
    line = PromptLine(number, name, fields.pop("prompt", None), fields.pop("messages", None), fields)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return line._replace(id=number, error=ValueError(f"id must be a string or an integer, got {name!r:.100}"))
    if line.messages is not None and not isinstance(line.messages, list):
        return line._replace(error=ValueError(f"messages must be a list of messages, got {line.messages!r:.100}"))
    if (line.prompt is None) == (line.messages is None):
        return line._replace(error=ValueError("the line must have either prompt or messages"))
    if unknown := sorted(fields.keys() - _SAMPLING_FIELDS):
        allowed = ", ".join(sorted(_SAMPLING_FIELDS))
        return line._replace(
            error=ValueError(f"unknown field {unknown[0]!r:.100}; allowed beside the prompt: {allowed}")
        )
    return line


async def _lines(file: BinaryIO) -> AsyncIterator[bytes]:
    """Yield the lines of a file, and let it be closed after the last.

    A thread reads them, so that the event loop does not wait for a pipe. It is a daemon: a program that ends does not
    wait for it either.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
    room = threading.Semaphore(_READ_AHEAD)

    def read() -> None:
        def put(item: bytes | OSError | None) -> None:
            room.acquire()
            loop.call_soon_threadsafe(queue.put_nowait, item)

        with file, contextlib.suppress(RuntimeError):  # the loop was closed
            try:
                for line in file:
                    put(line)
            except OSError as error:
                put(error)
            else:
                put(None)

    threading.Thread(target=read, name="vllm-mp-prompts", daemon=True).start()
    while (item := await queue.get()) is not None:
        room.release()
        if isinstance(item, OSError):
            raise item
        yield item
