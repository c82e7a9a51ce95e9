"""The calls to a core, and their answers."""

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_mp import wire
from vllm_mp.errors import EngineDeadError, EngineError, NotOperatorError

logger = logging.getLogger(__name__)


class PendingCall(NamedTuple):
    """A call that has not been answered."""

    call_id: int
    name: str
    args: tuple[wire.CallArgument, ...]
    reply: asyncio.Future[Any]
    made_at: float
    """In seconds of `time.monotonic()`."""

    def report_failure(self, reply: asyncio.Future[Any]) -> None:
        """Log why the call failed, for a call without a caller that waits; called when it is settled."""
        if not reply.cancelled() and (error := reply.exception()) is not None:
            logger.error("the core could not carry out %s when it was back: %s", self.name, error)

    def take(self, reply: wire.Reply) -> None:
        """Answer the call with what the core has replied."""
        kind = NotOperatorError if reply.needs_operator else EngineError
        self.settle(reply.result, None if reply.error is None else kind(reply.error))

    def settle(self, result: Any, error: EngineError | None) -> None:
        """Answer the call, unless its caller or the caller's event loop is gone."""
        if self.reply.done() or self.reply.get_loop().is_closed():
            return
        if error is None:
            self.reply.set_result(result)
        else:
            self.reply.set_exception(error)


class _Limit(NamedTuple):
    """The time that each core has to answer a call."""

    timeout: asyncio.Timeout
    seconds: float

    def suspend(self) -> None:
        """Let the time not count, because there is no core."""
        if not self.timeout.expired():
            self.timeout.reschedule(None)

    def begin(self) -> None:
        """Count the time of another core."""
        if not self.timeout.expired():
            self.timeout.reschedule(asyncio.get_running_loop().time() + self.seconds)


class PendingCalls:
    """The calls of a client that its core has not answered, in the order in which they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, PendingCall] = {}
        """By id."""
        self._limits: dict[int, _Limit] = {}
        """By id: the time limits of the calls that await a successor."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[PendingCall]:
        return iter(list(self._calls.values()))

    def add(self, call_id: int, name: str, args: tuple[wire.CallArgument, ...]) -> PendingCall:
        """Return a new call of the running event loop."""
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = self._calls[call_id] = PendingCall(call_id, name, args, reply, time.monotonic())
        return call

    def pop(self, call_id: int) -> PendingCall | None:
        """Remove a call and return it; None if it has ended."""
        self._limits.pop(call_id, None)
        return self._calls.pop(call_id, None)

    def limit(self, call: PendingCall, timeout: asyncio.Timeout, seconds: float, *, has_core: bool) -> None:
        """Give each core `seconds` to answer `call`, whose `timeout` does not count the time without a core."""
        limit = self._limits[call.call_id] = _Limit(timeout, seconds)
        if not has_core:
            limit.suspend()

    def suspend_limits(self) -> None:
        """Let the time not count, because there is no core."""
        for limit in self._limits.values():
            limit.suspend()

    def begin_limits(self) -> None:
        """Count the time of another core."""
        for limit in self._limits.values():
            limit.begin()

    def fail(self, why: str, made_until: float = float("inf")) -> None:
        """End, with EngineDeadError, the calls that were made at `made_until`, as `time.monotonic()`, or before."""
        for call in self:
            if call.made_at <= made_until:
                self.pop(call.call_id)
                call.settle(None, EngineDeadError(why))
