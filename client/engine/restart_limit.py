"""How often a core may be started again, and how soon."""

from collections import deque

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


class RestartLimit:
    """Counts the ends of cores over a sliding window."""

    def __init__(self, max_restarts: int | None, window_s: float) -> None:
        """`max_restarts` within `window_s` seconds; None: any number."""
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._ends: deque[float] = deque()
        self._num_useless = 0

    def delay_after(self, now: float, has_served: bool) -> float | None:
        """Note that a core has ended at `now` (seconds); returns the seconds to wait before the next, None for never.

        The next comes at once after a core that has computed something, later and later after each that has not.
        """
        ends = self._ends
        ends.append(now)
        while ends[0] <= now - self._window_s:
            ends.popleft()
        if self._max_restarts is not None and len(ends) > self._max_restarts:
            return None
        self._num_useless = 0 if has_served else self._num_useless + 1
        return min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2.0 ** (self._num_useless - 1)) if self._num_useless else 0.0
