"""Graphs that are captured while the core serves, so that a start captures only those that the first steps need.

A capture takes as long as several steps, and all streams wait for it. So a core without work captures all that are
missing, one between two looks at its messages. A core with work captures only the graph that its latest step lacked,
and captures take at most a tenth of its time.
"""

import logging
import time
from collections.abc import Callable

import torch

from vllm_mp.core.worker.cuda_graphs import Capture, CaptureError, StepGraphs

logger = logging.getLogger(__name__)

_SHARE_OF_LOAD = 0.1
"""The share of its time that a core with work may spend on captures."""


class LateCaptures:
    """Captures the shapes that `StepGraphs.capture` left for later, for a core of one rank."""

    def __init__(
        self,
        graphs: StepGraphs,
        capture: Capture,
        has_room: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capture` captured the graphs of the start. `has_room` says whether the device can hold one more graph."""
        self._graphs = graphs
        self._capture = capture
        self._has_room = has_room
        self._clock = clock
        self._pauses_until = clock()
        """Until then no graph is captured while there is work."""

    @property
    def num_left(self) -> int:
        """Number of shapes that are still to be captured."""
        return len(self._graphs.late)

    def is_due(self, *, is_idle: bool) -> bool:
        """Return whether a graph should be captured now; `is_idle` says that there are no steps to compute."""
        if not self._graphs.late:
            return False
        return is_idle or (self._graphs.missing is not None and self._clock() >= self._pauses_until)

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Capture the graph that the latest step lacked, else the next one; no step may be pending.

        After a failure, or if the device has no room, nothing more is captured: steps are padded to the captured
        shapes, or launched without a graph. Raises DeviceError if the device has failed.
        """
        shape = self._graphs.missing or self._graphs.late[0]
        started = self._clock()
        try:
            if not self._has_room():
                raise CaptureError("the device has no memory for another graph")
            self._graphs.capture_late(shape, self._capture)
        except CaptureError as error:
            logger.warning("no graphs for %d shapes of steps, of which %s: %s", len(self._graphs.late), shape, error)
            self._graphs.give_up_late()
        now = self._clock()
        self._pauses_until = now + (now - started) * (1 / _SHARE_OF_LOAD - 1)
        logger.debug("graph of %s captured in %.0f ms", shape, (now - started) * 1e3)
        if not self._graphs.late:
            logger.info("%d graphs of steps captured in all", self._graphs.num_graphs)
