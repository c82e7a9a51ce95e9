"""Pausing and resuming generation, for all clients of the core together."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.validation.call_validation import check_pause
from vllm_mp.wire import Finished

_MAX_DRAINS = 4096
_RETURN_S = 10.0
"""Time that the clients of a core that died get to send their requests to its successor."""


class _Drain(NamedTuple):
    """A call of `pause` that is answered when all requests that arrived before it have ended."""

    done: "Future[None]"
    clears_cache: bool


class Pause:
    """Tells the scheduler when to hold requests back, and callers when their pause has taken effect.

    A pause belongs to the core, not to the client that asked for it: it outlives that client and the core, whose
    successor enters it, and any operator may end it. A pause during a pause changes the mode for the requests that are
    not held back. Held requests stay held until `resume`, unless the mode is "abort", which ends every request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        send_ends: Callable[[list[tuple[int, Finished]]], None],
        note: Callable[[str, int], None],
    ) -> None:
        """`send_ends` sends (client, end) of requests that have ended to their clients.

        `note` is called with every new state: the mode, empty without a pause, and the number of requests that a pause
        with mode "wait" still lets run.
        """
        self._scheduler = scheduler
        self._send_ends = send_ends
        self._note = note
        self._mode = ""
        """The mode of the pause in force; empty: there is none."""
        self._returning_until = 0.0
        """Time after which requests that clients have not sent again count as ended, in seconds of
        `time.monotonic()`."""
        self._drains: list[_Drain] = []
        """Calls with mode "wait" that are not answered yet."""

    def enter(self, mode: str, num_draining: int) -> None:
        """Enter the pause of a predecessor, before any request arrives; `mode` is empty if there was none.

        With mode "wait", the `num_draining` requests that were to run to their ends do so when their clients send them
        again; those that do not come within 10 s count as ended.
        """
        self._mode = mode
        if not mode:
            return
        self._scheduler.pause(freeze=mode == "keep")
        if mode == "wait" and num_draining:
            self._scheduler.num_returning = num_draining
            self._returning_until = time.monotonic() + _RETURN_S
            self._drains.append(_Drain(Future(), clears_cache=True))

    def pause(self, mode: str, clear_cache: bool) -> "Future[None]":
        """Hold back requests that arrive from now on, and end the live requests as `mode` says.

        "abort" ends every request now, "wait" lets them run to their ends, "keep" stops them until `resume`. With
        `clear_cache`, nothing that was computed before the pause is used after it.

        The future is done when the pause has taken effect. That is at once, except with "wait": then `settle` sets it
        when the last of the requests has ended, and it fails with RuntimeError if `resume` or a pause with "keep" comes
        first.

        Raises ValueError for another mode, for a `clear_cache` that is not a bool, and if too many calls wait already.
        """
        try:
            check_pause(mode, clear_cache)
        except TypeError as error:
            raise ValueError(str(error)) from None  # what a client sends is never a defect of the core
        if mode == "wait" and len(self._drains) >= _MAX_DRAINS:
            raise ValueError(f"too many calls wait for a pause: the limit is {_MAX_DRAINS}; resume generation first")
        done: Future[None] = Future()
        self._scheduler.pause(freeze=mode == "keep")
        self._mode = mode
        if mode == "wait":
            self._note(mode, self._num_draining)
            self._drains.append(_Drain(done, clear_cache))
            return done
        self._scheduler.num_returning = None
        self._note(mode, 0)
        if mode == "abort":
            self._send_ends(self._scheduler.abort_all())
        else:
            self._fail_drains("was paused with mode 'keep'")
        if clear_cache:
            self._scheduler.preempt_all()
            self._scheduler.cache.forget_prefixes()
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Let all requests run; no-op if the core is not paused."""
        self._fail_drains("was resumed")
        self._mode = ""
        self._scheduler.num_returning = None
        self._scheduler.resume()
        self._note("", 0)

    def settle(self) -> None:
        """Answer the calls that wait for requests to end, if these requests have ended.

        Must be called whenever requests may have ended.
        """
        if not self._drains:
            return
        if time.monotonic() > self._returning_until:
            self._scheduler.num_returning = None
        num_draining = self._num_draining
        if self._mode == "wait":
            self._note(self._mode, num_draining)
        if num_draining:
            return
        self._scheduler.num_returning = None
        drains, self._drains = self._drains, []
        if any(drain.clears_cache for drain in drains):
            self._scheduler.cache.forget_prefixes()
        for drain in drains:
            drain.done.set_result(None)

    @property
    def _num_draining(self) -> int:
        return self._scheduler.num_active + (self._scheduler.num_returning or 0)

    def _fail_drains(self, event: str) -> None:
        """Answer the calls that wait with an error: `event` came before their requests ended."""
        self.settle()  # Their requests may have ended since the last call of `settle`.
        drains, self._drains = self._drains, []
        for drain in drains:
            drain.done.set_exception(
                RuntimeError(f"generation {event} before all running requests had ended; call pause again")
            )
