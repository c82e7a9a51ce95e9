"""How long the parts of a start take, for the log."""

import time
from collections.abc import Callable


class StartTimes:
    """Adds up the seconds of each part, from the end of the part before it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[str, float] = {}
        self._last = clock()

    def end(self, part: str) -> None:
        """Count the time since the last call, or since this object was made, for `part`."""
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in self._parts.items())
