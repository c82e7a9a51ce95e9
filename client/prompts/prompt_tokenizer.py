"""The token ids of prompts, made beside the event loop: no prompt, however long, delays the loop or a short prompt."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm_mp.client.prompts.microbatch_tokenizer import AsyncMicrobatchTokenizer, is_plain
from vllm_mp.client.prompts.microbatcher import Microbatcher
from vllm_mp.client.prompts.model_tokenizer import ModelTokenizer
from vllm_mp.client.prompts.prompt import LONG_TEXT_CHARS, TooManyTokensError, check_text, check_token_ids
from vllm_mp.client.prompts.token_length import TokenLength, token_length
from vllm_mp.client.threads.background_call import call_in_thread

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
    a copy of the library's tokenizer which is never changed, because setting truncation waits, with the GIL, for all
    calls that run. Only long texts to truncate have another copy, whose truncation their thread sets.

    A tokenizer that is written in Python, and a text with rarer options, go through an `AsyncMicrobatchTokenizer`: long
    texts for a tokenizer in Python through another one, on a thread of its own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._calls = AsyncMicrobatchTokenizer(tokenizer)
        # Two threads may call a tokenizer in Python. A fast tokenizer has settings that such calls would change.
        self._long_calls = self._calls if tokenizer.is_fast else AsyncMicrobatchTokenizer(tokenizer)
        self._token_length: TokenLength | None = None
        self._lanes: tuple[Microbatcher, Microbatcher] | None = None
        self._backend: Tokenizer | None = None
        """The copy of the library's tokenizer; None if there is none."""
        self._num_special = 0
        """Number of special tokens that the tokenizer puts around a text."""
        if (copy := _copy(tokenizer)) is not None:
            self._backend, self._token_length = backend, _ = copy
            self._num_special = backend.num_special_tokens_to_add(False)
            run = functools.partial(_encode, backend)
            self._lanes = (
                Microbatcher(run, _MAX_BATCH_SIZE, 0.0, _SHORT_CHARS, _INLINE_CHARS),
                Microbatcher(_LongTexts(backend).encode, 1),
            )

    async def ids(self, text: str, options: dict[str, Any], max_tokens: int | None = None) -> list[int]:
        """Return `tokenizer(text, **options).input_ids`.

        Raises TooManyTokensError for more than `max_tokens`, RuntimeError if the tokenizer was closed, ValueError for a
        long text that is not valid Unicode, and what the tokenizer itself raises.
        """
        is_short = len(text) <= _SHORT_CHARS
        job = self._job(text, options, max_tokens)
        if job is not None:
            self._refuse_by_size(job)
        if len(text) > LONG_TEXT_CHARS:
            await call_in_thread(functools.partial(check_text, "the prompt", text))
        if self._lanes is None or job is None:
            calls = self._calls if is_short else self._long_calls
            return check_token_ids((await calls(text, **options)).input_ids, max_tokens)
        short, long = self._lanes
        lane = short if is_short else long
        token_ids: list[int] = await lane.queues().add(job[1:], job, len(text))
        return token_ids

    def ids_now(self, text: str, options: dict[str, Any], max_tokens: int | None = None) -> list[int]:
        """Return what `ids` returns; the calling thread does the work. Raises what `ids` raises."""
        check_text("the prompt", text)
        job = self._job(text, options, max_tokens)
        if self._backend is None or job is None:
            return check_token_ids(self.tokenizer(text, **options).input_ids, max_tokens)
        self._refuse_by_size(job)
        return _encode(self._backend, [job])[0]

    def _refuse_by_size(self, job: _Text) -> None:
        """Raise TooManyTokensError if a text has more than `max_tokens` because of its size."""
        text, max_tokens, length = job.text, job.max_tokens, self._token_length
        if (
            max_tokens is not None
            and job.max_length is None
            and length is not None
            and len(text) > max_tokens * length.max_chars
            and (min_tokens := length.min_tokens(text, max_tokens)) > max_tokens
        ):
            raise TooManyTokensError(f"{len(text)} characters, which are at least {min_tokens} tokens")

    def _job(self, text: str, options: dict[str, Any], max_tokens: int | None) -> _Text | None:
        """Return what the threads do for a text with `options`; None if only a call of the tokenizer knows."""
        add_special_tokens = options.get("add_special_tokens", True)
        if not options.keys() <= {"add_special_tokens", "truncation", "max_length"}:
            return None
        if not isinstance(add_special_tokens, bool):
            return None
        if "truncation" not in options and "max_length" not in options:
            return _Text(text, max_tokens, add_special_tokens)
        length = options.get("max_length")
        if options.get("truncation") is not True or type(length) is not int or length <= self._num_special:
            return None
        return _Text(text, max_tokens, add_special_tokens, length, self.tokenizer.truncation_side)

    async def decode(self, token_ids: list[int], options: dict[str, Any]) -> str:
        """Return `tokenizer.decode(token_ids, **options)`.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        return await self._calls.decode(token_ids, **options)

    def close(self) -> None:
        """End the worker threads; callers that still wait get a RuntimeError. Idempotent; from any thread."""
        self._calls.close()
        self._long_calls.close()
        for lane in self._lanes or ():
            lane.close()


class _Text(NamedTuple):
    """A text to tokenize."""

    text: str
    max_tokens: int | None
    add_special_tokens: bool
    max_length: int | None = None
    """The number of tokens, special tokens included, to which the text is truncated; None: it is not."""
    truncation_side: str = "right"


def _encode(backend: Tokenizer, jobs: list[_Text]) -> list[list[int]]:
    """Return the token ids of texts that agree on everything but the text. Leave `backend` as it is.

    Raises TooManyTokensError, before it makes a list of the token ids, for a text with more than its `max_tokens`.
    """
    _, max_tokens, add_special_tokens, max_length, side = jobs[0]
    texts = [job.text for job in jobs]
    if max_length is None:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    else:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        room = max_length - backend.num_special_tokens_to_add(False) if add_special_tokens else max_length
        for encoding in encodings:
            encoding.truncate(room, direction=side)
        if add_special_tokens:
            encodings = [backend.post_process(encoding) for encoding in encodings]
    for encoding in encodings:
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(f"{len(encoding)} tokens")
    return [encoding.ids for encoding in encodings]


class _LongTexts:
    """Makes token ids of long texts, as `_encode` does, on one thread.

    The library truncates a text without the GIL while it tokenizes it. `Encoding.truncate` would hold the GIL.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._truncating: Tokenizer | None = None
        """The copy whose truncation is set; None before the first text to truncate."""

    def encode(self, jobs: list[_Text]) -> list[list[int]]:
        """Return the token ids of a text. Raises what `_encode` raises."""
        (job,) = jobs
        if job.max_length is None:
            return _encode(self._backend, jobs)
        if self._truncating is None:
            self._truncating = type(self._backend).from_str(self._backend.to_str())
            self._truncating.encode_special_tokens = self._backend.encode_special_tokens
        self._truncating.enable_truncation(job.max_length, direction=job.truncation_side)
        return _encode(self._truncating, [job._replace(max_length=None)])


def _copy(tokenizer: Any) -> tuple[Tokenizer, TokenLength | None] | None:
    """Return a copy of the library's tokenizer in `tokenizer`, or itself if nothing changes it, and its `token_length`.

    None if `tokenizer` runs code of its own, so that a copy might give other token ids.
    """
    if isinstance(tokenizer, ModelTokenizer):
        return tokenizer.backend_tokenizer, tokenizer.token_length  # nothing changes it
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
