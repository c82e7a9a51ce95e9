"""The token ids of prompts, made beside the event loop: no prompt, however long, delays the loop or a short prompt."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer, is_plain
from vllm_mp.client.microbatcher import Microbatcher
from vllm_mp.client.prompt import TooManyTokensError, check_token_ids
from vllm_mp.client.token_length import TokenLength, token_length

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_INLINE_CHARS: Final = 256
"""Texts of this many characters in all are tokenized on the event loop: in less time than a thread needs to wake."""
_SHORT_CHARS: Final = 2**15
"""Maximum number of characters of a short text, and of all texts of a batch: some milliseconds of work."""
_MAX_BATCH_SIZE: Final = 256


class PromptTokenizer:
    """Makes token ids, the same as `tokenizer(text).input_ids`, without the rest of what a tokenizer call returns.

    Short texts share batches on one worker thread, and a few characters are tokenized at once. Long texts have a thread
    of their own, on which they run one by one. The tokenizers library releases the GIL while it works. All threads use
    a copy of the library's tokenizer which is never changed, because a call of `tokenizer` that sets truncation waits,
    with the GIL, for all calls that run.

    A tokenizer that is written in Python, and a text with other options than `add_special_tokens`, go through an
    `AsyncMicrobatchTokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._calls = AsyncMicrobatchTokenizer(tokenizer)
        self._token_length: TokenLength | None = None
        self._lanes: tuple[Microbatcher, Microbatcher] | None = None
        if (copy := _copy(tokenizer)) is not None:
            backend, self._token_length = copy
            run = functools.partial(_encode, backend)
            self._lanes = Microbatcher(run, _MAX_BATCH_SIZE, 0.0, _SHORT_CHARS, _INLINE_CHARS), Microbatcher(run, 1)

    async def ids(self, text: str, options: dict[str, Any], max_tokens: int | None = None) -> list[int]:
        """Return `tokenizer(text, **options).input_ids`.

        Raises TooManyTokensError for more than `max_tokens`, RuntimeError if the tokenizer was closed, and what the
        tokenizer itself raises.
        """
        add_special_tokens = options.get("add_special_tokens", True)
        if self._lanes is None or options.keys() - {"add_special_tokens"} or not isinstance(add_special_tokens, bool):
            return check_token_ids((await self._calls(text, **options)).input_ids, max_tokens)
        length = self._token_length
        if (
            max_tokens is not None
            and length is not None
            and len(text) > max_tokens * length.max_chars
            and (min_tokens := length.min_tokens(text)) > max_tokens
        ):
            raise TooManyTokensError(f"{len(text)} characters, which are at least {min_tokens} tokens")
        short, long = self._lanes
        lane = short if len(text) <= _SHORT_CHARS else long
        job = _Text(text, add_special_tokens, max_tokens)
        token_ids: list[int] = await lane.queues().add(job.add_special_tokens, job, len(text))
        return token_ids

    async def decode(self, token_ids: list[int], options: dict[str, Any]) -> str:
        """Return `tokenizer.decode(token_ids, **options)`.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        return await self._calls.decode(token_ids, **options)

    def close(self) -> None:
        """End the worker threads; callers that still wait get a RuntimeError. Idempotent; from any thread."""
        self._calls.close()
        for lane in self._lanes or ():
            lane.close()


class _Text(NamedTuple):
    """A text to tokenize."""

    text: str
    add_special_tokens: bool
    max_tokens: int | None


def _encode(backend: Tokenizer, jobs: list[_Text]) -> list[list[int]]:
    """Return the token ids of texts that agree on `add_special_tokens`.

    Raises TooManyTokensError, before it makes a list of the token ids, for a text with more than its `max_tokens`.
    """
    encodings = backend.encode_batch_fast([job.text for job in jobs], add_special_tokens=jobs[0].add_special_tokens)
    for job, encoding in zip(jobs, encodings, strict=True):
        if job.max_tokens is not None and len(encoding) > job.max_tokens:
            raise TooManyTokensError(f"{len(encoding)} tokens")
    return [encoding.ids for encoding in encodings]


def _copy(tokenizer: Any) -> tuple[Tokenizer, TokenLength | None] | None:
    """Return a copy of the library's tokenizer in `tokenizer`, and its `token_length`.

    None if `tokenizer` runs code of its own, so that a copy might give other token ids.
    """
    from tokenizers import Tokenizer

    if not is_plain(tokenizer):
        return None
    try:
        file = tokenizer.backend_tokenizer.to_str()
    except Exception:
        # A part that is written in Python cannot be copied.
        return None
    copy = Tokenizer.from_str(file)
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = tokenizer.split_special_tokens
    return copy, token_length(file)
