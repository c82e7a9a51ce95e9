"""A core process that this process started: its launch, its end and the cause of it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

import vllm_mp
from vllm_mp.config import VllmConfig
from vllm_mp.core_launch import CoreLaunch, core_environment
from vllm_mp.status_page import StatusPage

logger = logging.getLogger(__name__)

_LOG_LINES = 8
_STOP_TIMEOUT_S = 10.0
_KILL_TIMEOUT_S = 20.0
"""Until a process that was killed is gone; a device takes its time to give back many GB, one that has failed for ever.
"""


class CoreProcess:
    """`python -m vllm_mp.core`, with its socket, status page and log in a private folder.

    The core's standard input stays open for as long as this process lives: its end tells the core to leave, also when
    this process is killed.
    """

    def __init__(self, folder: Path, incarnation: int, standby: bool = False) -> None:
        """Start the process, which waits for `launch`; with `standby` it imports meanwhile all that it will need."""
        self._owner = os.getpid()
        self.incarnation = incarnation
        self._folder = folder
        self._socket_path = folder / f"core-{incarnation}.sock"
        self._status_path = folder / f"core-{incarnation}.status"
        self.address = f"ipc://{self._socket_path}"
        self.log_path = folder / f"core-{incarnation}.log"
        self._page: StatusPage | None = None
        parent = Path(vllm_mp.__file__).resolve().parents[1]
        environment = core_environment()
        if not {"site-packages", "dist-packages"} & set(parent.parts):
            # A source tree that is not installed is found by this process alone.
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(parent), os.environ.get("PYTHONPATH")]))
        folder.mkdir(mode=0o700, exist_ok=True)  # something that cleans up temporary files may have removed it
        with self._open_log() as log:
            # A process group of its own, so that Ctrl-C in the terminal reaches this process alone, which then
            # decides what becomes of the core.
            self._popen = subprocess.Popen(
                # -P: nothing from the current folder
                [sys.executable, "-P", "-m", "vllm_mp.core", *(["--standby"] if standby else [])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                process_group=0,
            )
        self.pid = self._popen.pid
        self.pid_fd = _exit_descriptor(self.pid)
        """Readable once the core has ended."""
        self._is_given_up = False
        """It was killed, and the system does not get it to its end."""

    def launch(self, config: VllmConfig) -> None:
        """Tell the process what core to be."""
        launch = CoreLaunch(
            config=config,
            address=self.address,
            incarnation=self.incarnation,
            status_path=str(self._status_path),
            supervised=True,
            runtime_dir=str(self._folder),
            parent_pid=os.getpid(),
        )
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a core that died already is found out by whoever waits for it
            self._popen.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._popen.stdin.flush()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def was_killed(self) -> bool:
        """The core, which must have ended or have been killed, was ended by SIGKILL."""
        return self._popen.poll() == -signal.SIGKILL

    def status_page(self) -> StatusPage | None:
        """The core's status page, once there is one."""
        if self._page is None:
            self._page = StatusPage.open(self._status_path)
        return self._page

    def describe_end(self, log_stays: bool = True) -> str:
        """How the core, which must have ended or have been killed, came to its end: signal or exit code, and its log.

        Of that the last lines, and the path if `log_stays` after the error that this is for.
        """
        code = self._popen.poll()
        cause = f"exit code {code}"
        if code is None:
            cause = "SIGKILL, but the system has not let it go"
        elif code < 0:
            cause = f"signal {-code}"
            with contextlib.suppress(ValueError):
                cause = f"signal {signal.Signals(-code).name}"
        lines = self.last_log_lines()
        where = f" ({self.log_path})" if log_stays else ""
        log = f"; its last log lines{where}:\n" + "\n".join(lines) if lines else "; its log is empty"
        return f"the core process {self.pid} ended with {cause}{log}"

    def last_log_lines(self) -> list[str]:
        """The end of the core's log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - 16_384))
                return log.read().decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []

    def kill(self) -> None:
        """End the core at once, also one that is stopped; one that its device keeps from ending is given up."""
        self._popen.kill()
        if self._is_given_up:
            return
        try:
            self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._is_given_up = True
            logger.warning(
                "the core process %d was killed %g s ago and is still there, with what it has of its device; if the "
                "next core finds no memory there, restart the device or the machine",
                self.pid,
                _KILL_TIMEOUT_S,
            )

    def stop(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds (10 by default); idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child of this process: the core is not its own
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        # A child that the app forked may hold the other end of the pipe open.
        self._popen.terminate()
        if self._is_given_up:
            timeout = 0.0
        try:
            self._popen.wait(_STOP_TIMEOUT_S if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
            self.pid_fd = -1

    def remove_files(self, keep_log: bool) -> None:
        """Remove what a core that has ended has left behind."""
        paths = [self._socket_path, self._status_path, self._socket_path.with_name(self._socket_path.name + ".lock")]
        for path in paths if keep_log else [*paths, self.log_path]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _open_log(self) -> IO[bytes]:
        try:
            return self.log_path.open("wb")
        except OSError:  # a full disk shall cost the log, not the core
            return open(os.devnull, "wb")


def _exit_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the child process `pid` ends."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # some sandboxes do not have it: a thread waits instead, and leaves the child to be reaped
        reader, writer = os.pipe()

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.close(writer)

        threading.Thread(target=wait, name="core-exit-watch", daemon=True).start()
        return reader
