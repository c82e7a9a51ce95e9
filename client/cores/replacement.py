"""The replacement of a core that lives by a new process, which takes over once it has loaded the model.

The process is a standby of this process, or belongs to another one that takes over everything (`handover.py`).
"""

import logging
import signal
import threading
import time
from concurrent.futures import Future

from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.cores.sources.handover import Heir
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.config import LivenessConfig
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.errors import EngineStartError
from vllm_mp.machine.loading_thread import BESIDE_A_CORE

logger = logging.getLogger(__name__)

_STOP_LOOK_S = 0.002
"""Time between two looks at a core that stops."""


class Replacement:
    """What becomes of the wish to replace the core of a launcher. `ask` may be called in any thread."""

    def __init__(self, source: CoreLauncher, limits: LivenessConfig) -> None:
        self._source = source
        self._limits = limits
        self._lock = threading.Lock()
        """Held while the fields below are set."""
        self._asked: Future[None] | None = None
        """What those wait for that have asked; None if nobody has asked since the latest end."""
        self._error: Exception | None = None
        """Why there will be no replacement any more."""
        self._heir: Heir | None = None
        """The process that wants to take over; None: there is none."""
        self.taken_by: int | None = None
        """The process id of the process that has taken over; None: none has."""
        self._deadline: float | None = None
        """When the new process must have loaded the model; None while there is none."""

    @property
    def is_asked_for(self) -> bool:
        """Whether a caller, or another process, waits to replace the core."""
        return self._asked is not None or self._heir is not None

    def hand_over_to(self, heir: Heir) -> bool:
        """Let `heir` take over once it is ready; return False if there is a replacement already."""
        with self._lock:
            if self.is_asked_for:
                return False
            self._heir = heir
            return True

    def is_handed_over(self) -> bool:
        """Return whether another process has taken over from the core that has just been replaced."""
        heir, self._heir = self._heir, None
        if heir is None:
            return False
        taken = heir.take(self._source.estate())
        heir.close()
        if taken:
            self._source.let_go()
            self.taken_by = heir.pid
        return taken

    def ask(self) -> "Future[None]":
        """Ask for a new core, or join those that have asked; the result says that it serves.

        It ends with EngineStartError or OSError if the new process did not start, after which the core goes on.
        """
        with self._lock:
            if self._asked is not None:
                return self._asked
            asked: Future[None] = Future()
            asked.set_running_or_notify_cancel()
            if self._error is not None:
                asked.set_exception(self._error)
            else:
                self._asked = asked
            return asked

    def is_ready(self, core: Core) -> bool:
        """Return whether the new process, which is to replace `core`, has loaded the same model.

        Start it at the first call, unless there is an heir.
        """
        assert core.process is not None
        if self._heir is not None:
            return self._is_heir_ready(self._heir, core.process.pid)
        try:
            if self._deadline is None:
                self._deadline = time.monotonic() + self._limits.start_timeout_s
                self._source.load_standby()
            if self._source.has_loaded_standby():
                self._source.check_standby(core)
                return True
            if time.monotonic() > self._deadline:
                raise EngineStartError(
                    "the process that was to replace the core has not loaded the model within "
                    f"start_timeout_s={self._limits.start_timeout_s:g}"
                )
        except (EngineStartError, OSError) as error:
            self._source.end_standby()
            logger.warning("the core goes on: %s", str(error).partition(";")[0])
            self.end(error)
        return False

    def _is_heir_ready(self, heir: Heir, core_pid: int) -> bool:
        try:
            return heir.is_ready(core_pid)
        except OSError as error:
            logger.warning("the core goes on, because process %d does not take over: %s", heir.pid, error)
            heir.close()
            self._heir = None
            return False

    def end(self, error: Exception | None, *, for_good: bool = False) -> None:
        """Tell those who have asked that the new core serves, or why it does not; `for_good`: no later one will."""
        with self._lock:
            asked, self._asked, self._deadline = self._asked, None, None
            if for_good:
                self._error = error
        if asked is not None and error is None:
            self._source.renew_template()
            asked.set_result(None)
        elif asked is not None:
            asked.set_exception(error)


def end_between_steps(core: Core, timeout_s: float, leaves_memory: bool) -> bool:
    """End the process of `core` after its step; return False if it died by itself meanwhile.

    With `leaves_memory` its successor needs none of its memory, so this does not wait until the system has taken that
    back. After `timeout_s` seconds it is killed in its step, which the next core computes again.
    """
    process = core.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while process.is_alive() and time.monotonic() < deadline:
        if core.page is not None and core.page.state == CoreState.STOPPED:
            if leaves_memory and process.is_alive():
                process.lower_priority(BESIDE_A_CORE)  # the system takes its memory back beside the next core's steps
                process.send_signal(signal.SIGKILL)
                return True
            break  # all that is left is the end of the interpreter, which takes time
        time.sleep(_STOP_LOOK_S)
    process.kill()
    return process.was_told_to_stop or process.was_killed
