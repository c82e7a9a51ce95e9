"""Sleeping and waking up, for all clients of the core together: the core releases memory for other processes."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core_link.core_status import AWAKE, SleepState
from vllm_mp.validation.call_validation import check_sleep, check_wake_up
from vllm_mp.wire import KV_CACHE, SLEEP_TAGS, WEIGHTS, Finished

logger = logging.getLogger(__name__)

_SETBACKS = (ValueError, OSError, MemoryError, RuntimeError)
"""The errors of missing memory and of missing weight files, after which the core stays asleep. A device that has failed
raises again when its memory is released, which ends the core."""


class MemoryLostError(Exception):
    """Raised when a release has failed and cannot be undone; the core cannot continue."""


class Memory(Protocol):
    """The memory that a sleeping core releases. A release is idempotent, and also undoes a restore that failed."""

    def offload_weights(self) -> None:
        """Move the weights to host memory; raises RuntimeError, and changes nothing, if they do not fit there.

        Raises MemoryLostError if they do not fit and a part of them is lost.
        """
        ...

    def drop_weights(self) -> None:
        """Free the weights; they remain on disk."""
        ...

    def restore_weights(self) -> None:
        """Bring the weights back to the device; raises the errors of loading and allocating."""
        ...

    def drop_cache(self) -> None:
        """Free the KV cache and the graphs that are bound to it."""
        ...

    def restore_cache(self) -> None:
        """Allocate the KV cache in its former size, without contents; raises the errors of allocating."""
        ...

    def prepare(self) -> None:
        """Capture the graphs of steps again, with weights and cache restored; raises RuntimeError."""
        ...


class Sleep:
    """Decides when the core sleeps and which memory it releases.

    A sleep belongs to the core, not to the client that asked for it, and is independent of a pause: a core generates
    when it is neither asleep nor paused. `settle` carries out calls in their order. A wake-up that fails releases the
    memory that it restored; requests continue only when everything is restored.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Memory,
        send_ends: Callable[[list[tuple[int, Finished]]], None],
        note: Callable[[SleepState], None],
    ) -> None:
        """`send_ends` tells clients, by number, which of their requests have ended.

        `note` is called with every new state, before the call that caused it is answered.
        """
        self._scheduler = scheduler
        self._memory = memory
        self._send_ends = send_ends
        self._note = note
        self._queue: deque[tuple[Future[None], Callable[[], None]]] = deque()
        """Calls that `settle` will carry out: the future of the answer, and the call."""
        self.state = AWAKE

    def sleep(self, level: int, mode: str = "keep") -> "Future[None]":
        """Release the KV cache and move the weights to host memory (level 1) or drop them (level 2).

        The future is done when the core sleeps. Live requests wait, or are aborted if `mode` is "abort". If the weights
        are released already, the higher of the two levels applies. If they do not fit in host memory, the future holds
        a RuntimeError and the core continues. Raises ValueError for another level or mode.
        """
        check_sleep(level, mode)
        return self._enqueue(lambda: self._fall_asleep(level, mode))

    def wake_up(self, *tags: str) -> "Future[None]":
        """Restore the memory that `tags` name, or all of it; requests continue when nothing is missing.

        No-op if the memory is already present or the core is awake. If it cannot be restored, the future holds a
        RuntimeError and the core sleeps on as before. Raises ValueError for other tags.
        """
        wanted = check_wake_up(tags or None)
        return self._enqueue(lambda: self._wake(wanted))

    def enter(self, state: SleepState) -> None:
        """Enter the sleep of a predecessor, before any request arrives; drop weights that do not fit in host memory."""
        level, missing = state
        if not missing:
            return
        if WEIGHTS in missing:
            try:
                self._release(WEIGHTS, level)
            except RuntimeError as error:
                logger.warning("the core sleeps at level 2, because the host has no room for its weights: %s", error)
                level = 2
                self._release(WEIGHTS, level)
        if KV_CACHE in missing:
            self._release(KV_CACHE, level)
        self._scheduler.fall_asleep()
        self._enter(SleepState(level, missing))

    @property
    def is_due(self) -> bool:
        """Whether a call waits for `settle`."""
        return bool(self._queue)

    def settle(self) -> None:
        """Carry out the queued calls. No step may be pending.

        Must be called before any later message is read, so that no client sees the former state. Raises the error of a
        device that has failed, after which the core cannot continue.
        """
        while self._queue:
            done, carry_out = self._queue.popleft()
            try:
                carry_out()
            except _Setback as setback:
                done.set_exception(RuntimeError(str(setback)))
            else:
                done.set_result(None)

    def _enqueue(self, carry_out: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        self._queue.append((done, carry_out))
        return done

    def _fall_asleep(self, level: int, mode: str) -> None:
        if WEIGHTS in self.state.missing:
            level = max(level, self.state.level)
        try:
            self._release(WEIGHTS, level)
        except RuntimeError as error:
            raise _Setback(
                f"the core cannot move its weights to host memory, and continues as before: {error}; free memory, or "
                "call sleep with level=2"
            ) from None
        if mode == "abort":
            self._send_ends(self._scheduler.abort_all())
        self._scheduler.fall_asleep()
        self._release(KV_CACHE, level)
        self._enter(SleepState(level, SLEEP_TAGS))

    def _wake(self, tags: tuple[str, ...]) -> None:
        level, missing = self.state
        still_missing = tuple(tag for tag in missing if tag not in tags)
        if still_missing == missing:
            return
        restored: list[str] = []
        why = None
        try:
            for tag in missing:
                if tag in tags:
                    restored.append(tag)
                    self._restore(tag)
            if not still_missing:
                self._memory.prepare()
        except _SETBACKS as error:
            why = f"{type(error).__name__}: {error}"
        # Outside of `except`, because the error's frames refer to the restored memory, which could not be released.
        if why is not None:
            for tag in restored:
                self._release(tag, level)
            raise _Setback(
                f"the core stays asleep, because it cannot restore {' and '.join(restored)}: {why}; solve that, and "
                "call wake_up again"
            )
        if still_missing:
            self._enter(SleepState(level, still_missing))
        else:
            self._scheduler.wake_up()
            self._enter(AWAKE)

    def _enter(self, state: SleepState) -> None:
        self.state = state
        self._note(state)

    def _release(self, tag: str, level: int) -> None:
        if tag == KV_CACHE:
            self._memory.drop_cache()
        elif level == 1:
            self._memory.offload_weights()
        else:
            self._memory.drop_weights()

    def _restore(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._memory.restore_cache()
        else:
            self._memory.restore_weights()


class _Setback(Exception):
    """A call failed, and the core is in its state before the call."""
