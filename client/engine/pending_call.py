"""A call to the core, and its answer."""

import asyncio
from typing import Any, NamedTuple

from vllm_mp import wire
from vllm_mp.errors import EngineError


class PendingCall(NamedTuple):
    """A call that has not been answered."""

    call_id: int
    name: str
    args: tuple[wire.CallArgument, ...]
    reply: asyncio.Future[Any]
    made_at: float
    """In seconds of `time.monotonic()`."""

    def settle(self, result: Any, error: EngineError | None) -> None:
        """Answer the call, unless its caller or the caller's event loop is gone."""
        if self.reply.done() or self.reply.get_loop().is_closed():
            return
        if error is None:
            self.reply.set_result(result)
        else:
            self.reply.set_exception(error)
