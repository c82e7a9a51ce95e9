"""Tokenization in a worker thread, in small batches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_ALONE = "alone"
"""The queue of requests that cannot share a call."""


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
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="vllm-mp-tokenizer")
        self._batchers: dict[asyncio.AbstractEventLoop, _Batcher] = {}
        self._closed = False

    async def __call__(self, prompt: str, **kwargs: Any) -> BatchEncoding:
        """Encode `prompt` as `tokenizer(prompt, **kwargs)` does.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        return await self._batcher().add(_encode_kind(self.tokenizer, prompt, kwargs), True, prompt, kwargs)

    async def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
        """Decode `token_ids` as `tokenizer.decode(token_ids, **kwargs)` does.

        Raises RuntimeError if the tokenizer was closed, and what the tokenizer itself raises.
        """
        text: str = await self._batcher().add(_decode_kind(token_ids, kwargs), False, token_ids, kwargs)
        return text

    def close(self) -> None:
        """End the worker thread; callers that still wait get a RuntimeError. Idempotent; from any thread."""
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for loop, batcher in list(self._batchers.items()):
            # A closed loop has no callers left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(batcher.fail_all)

    def _batcher(self) -> _Batcher:
        """Return the batcher of the running loop; raises RuntimeError if the tokenizer was closed."""
        if self._closed:
            raise _closed_error()
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            for closed in [other for other in list(self._batchers) if other.is_closed()]:
                del self._batchers[closed]
            batcher = _Batcher(self.tokenizer, self._executor, self.max_batch_size, self.batch_wait_timeout_s)
            self._batchers[loop] = batcher
        return batcher


@dataclass(slots=True, eq=False)
class _Request:
    """An encode or a decode, and the caller that waits for it."""

    encodes: bool
    """True: encode `payload`; False: decode it."""
    payload: Any
    """The text, or the token ids."""
    kwargs: dict[str, Any]
    future: asyncio.Future[Any]
    arrived: float
    """In seconds of the event loop's clock."""


_Outcome = tuple[_Request, Any, BaseException | None]
"""A request with its result, or with the error that its caller gets."""


