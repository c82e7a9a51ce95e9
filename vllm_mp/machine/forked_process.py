"""A child process that another process forked for this process."""

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import IO

_POLL_S = 0.01
"""Time between two looks at a process where the system has no descriptors of processes."""


class ForkedProcess:
    """A child of this process, with the methods and attributes of `subprocess.Popen` that a core's parent uses."""

    def __init__(self, pid: int, stdin: IO[bytes] | None = None) -> None:
        """`stdin` is the other end of the standard input of the process `pid`, if it is a pipe."""
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None
        """The exit code, or the negative number of the signal that ended the process; None while it lives."""
        self._lock = threading.Lock()
        """Held while the process is reaped or signalled: afterwards its id may belong to another process."""

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None while it lives."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # SIGCHLD is ignored, so the system has kept no status; as in `subprocess`
                    self.returncode = 0
                else:
                    if pid == self.pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return what `poll` returns. Raises subprocess.TimeoutExpired after `timeout` s."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired("a forked core", timeout)
            self._wait_for_end(left)
        return code

    def _wait_for_end(self, timeout: float | None) -> None:
        """Return when the process has ended, or after `timeout` seconds at the latest."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except OSError:
            time.sleep(_POLL_S if timeout is None else min(_POLL_S, timeout))
            return
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(None if timeout is None else 1000 * timeout)
        finally:
            os.close(descriptor)

    def send_signal(self, number: int) -> None:
        """Send the process a signal; no-op after its end."""
        if self.poll() is None:
            with self._lock:
                if self.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM; no-op after the end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; no-op after the end."""
        self.send_signal(signal.SIGKILL)
