"""Sleeping and waking up, for all clients of the core together: memory that others need for a while."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from vllm_mp.call_validation import check_sleep, check_wake_up
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.status_page import AWAKE, SleepState
from vllm_mp.wire import KV_CACHE, SLEEP_TAGS, WEIGHTS, Finished

_SETBACKS = (ValueError, OSError, MemoryError, RuntimeError)
"""What a lack of memory, or weights that are gone, shows as. A device that has failed raises again when its memory is
released, and that ends the core."""


class Memory(Protocol):
    """What a core can do without while it sleeps; giving up what is gone is no error and frees what is left of it."""

    def offload_weights(self) -> None:
        """Have the weights in host memory alone; raises RuntimeError, and changes nothing, where that has no room."""
        ...

    def drop_weights(self) -> None:
        """Have the weights nowhere but on disk."""
        ...

    def restore_weights(self) -> None:
        """Have the weights where they were first; raises what loading and allocating raise."""
        ...

    def drop_cache(self) -> None:
        """Free the KV cache, and what is bound to it."""
        ...

    def restore_cache(self) -> None:
        """Allocate the KV cache, as large as before; raises what allocating raises."""
        ...

    def prepare(self) -> None:
        """With weights and cache there again, make what steps need beside them; raises RuntimeError."""
        ...


class Sleep:
    """Says when the core sleeps and what it has given up for that.

    A sleep belongs to the core, not to the client that asked for it, and stands beside a pause: a core generates when
    it is neither asleep nor paused. Calls are carried out by `settle`, in their order. A wake-up that fails gives back
    what it has taken; only when all is there do requests go on.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: Memory,
        send_ends: Callable[[list[tuple[int, Finished]]], None],
        note: Callable[[SleepState], None],
    ) -> None:
        """`send_ends` tells clients, by number, which of their requests have ended; `note` is told every new state,
        before whoever has asked for it is.
        """
        self._scheduler = scheduler
        self._memory = memory
        self._send_ends = send_ends
        self._note = note
        self._wishes: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self.state = AWAKE

    def sleep(self, level: int, mode: str = "keep") -> "Future[None]":
        """Give up the KV cache, and weights on the device (1) or altogether (2); done when that has come about.

        Requests that are live are held, or with `mode` "abort" ended. A core that sleeps already goes to the deeper of
        the two levels. The result is a RuntimeError where the weights find no room, and the core goes on then. Raises
        ValueError for another level or mode.
        """
        check_sleep(level, mode)
        return self._wish(lambda: self._fall_asleep(level, mode))

    def wake_up(self, *tags: str) -> "Future[None]":
        """Take back what `tags` name, or everything; requests go on when nothing is missing any more.

        Of what is there, and of a core that is awake, nothing. The result is a RuntimeError where it cannot be had, and
        the core is as before then. Raises ValueError for other tags.
        """
        wanted = check_wake_up(tags or None)
        return self._wish(lambda: self._wake(wanted))

    @property
    def is_due(self) -> bool:
        """There is something to `settle`."""
        return bool(self._wishes)

    def settle(self) -> None:
        """Carry out the calls that are due; no step may be in flight.

        To be called before any later message is read, so that nobody sees the core as it was before. Raises what shows
        that the core cannot go on.
        """
        while self._wishes:
            done, carry_out = self._wishes.popleft()
            try:
                carry_out()
            except _Setback as setback:
                done.set_exception(RuntimeError(str(setback)))
            else:
                done.set_result(None)

    def _wish(self, carry_out: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        self._wishes.append((done, carry_out))
        return done

    def _fall_asleep(self, level: int, mode: str) -> None:
        if WEIGHTS in self.state.missing:
            level = max(level, self.state.level)
        try:
            self._give_up(WEIGHTS, level)
        except RuntimeError as error:
            raise _Setback(
                f"the core cannot have its weights in host memory, and goes on as before: {error}; free some, or call "
                "sleep with level=2"
            ) from None
        if mode == "abort":
            self._send_ends(self._scheduler.abort_all())
        self._scheduler.fall_asleep()
        self._give_up(KV_CACHE, level)
        self._enter(SleepState(level, SLEEP_TAGS))

    def _wake(self, tags: tuple[str, ...]) -> None:
        level, missing = self.state
        left = tuple(tag for tag in missing if tag not in tags)
        if left == missing:
            return
        taken: list[str] = []
        why = None
        try:
            for tag in missing:
                if tag in tags:
                    taken.append(tag)
                    self._take_back(tag)
            if not left:
                self._memory.prepare()
        except _SETBACKS as error:
            why = f"{type(error).__name__}: {error}"
        # The error is gone, and with it the frames that refer to what has been taken.
        if why is not None:
            for tag in taken:
                self._give_up(tag, level)
            raise _Setback(
                f"the core stays asleep, as it cannot have {' and '.join(taken)} back: {why}; put that right, and call "
                "wake_up again"
            )
        if left:
            self._enter(SleepState(level, left))
        else:
            self._scheduler.wake_up()
            self._enter(AWAKE)

    def _enter(self, state: SleepState) -> None:
        self.state = state
        self._note(state)

    def _give_up(self, tag: str, level: int) -> None:
        if tag == KV_CACHE:
            self._memory.drop_cache()
        elif level == 1:
            self._memory.offload_weights()
        else:
            self._memory.drop_weights()

    def _take_back(self, tag: str) -> None:
        if tag == KV_CACHE:
            self._memory.restore_cache()
        else:
            self._memory.restore_weights()


class _Setback(Exception):
    """What was asked for cannot be had, and the core is as before."""