class _Batcher:
    """The queues of one event loop, one for each kind of request. All methods but `_work` run on that loop.

    The worker thread has at most one batch of each loop; while it runs, the next requests gather.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        executor: ThreadPoolExecutor,
        max_batch_size: int,
        batch_wait_timeout_s: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._executor = executor
        self._max_batch_size = max_batch_size
        self._batch_wait_timeout_s = batch_wait_timeout_s
        self._queues: dict[Hashable, deque[_Request]] = {}
        self._running: list[_Request] = []
        self._dispatch_soon = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, kind: Hashable, encodes: bool, payload: Any, kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        """Queue a request; return the future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._queues.setdefault(kind, deque()).append(_Request(encodes, payload, kwargs, future, loop.time()))
        if not self._running and not self._dispatch_soon:
            # Dispatch at the end of the loop's tick, because more requests may arrive in it.
            self._dispatch_soon = True
            loop.call_soon(self._dispatch, loop)
        return future

    def fail_all(self) -> None:
        """Fail every waiting caller, because the tokenizer was closed."""
        waiting = [*self._running, *(request for queue in self._queues.values() for request in queue)]
        self._queues.clear()
        for request in waiting:
            if not request.future.done():
                request.future.set_exception(_closed_error())

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the batch that is due first to the worker thread, or set a timer until a batch is due."""
        self._dispatch_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            return
        due, kind = math.inf, None
        for candidate in list(self._queues):
            queue = self._queues[candidate]
            while queue and queue[0].future.done():
                queue.popleft()
            if not queue:
                del self._queues[candidate]
            elif (candidate_due := self._due(candidate, queue)) < due:
                due, kind = candidate_due, candidate
        if kind is None:
            return
        if due > loop.time():
            self._timer = loop.call_at(due, self._dispatch, loop)
            return
        queue = self._queues[kind]
        size = 1 if kind == _ALONE else min(len(queue), self._max_batch_size)
        self._running = [queue.popleft() for _ in range(size)]
        try:
            self._executor.submit(self._work, loop, self._running)
        except RuntimeError:
            # Another thread closed the tokenizer meanwhile, or the interpreter is exiting.
            self.fail_all()

    def _due(self, kind: Hashable, queue: deque[_Request]) -> float:
        """Return when a queue's next batch should run, in seconds of the event loop's clock."""
        gathers = kind != _ALONE and 1 < len(queue) < self._max_batch_size
        return queue[0].arrived + (self._batch_wait_timeout_s if gathers else 0.0)

    def _work(self, loop: asyncio.AbstractEventLoop, batch: list[_Request]) -> None:
        """Tokenize a batch, with one call if possible. Runs on the worker thread."""
        tokenizer, requests = self._tokenizer, [request for request in batch if not request.future.cancelled()]
        outcomes: list[_Outcome] | None = None
        if len(requests) > 1:
            # Any failure, even a panic in the tokenizer, occurs again below for the request that caused it.
            with contextlib.suppress(BaseException):
                results = _batch(tokenizer, requests)
                outcomes = [(request, result, None) for request, result in zip(requests, results, strict=True)]
        if outcomes is None:
            outcomes = [_alone(tokenizer, request) for request in requests]
        # The loop may be closed by now, and then it has no callers left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._finish, loop, outcomes)

    def _finish(self, loop: asyncio.AbstractEventLoop, outcomes: list[_Outcome]) -> None:
        """Answer the callers of a batch, and dispatch the next batch."""
        self._running = []
        for request, result, error in outcomes:
            if request.future.done():
                continue
            if error is None:
                request.future.set_result(result)
            else:
                request.future.set_exception(error)
        self._dispatch(loop)


def _encode_kind(tokenizer: PreTrainedTokenizerBase, prompt: Any, kwargs: dict[str, Any]) -> Hashable:
    """Return the queue for an encode. Requests in a queue may share a call, except in the queue `_ALONE`."""
    # In a batch, the tokenizer would read a list as a pair or as words.
    if not isinstance(prompt, str) or not kwargs.keys() <= {"add_special_tokens", "truncation", "max_length"}:
        return _ALONE
    add_special_tokens = kwargs.get("add_special_tokens", True)
    truncation, max_length = kwargs.get("truncation"), kwargs.get("max_length")
    if not isinstance(add_special_tokens, bool):
        return _ALONE
    if truncation is True and (max_length is None or max_length == getattr(tokenizer, "model_max_length", None)):
        return "encode", add_special_tokens, "model_max"
    # A max_length alone means truncation too.
    if (truncation is None or truncation is False) and max_length is None:
        return "encode", add_special_tokens, "none"
    return _ALONE


def _decode_kind(token_ids: Any, kwargs: dict[str, Any]) -> Hashable:
    """Return the queue for a decode, as `_encode_kind` does for an encode."""
    if not isinstance(token_ids, (list, tuple)) or (token_ids and not isinstance(token_ids[0], int)):
        return _ALONE
    try:
        return "decode", frozenset(kwargs.items())
    except TypeError:
        return _ALONE


def _batch(tokenizer: PreTrainedTokenizerBase, requests: list[_Request]) -> list[Any]:
    """Return the results of requests of one kind, from one call. Raises what the tokenizer raises."""
    payloads, kwargs = [request.payload for request in requests], requests[0].kwargs
    if not requests[0].encodes:
        texts: list[Any] = tokenizer.batch_decode(payloads, **kwargs)
        return texts
    from transformers import BatchEncoding

    encoded = tokenizer(payloads, **kwargs)
    encodings = encoded.encodings
    return [
        BatchEncoding({key: values[i] for key, values in encoded.items()}, [encodings[i]] if encodings else None)
        for i in range(len(encoded["input_ids"]))
    ]


def _alone(tokenizer: PreTrainedTokenizerBase, request: _Request) -> _Outcome:
    """Return the outcome of a request that has a call of its own."""
    if request.future.cancelled():
        return request, None, None
    call = tokenizer if request.encodes else tokenizer.decode
    try:
        return request, call(request.payload, **request.kwargs), None
    except Exception as error:
        if not isinstance(error, StopIteration):
            return request, None, error
        cause: BaseException = error
    except BaseException as error:
        cause = error
    # A panic in the tokenizer's Rust code is not an Exception, so it would pass the caller's handlers. StopIteration
    # cannot be raised through an await.
    failure = RuntimeError(f"the tokenizer failed: {cause!r}")
    failure.__cause__ = cause
    return request, None, failure


def _closed_error() -> RuntimeError:
    return RuntimeError("the tokenizer is closed: create a new AsyncMicrobatchTokenizer")
