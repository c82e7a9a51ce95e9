"""How long images are encoded between two steps, so that other requests hardly slow down."""

import math
import time
from collections.abc import Callable
from typing import Final

MAX_SLICE_S: Final = 0.25
"""Time after which other requests have a step, and messages are received."""
_MIN_SHARE: Final = 0.1
"""Time for images relative to that of steps, at least, so that each image is encoded in the end."""


class EncodingPace:
    """Grants time for encoding images in proportion to the time that steps took.

    With a slowdown of 2, other requests keep half of the time. An encoding stops only after a chunk, and may take
    longer than it was granted; the next slice then begins later.
    """

    def __init__(self, slowdown: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """`slowdown` is `max_prefill_slowdown`; 0: images are encoded at once. `clock` returns seconds."""
        self._is_limited = slowdown > 0
        self._share = max(slowdown - 1, _MIN_SHARE)
        self._clock = clock
        self._granted = 0.0
        """Seconds that images may take and have not taken yet; negative: they have taken more."""
        self._counted_until = clock()
        """The time of steps is counted up to here."""

    def seconds(self, is_alone: bool) -> float:
        """Return for how long to encode now; 0: not before another step.

        `is_alone`: no other request has had a step since the last call.
        """
        if not self._is_limited:
            return math.inf
        now = self._clock()
        self._granted = min(self._granted + self._share * (now - self._counted_until), MAX_SLICE_S)
        self._counted_until = now
        if is_alone:
            self._granted = MAX_SLICE_S
        return max(0.0, self._granted)

    def note_slice(self) -> None:
        """Note that a slice, which began when `seconds` was called, has ended."""
        now = self._clock()
        self._granted -= now - self._counted_until
        self._counted_until = now
