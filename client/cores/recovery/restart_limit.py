"""The limit of restarts, and the delays between them."""

import threading
from collections import deque
from collections.abc import Collection

_FIRST_DELAY_S = 0.1
"""Delay of the restart after a core that died before it served; it doubles for each further such core in a row."""
_LONGEST_DELAY_S = 5.0


class RestartLimit:
    """Counts the deaths of cores in a sliding window, and delays restarts."""

    def __init__(self, max_restarts: int | None, window_s: float) -> None:
        """Allow `max_restarts` within `window_s` seconds; None: any number."""
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._deaths: deque[tuple[float, int]] = deque()
        """(time, incarnation of the core) of each death that counts."""
        self._lock = threading.Lock()
        """Held while `_deaths` changes: the event loop forgives deaths."""
        self._num_failed_starts = 0
        """Number of the latest cores in a row that died before they served."""

    def delay_after(self, now: float, has_served: bool, incarnation: int = 0) -> float | None:
        """Record a death at `now` (seconds); return the seconds to wait before the restart, None for no restart.

        `incarnation` is the core's, 0 if it did not serve. The delay is 0 after a core that served, and grows with each
        core in a row that did not.
        """
        with self._lock:
            deaths = self._deaths
            deaths.append((now, incarnation))
            while deaths[0][0] <= now - self._window_s:
                deaths.popleft()
            if self._max_restarts is not None and len(deaths) > self._max_restarts:
                return None
        if has_served:
            self._num_failed_starts = 0
            return 0.0
        self._num_failed_starts += 1
        return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self._num_failed_starts - 1))

    @property
    def num_left(self) -> int | None:
        """Number of further deaths that a successor follows, -1 beyond the limit; None: any number."""
        with self._lock:
            return None if self._max_restarts is None else max(-1, self._max_restarts - len(self._deaths))

    def forgive(self, times: Collection[float]) -> None:
        """Count no longer the deaths that were recorded at `times`; from any thread."""
        with self._lock:
            self._deaths = deque(death for death in self._deaths if death[0] not in times)

    def forgive_cores(self, incarnations: Collection[int]) -> bool:
        """Count no longer the deaths of the cores with these `incarnations`; return whether there were any."""
        with self._lock:
            before = len(self._deaths)
            self._deaths = deque(death for death in self._deaths if death[1] not in incarnations)
            return len(self._deaths) < before
