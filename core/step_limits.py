"""How long a step may make no progress: what steps of its size usually take, doubled, and a margin."""

import math
import time

_MARGIN_NS = 250_000_000
"""What a limit leaves beyond twice the usual time."""
_MIN_STEPS = 16
"""Number of steps of a size after which their times are known."""
_MAX_STEPS = 256
"""Number of the latest steps of a size whose times count."""
_RENEWAL = 16
"""Number of steps of a size between two computations of their limit."""


class StepLimits:
    """Measures steps by their size, and gives each step a limit once enough steps of its size have been measured.

    Steps have the same size if their numbers of tokens have the same number of bits, and if all or none of them read
    prompts.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, bool], _Size] = {}
        self._current: _Size | None = None
        self._began = 0

    def begin(self, num_tokens: int, reads_prompts: bool) -> int:
        """Begin to measure a step of `num_tokens`; return its limit in nanoseconds, 0 if it is not known yet."""
        key = (num_tokens.bit_length(), reads_prompts)
        size = self._sizes.get(key)
        if size is None:
            size = self._sizes[key] = _Size()
        self._current, self._began = size, time.monotonic_ns()
        return size.limit_ns

    def end(self) -> None:
        """End the measurement of the step that has begun last."""
        if self._current is not None:
            self._current.add(time.monotonic_ns() - self._began)
            self._current = None


class _Size:
    """The times of the latest steps of one size."""

    __slots__ = ("_count", "_times_ns", "limit_ns")

    def __init__(self) -> None:
        self._times_ns: list[int] = []
        self._count = 0
        self.limit_ns = 0
        """0: not known yet."""

    def add(self, time_ns: int) -> None:
        """Count a step that has taken `time_ns`."""
        if len(self._times_ns) < _MAX_STEPS:
            self._times_ns.append(time_ns)
        else:
            self._times_ns[self._count % _MAX_STEPS] = time_ns
        self._count += 1
        if self._count >= _MIN_STEPS and self._count % _RENEWAL == 0:
            p99 = sorted(self._times_ns)[math.ceil(0.99 * len(self._times_ns)) - 1]
            self.limit_ns = 2 * p99 + _MARGIN_NS
