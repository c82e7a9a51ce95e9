"""A call to the core, and its answer."""

import asyncio
import logging
from typing import Any, NamedTuple

from vllm_mp import wire
from vllm_mp.errors import EngineError, NotOperatorError

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


class CallLimit(NamedTuple):
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
