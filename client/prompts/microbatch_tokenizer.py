"""A `transformers` tokenizer for many callers of an event loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mp.arguments.unserved_names import refuse_attributes
from vllm_mp.client.prompts.microbatcher import ALONE, Microbatcher

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


class AsyncMicrobatchTokenizer:
    """Runs a `transformers` tokenizer for many callers on one worker thread, so that the event loop never blocks.

    Requests that arrive together run as one batched call. Encodes share a call if they agree on `add_special_tokens`
    and on truncation (none, or to the model's maximum), decodes if they agree on all keywords; all other requests run
    one by one. A single request that finds the tokenizer idle does not wait for others.

    A caller gets what its own call would have returned or raised: a batch that fails is run again item by item, and a
    cancelled caller does not affect the others. The object belongs to no event loop: it may be constructed before a
    loop runs, and used in several.

    Args:
        tokenizer: the tokenizer to call.
        max_batch_size: the maximum number of requests in one call, at least 1.
        batch_wait_timeout_s: the maximum time, in seconds, that the first of several requests waits for more.

    Raises:
        ValueError: `max_batch_size` or `batch_wait_timeout_s` is out of range.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_batch_size: int = 32, batch_wait_timeout_s: float = 0.002
    ) -> None:
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        if not (batch_wait_timeout_s >= 0 and math.isfinite(batch_wait_timeout_s)):
            raise ValueError(f"batch_wait_timeout_s={batch_wait_timeout_s} must be finite and at least 0 seconds")
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.batch_wait_timeout_s = batch_wait_timeout_s
        self._batches = Microbatcher(functools.partial(_run, tokenizer), max_batch_size, batch_wait_timeout_s)

    __getattr__ = refuse_attributes(
        dict.fromkeys(
            (
                *("_batch_decode_loop", "_batch_encode_loop", "_batcher_tasks", "_can_batch", "_executor"),
                *("_get_queue", "_loop", "_queue_key", "_queues"),
            ),
            "it serves several event loops with a thread and without tasks; call the object, encode() or decode()",
        )
    )

    async def __call__(self, prompt: str, **kwargs: Any) -> BatchEncoding:
        """Encode `prompt` as `tokenizer(prompt, **kwargs)` does.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        encoding: BatchEncoding = await self._batches.queues().add(
            _encode_kind(self.tokenizer, prompt, kwargs), _Call(True, prompt, kwargs)
        )
        return encoding

    async def encode(self, prompt: str, **kwargs: Any) -> list[int]:
        """Return the token ids of a call of this object."""
        token_ids: list[int] = (await self(prompt, **kwargs))["input_ids"]
        return token_ids

    async def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Decode `token_ids` as `tokenizer.decode(token_ids, **kwargs)` does.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        text: str = await self._batches.queues().add(_decode_kind(token_ids, kwargs), _Call(False, token_ids, kwargs))
        return text

    def close(self) -> None:
        """End the worker thread; callers that still wait get a RuntimeError. Idempotent; from any thread."""
        self._batches.close()


class _Call(NamedTuple):
    """An encode or a decode."""

    encodes: bool
    """True: encode `payload`; False: decode it."""
    payload: Any
    """The text, or the token ids."""
    kwargs: dict[str, Any]


def _encode_kind(tokenizer: PreTrainedTokenizerBase, prompt: Any, kwargs: dict[str, Any]) -> Hashable:
    """Return the queue for an encode. Requests in a queue may share a call, except in the queue `ALONE`."""
    # In a batch, the tokenizer would read a list as a pair or as words.
    if not isinstance(prompt, str) or not kwargs.keys() <= {"add_special_tokens", "truncation", "max_length"}:
        return ALONE
    add_special_tokens = kwargs.get("add_special_tokens", True)
    truncation, max_length = kwargs.get("truncation"), kwargs.get("max_length")
    if not isinstance(add_special_tokens, bool):
        return ALONE
    if truncation is True and (max_length is None or max_length == getattr(tokenizer, "model_max_length", None)):
        return "encode", add_special_tokens, "model_max"
    # A max_length alone means truncation too.
    if (truncation is None or truncation is False) and max_length is None:
        return "encode", add_special_tokens, "none"
    return ALONE


def _decode_kind(token_ids: Any, kwargs: dict[str, Any]) -> Hashable:
    """Return the queue for a decode, as `_encode_kind` does for an encode."""
    if not isinstance(token_ids, (list, tuple)) or (token_ids and not isinstance(token_ids[0], int)):
        return ALONE
    try:
        return "decode", frozenset(kwargs.items())
    except TypeError:
        return ALONE


def _run(tokenizer: PreTrainedTokenizerBase, calls: list[_Call]) -> list[Any]:
    """Return the results of calls of one kind, from one call of the tokenizer. Raises what the tokenizer raises."""
    encodes, payload, kwargs = calls[0]
    if len(calls) == 1:
        return [(tokenizer if encodes else tokenizer.decode)(payload, **kwargs)]
    payloads = [call.payload for call in calls]
    if not encodes:
        texts: list[Any] = tokenizer.batch_decode(payloads, **kwargs)
        return texts
    if is_plain(tokenizer) and not kwargs.keys() - {"add_special_tokens"}:
        return _encode_plain(tokenizer, payloads, kwargs.get("add_special_tokens", True))
    from transformers import BatchEncoding

    encoded = tokenizer(payloads, **kwargs)
    encodings = encoded.encodings
    return [
        BatchEncoding({key: values[i] for key, values in encoded.items()}, [encodings[i]] if encodings else None)
        for i in range(len(encoded["input_ids"]))
    ]


def is_plain(tokenizer: Any) -> bool:
    """Return whether a call of `tokenizer` does what the tokenizers library does, without code of its own."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(tokenizer), method) is getattr(PreTrainedTokenizerFast, method)
        for method in ("__call__", "_encode_plus", "_convert_encoding")
    )


def _encode_plain(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> list[BatchEncoding]:
    """Return `tokenizer(text, add_special_tokens=...)` for each text, in less time than a call of `tokenizer` takes."""
    from transformers import BatchEncoding
    from transformers.tokenization_utils_base import TruncationStrategy
    from transformers.utils import PaddingStrategy

    tokenizer.set_truncation_and_padding(
        PaddingStrategy.DO_NOT_PAD, TruncationStrategy.DO_NOT_TRUNCATE, 0, 0, pad_to_multiple_of=None, padding_side=None
    )
    backend = tokenizer.backend_tokenizer
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    attributes = {
        name: attribute
        for name, attribute in (
            ("input_ids", "ids"),
            ("token_type_ids", "type_ids"),
            ("attention_mask", "attention_mask"),
        )
        if name == "input_ids" or name in tokenizer.model_input_names
    }
    return [
        BatchEncoding({name: getattr(encoding, attribute) for name, attribute in attributes.items()}, [encoding])
        for encoding in backend.encode_batch(texts, add_special_tokens=add_special_tokens)
    ]
