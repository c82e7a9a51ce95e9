"""A core process that this process started: its folder, its launch, its end and the cause of it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import zmq

from vllm_mp.config import CoreLaunch, VllmConfig, core_environment
from vllm_mp.status_page import StatusPage

_LOG_LINES = 8
_STOP_TIMEOUT_S = 10.0


class CoreProcess:
    """Starts `python -m vllm_mp.core` with a private folder for its socket, status page and log.

    The core's standard input stays open for as long as this process lives: its end tells the core to leave, also when
    this process is killed.
    """

    def __init__(self, config: VllmConfig, incarnation: int = 1) -> None:
        self._owner = os.getpid()
        self.incarnation = incarnation
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="vllm_mp-", dir=_socket_root()))
        self.address = f"ipc://{self.runtime_dir / f'core-{incarnation}.sock'}"
        self.log_path = self.runtime_dir / f"core-{incarnation}.log"
        self._status_path = self.runtime_dir / f"core-{incarnation}.status"
        self._page: StatusPage | None = None
        launch = CoreLaunch(
            config=config,
            address=self.address,
            incarnation=incarnation,
            status_path=str(self._status_path),
            supervised=True,
            runtime_dir=str(self.runtime_dir),
            parent_pid=os.getpid(),
        )
        parent = Path(__file__).resolve().parents[1]
        environment = core_environment()
        if not {"site-packages", "dist-packages"} & set(parent.parts):
            # A source tree that is not installed is found by this process alone.
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(parent), os.environ.get("PYTHONPATH")]))
        try:
            line = msgspec.json.encode(launch) + b"\n"
            with self.log_path.open("wb") as log:
                # A process group of its own, so that Ctrl-C in the terminal reaches this process alone, which then
                # decides what becomes of the core.
                self._popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", "vllm_mp.core"],  # -P: nothing from the current folder
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    process_group=0,
                )
        except BaseException:
            shutil.rmtree(self.runtime_dir, ignore_errors=True)
            raise
        self.pid = self._popen.pid
        self.pid_fd = _exit_descriptor(self.pid)
        """Readable once the core has ended."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a core that died already is found out by whoever waits for it
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def status_page(self) -> StatusPage | None:
        """The core's status page, once there is one."""
        if self._page is None:
            self._page = StatusPage.open(self._status_path)
        return self._page

    def describe_end(self, log_stays: bool = True) -> str:
        """How the core, which must have ended, came to its end: signal or exit code, last log lines, log path.

        Without the path unless `log_stays` after the error that this is for.
        """
        code = self._popen.wait()
        cause = f"exit code {code}"
        if code < 0:
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

    def stop(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds (10 by default), and remove its folder; idempotent."""
        if os.getpid() != self._owner:
            return  # a forked child of this process: the core is not its own
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        # A child that the app forked may hold the other end of the pipe open.
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_TIMEOUT_S if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
            self.pid_fd = -1
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


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


def _socket_root() -> str | None:
    """The usual folder for temporary files, or /tmp where a socket below that would have too long a path."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/vllm_mp-xxxxxxxx/core-99999.sock.lock")
    return None if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp"
