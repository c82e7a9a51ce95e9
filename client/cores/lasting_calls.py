"""The calls that changed the state in which an engine's cores serve, for a core that can learn it from no other."""

import threading

from vllm_mp import wire

_ADAPTER_ID = {"add_lora": 1, "pin_lora": 0, "remove_lora": 0}
"""Calls about an adapter, and the place of its id among their arguments."""

CallRecord = tuple[str, tuple[wire.CallArgument, ...]]


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
