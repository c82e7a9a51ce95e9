"""The calls that change the state in which an engine's cores serve, for cores that must learn of them otherwise."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from vllm_mp import wire
from vllm_mp.errors import EngineError

_ADAPTER_ID = {"add_lora": 1, "pin_lora": 0, "remove_lora": 0}
"""Calls about an adapter, and the place of its id among their arguments."""

CallRecord = tuple[str, tuple[wire.CallArgument, ...]]


class AdapterCall(NamedTuple):
    """A call about an adapter to all cores of an engine."""

    name: str
    args: tuple[wire.CallArgument, ...]
    has_effect: "asyncio.Future[bool]"
    """Done when the call has ended: False if a core has refused it."""


class AdapterCalls:
    """The calls about adapters, as a core hears of them that starts meanwhile."""

    def __init__(self) -> None:
        self._under_way: list[AdapterCall] = []
        self._missed: list[deque[AdapterCall]] = []
        """For each core that starts: what it has missed."""

    @contextlib.contextmanager
    def noted(self, name: str, args: tuple[wire.CallArgument, ...]) -> Iterator[None]:
        """Note a call that this block makes; no-op if it is not about an adapter."""
        if name not in _ADAPTER_ID:
            yield
            return
        call = AdapterCall(name, args, asyncio.get_running_loop().create_future())
        for calls in (self._under_way, *self._missed):
            calls.append(call)
        has_effect = True  # also after a cancellation or a timeout: the cores carry it out nevertheless
        try:
            yield
        except EngineError:
            has_effect = False
            raise
        finally:
            self._under_way.remove(call)
            call.has_effect.set_result(has_effect)

    @contextlib.contextmanager
    def missed(self) -> Iterator[deque[AdapterCall]]:
        """Yield what a core misses that starts in this block: the calls that are under way and those to come.

        They are in the order in which they were made. The caller removes those that the core has caught up on.
        """
        calls = deque(self._under_way)
        self._missed.append(calls)
        try:
            yield calls
        finally:
            self._missed = [other for other in self._missed if other is not calls]


class LastingCalls:
    """The calls that bring a new core into the state of the others: adapters, a sleep, a pause."""

    def __init__(self) -> None:
        self._adapters: dict[wire.CallArgument, dict[str, CallRecord]] = {}
        """By id: what was called for each adapter that is known."""
        self._sleep: list[CallRecord] = []
        self._pause: list[CallRecord] = []
        self._lock = threading.Lock()
        """Held while the calls change: the event loop notes them, and supervisors read them."""

    def note(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """Record a call that a core has carried out; several cores may report the same one."""
        with self._lock:
            self._note(name, args)

    def _note(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        call = (name, args)
        if name == "remove_lora":
            self._adapters.pop(args[0], None)
        elif name in _ADAPTER_ID:
            self._adapters.setdefault(args[_ADAPTER_ID[name]], {})[name] = call
        elif name == "sleep":
            self._sleep = [call]
        elif name == "wake_up":
            # Later calls wake what earlier ones have left asleep; all tags end the sleep.
            woken = {tag for _, tags in [*self._sleep[1:], call] for tag in tags}
            self._sleep = [] if woken >= set(wire.SLEEP_TAGS) or not self._sleep else [*self._sleep, call]
        elif name == "pause":
            self._pause = [call]
        elif name == "resume":
            self._pause = []

    def calls(self) -> list[CallRecord]:
        """Return the calls that a new core must carry out, in order."""
        with self._lock:
            adapters = [call for calls in self._adapters.values() for call in calls.values()]
            return adapters + self._sleep + self._pause
