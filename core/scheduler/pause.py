"""Pausing and resuming generation, for all clients of the core together."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from vllm_mp.call_validation import check_pause
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.wire import Finished

_MAX_DRAINS = 4096


class _Drain(NamedTuple):
    """A call that is answered when the requests from before the pause have ended."""

    done: "Future[None]"
    clears_cache: bool


class Pause:
    """Says when the scheduler holds requests back, and who is told that a pause has come about.

    A pause belongs to the core, not to the client that asked for it: it outlives that client, and anyone may end it.
    A pause during a pause changes the mode for the requests that were not held back already; those stay held back
    until `resume`, unless the mode is "abort", which ends every request.
    """

    def __init__(self, scheduler: Scheduler, send_ends: Callable[[list[tuple[int, Finished]]], None]) -> None:
        """`send_ends` tells clients, by number, which of their requests have ended."""
        self._scheduler = scheduler
        self._send_ends = send_ends
        self._drains: list[_Drain] = []

    def pause(self, mode: str, clear_cache: bool) -> "Future[None]":
        """Hold back whatever arrives from now on, and let what is here end as `mode` says.

        "abort" ends every request now, "wait" lets them go on to their ends, "keep" lets none go on before `resume`.
        The result is done when the pause has come about: at once, but with "wait" by `settle`, or with a RuntimeError
        when `resume` or "keep" has come between. `clear_cache`: after it nothing computed before is used any more.

        Raises ValueError for another mode, and when too many wait already.
        """
        check_pause(mode, clear_cache)
        if mode == "wait" and len(self._drains) >= _MAX_DRAINS:
            raise ValueError(f"{_MAX_DRAINS} calls wait for the pause already, which is the most")
        done: Future[None] = Future()
        self._scheduler.pause(freeze=mode == "keep")
        if mode == "wait":
            self._drains.append(_Drain(done, clear_cache))
            return done
        if mode == "abort":
            self._send_ends(self._scheduler.abort_all())
        else:
            self._fail_drains("was paused with mode 'keep'")
        if clear_cache:
            self._scheduler.preempt_all()
            self._scheduler.forget_prefixes()
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Let everything go on; of a core that is not paused, nothing."""
        self._scheduler.resume()
        self._fail_drains("was resumed")

    def settle(self) -> None:
        """Completion the calls that wait for requests to end, if they have; to be called whenever some may have."""
        if not self._drains or self._scheduler.num_going_on:
            return
        drains, self._drains = self._drains, []
        if any(drain.clears_cache for drain in drains):
            self._scheduler.forget_prefixes()
        for drain in drains:
            drain.done.set_result(None)

    def _fail_drains(self, what: str) -> None:
        # Some may have reached their end before `settle` could see it.
        self.settle()
        drains, self._drains = self._drains, []
        for drain in drains:
            drain.done.set_exception(RuntimeError(f"generation {what} before the requests that ran had ended"))
