"""A core process that this process started: its launch, its end and the cause of its end."""

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from vllm_mp.client.cores.process_activity import is_stopped
from vllm_mp.client.cores.sources.held_address import HeldAddress, listen_at
from vllm_mp.client.cores.sources.template import CoreTemplate
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_environment import core_environment, package_path
from vllm_mp.core_link.core_launch import STACKS_SIGNAL, CoreLaunch, KeptCache, Predecessor, status_path, waiting_path
from vllm_mp.core_link.core_status import CoreState, Suspension
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.exit_status import describe_exit
from vllm_mp.machine.file_owner import check_private
from vllm_mp.machine.forked_process import ForkedProcess
from vllm_mp.machine.loading_thread import lower_priority
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import NO_DIGEST, ModelDigest

logger = logging.getLogger(__name__)

_LOG_LINES = 8
"""Number of lines of the core's log that errors quote."""
_LOG_TAIL_BYTES = 16_384
"""Bytes at the end of the log in which these lines are looked for; a disk without this space is full."""
_MEMORY_LOG_BYTES = 2**20
"""Size of a log in memory; lines that come after it is full are lost."""
_STOP_TIMEOUT_S = 10.0
"""Time that a core gets to stop by itself before it is killed."""
_STOPPED_POLL_S = 0.2
"""Time between two looks at whether a signal has stopped the core that is to end."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that no request can cause, and SIGKILL only through the memory that it takes."""
_PIPE_BYTES = 2**20
"""Size of the pipe to a process that reads its second launch line late; the usual limit of the system."""
_STACKS_POLL_S = 0.01
"""Time between two looks at the size of a log to which a core writes its stacks."""
_KILL_TIMEOUT_S = 20.0
"""Time that a killed core gets to end: a device needs seconds to release many GB, or never does so once it failed."""


class Templates(NamedTuple):
    """The template processes that may fork a core."""

    with_imports: CoreTemplate | None = None
    """Has imported what a core imports; None: it must not fork this core."""
    with_model: CoreTemplate | None = None
    """Has loaded the model too; None: there is none."""
    keeps_model: bool = False
    """A core that `with_model` does not fork is to leave such a process."""
    is_standby: bool = False
    """The process starts beside a core that serves, and must not slow it down."""


class CoreProcess:
    """`python -m vllm_mp.core`, with its socket, status page and log in a private folder.

    The core's standard input stays open while this process lives. When it closes, also because this process was
    killed, the core exits.
    """

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        public: HeldAddress | None = None,
        has_log_file: bool = True,
        kept_cache: Sequence[int] = (),
        templates: Templates | None = None,
    ) -> None:
        """Start the process, which waits for `launch`.

        `public`: other clients connect to the core there. Without `has_log_file` the core writes its log to the
        standard error of this process. The core inherits the descriptors `kept_cache`. `templates` fork the process if
        they can.

        Raises OSError if the system cannot start a process, or if another user can read or write the folder.
        """
        self._owner = os.getpid()
        self.incarnation = incarnation
        self._folder = folder
        self._public = public
        self._socket_path = folder / f"core-{incarnation}.sock"
        self._status_path = folder / f"core-{incarnation}.status"
        if public is not None and public.path is not None:
            self._status_path = status_path(public.path)
        self.address = f"ipc://{self._socket_path}"
        self.log_path = folder / f"core-{incarnation}.log" if has_log_file else None
        self._memory_log: int | None = None
        """Descriptor of the log if it lies in memory because the disk is full; None: it is a file."""
        self._waiting_path = waiting_path(self._status_path)
        """Path of the status page until the process serves in place of another core."""
        self._has_page = False
        """The page at `_status_path` is that of this process; before, it is that of another core."""
        self._page: StatusPage | None = None
        folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        _check_folder(folder)
        self.model_template: CoreTemplate | None = None
        """Forks cores that have this core's model; None: nothing does. The caller ends it, maybe after this core."""
        # It listens before the core does, so that the parent can connect at once, and does not try again after a while.
        with self._open_log() as log, listen_at(self._socket_path) as listener:
            self._listener = listener.fileno()
            """The number of the descriptor in the core."""
            inherited = [self._listener, *kept_cache, *(() if public is None else public.descriptors)]
            self._popen = self._start(log, inherited, templates or Templates())
        self.pid = self._popen.pid
        self.pid_fd = _exit_descriptor(self.pid)
        """Readable once the core has ended."""
        self._is_given_up = False
        """The core was killed, and the system does not let it end."""

    def _start(
        self, log: IO[bytes] | None, inherited: Sequence[int], templates: Templates
    ) -> "subprocess.Popen[bytes] | ForkedProcess":
        """Fork the process, or start it as a new interpreter; it leaves the templates behind that are needed."""
        arguments = ["--standby"] if templates.is_standby else []
        with_model, with_imports = templates.with_model, templates.with_imports
        if with_model is not None and (forked := with_model.fork(arguments, log, self._folder, inherited)):
            self.model_template = with_model
            return forked
        with contextlib.ExitStack() as closing:

            def leave(option: str, template: CoreTemplate) -> None:
                nonlocal arguments, inherited
                if (control := template.offer()) is not None:
                    closing.enter_context(control)
                    arguments = [*arguments, f"{option}{control.fileno()}"]
                    inherited = [*inherited, control.fileno()]

            if templates.keeps_model:
                self.model_template = CoreTemplate()
                self.model_template.join()
                leave("--leave-model-template=", self.model_template)
            if with_imports is not None:
                if forked := with_imports.fork(arguments, log, self._folder, inherited):
                    return forked
                leave("--leave-template=", with_imports)
            # The core has its own process group, so that Ctrl-C in the terminal reaches this process alone, which
            # then decides about the core.
            return subprocess.Popen(
                # -P: import nothing from the current folder
                [sys.executable, "-P", "-m", "vllm_mp.core", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=core_environment() | package_path(),
                cwd=None if _has_working_folder() else self._folder,
                pass_fds=inherited,
                process_group=0,
            )

    def launch(
        self,
        config: VllmConfig,
        operator_key: bytes,
        number: int,
        suspension: Suspension,
        predecessor: Predecessor | None,
        adapters: list[AdapterRecord] | None,
        tried_constraints: list[bytes],
        kept_cache: KeptCache | None,
        *,
        waits: bool = False,
        serves_later: bool = False,
    ) -> None:
        """Send the process its configuration, with which it becomes a core; `CoreLaunch` describes the rest.

        With `waits` it loads the model, and becomes a core with the next call; with `serves_later` it serves no client
        before `let_serve`.
        """
        launch = CoreLaunch(
            config=config,
            address=self.address,
            listener=self._listener,
            incarnation=self.incarnation,
            status_path=str(self._status_path),
            waits=waits,
            serves_later=serves_later,
            runtime_dir=str(self._folder),
            parent_pid=os.getpid(),
            public=None if self._public is None else self._public.public_address(),
            number=number,
            predecessor=predecessor,
            operator_key=operator_key,
            suspension=suspension,
            adapters=adapters,
            tried_constraints=tried_constraints,
            kept_cache=kept_cache,
        )
        assert self._popen.stdin is not None
        self._has_page = self._has_page or not (waits or serves_later)
        if waits:
            with contextlib.suppress(OSError):  # room for the next line, which the process reads once it has loaded
                fcntl.fcntl(self._popen.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        with contextlib.suppress(BrokenPipeError):  # the process has died already; `CoreLauncher.finish` reports it
            self._popen.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._popen.stdin.flush()

    def let_serve(self) -> None:
        """Let a core that was launched with `serves_later` serve."""
        assert self._popen.stdin is not None
        self._has_page = True
        with contextlib.suppress(BrokenPipeError):  # the process has died already, as its parent will see
            self._popen.stdin.write(b"\n")
            self._popen.stdin.flush()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended the core; valid only after its end or after `kill`."""
        return self._popen.poll() == -signal.SIGKILL

    @property
    def was_told_to_stop(self) -> bool:
        """Whether a signal ended the core by which another process tells it to stop."""
        code = self._popen.poll()
        return code is not None and -code in _STOP_SIGNALS

    @property
    def ended_by_signal(self) -> bool:
        """Whether a signal ended the core."""
        code = self._popen.poll()
        return code is not None and code < 0

    @property
    def lost_a_mapped_file(self) -> bool:
        """Whether SIGBUS ended the core, as when a file that it maps has become shorter."""
        return self._popen.poll() == -signal.SIGBUS

    @property
    def was_drained(self) -> bool:
        """Whether the core ended by SIGINT, after which a core with a public address finishes its requests."""
        return self._popen.poll() == -signal.SIGINT

    def send_signal(self, number: int) -> None:
        """Send the core a signal; no-op after its end."""
        self._popen.send_signal(number)

    def lower_priority(self, niceness: int) -> None:
        """Make all threads of the core nicer by `niceness`, for the rest of its life; no-op after its end."""
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                lower_priority(int(thread), niceness)

    def write_stacks(self, timeout: float) -> bool:
        """Have the core write the Python stacks of its threads to its log; return whether the log has grown.

        Wait at most `timeout` seconds. A core that is stuck in other code than Python's writes them too.
        """
        first = last = self._log_size()
        deadline = time.monotonic() + timeout
        self.send_signal(STACKS_SIGNAL)
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(_STACKS_POLL_S)
            size = self._log_size()
            if size == last > first:  # it is complete
                break
            last = size
        return last > first

    def status_page(self) -> StatusPage | None:
        """The core's status page; None until the core has created it."""
        if self._page is None:
            page = StatusPage.open(self._status_path if self._has_page else self._waiting_path)
            # A shared core that was killed together with its parent has left its page at the same path.
            if page is not None and page.read().pid == self.pid:
                self._page = page
        return self._page

    def is_waiting(self) -> bool:
        """Whether the process has loaded the model, and waits for its turn."""
        page = StatusPage.open(self._waiting_path)
        return page is not None and page.state == CoreState.WAITING

    def waiting_model(self) -> ModelDigest:
        """Return the digests of the model that the process has loaded while it waits for its turn."""
        page = StatusPage.open(self._waiting_path)
        return NO_DIGEST if page is None else page.model

    def describe_end(self, log_stays: bool = True) -> str:
        """Describe how the core ended: signal or exit code, and the last lines of its log.

        Call this only after the core's end or after `kill`. `log_stays`: name the path of the log, which outlives
        the error.
        """
        code = self._popen.poll()
        cause = "SIGKILL, but the system still holds it" if code is None else describe_exit(code)
        end = f"the core process {self.pid} ended with {cause}"
        if self.log_path is None:
            return f"{end}; its log says more"
        lines = self.last_log_lines()
        where = f" ({self.log_path})" if log_stays and self._memory_log is None else ""
        if lines:
            return f"{end}; its last log lines{where}:\n" + "\n".join(lines)
        return f"{end}; its log is empty{_full_disk(self._folder)}"

    def last_log_lines(self) -> list[str]:
        """Return the last 8 lines of the core's log; none if it cannot be read."""
        if self.log_path is None:
            return []
        try:
            return self._log_tail(self.log_path).decode("utf-8", "replace").splitlines()[-_LOG_LINES:]
        except OSError:
            return []

    def _log_size(self) -> int:
        """Return the size of the core's log in bytes; 0 if it cannot be read."""
        with contextlib.suppress(OSError):
            if self._memory_log is not None:
                return os.lseek(self._memory_log, 0, os.SEEK_CUR)
            if self.log_path is not None:
                return self.log_path.stat().st_size
        return 0

    def _log_tail(self, path: Path) -> bytes:
        """Return the end of the log. Raises OSError if the file `path` cannot be read."""
        if self._memory_log is not None:
            end = os.lseek(self._memory_log, 0, os.SEEK_CUR)  # where the core writes, which shares the position
            begin = max(0, end - _LOG_TAIL_BYTES)
            return os.pread(self._memory_log, end - begin, begin)
        with path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return log.read()

    def kill(self) -> None:
        """End the core at once, even if a signal stopped it; give it up if its device keeps it from ending for 20 s."""
        self._popen.kill()
        if self._is_given_up:
            return
        try:
            self._popen.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._is_given_up = True
            logger.warning(
                "the core process %d was killed %g s ago and still exists, with its device memory; if the next core "
                "finds no memory, restart the device or the machine",
                self.pid,
                _KILL_TIMEOUT_S,
            )

    def stop(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds (10 by default); idempotent, no-op in a forked child.

        A core that a signal or a debugger has stopped takes no SIGTERM, so it is killed at once.
        """
        if os.getpid() != self._owner:
            return  # a forked child does not own the core
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        # Closing the pipe is not enough: a child that the app forked may hold it open.
        self._popen.terminate()
        if self._is_given_up:
            timeout = 0.0
        if not self._ends_within(_STOP_TIMEOUT_S if timeout is None else timeout):
            self.kill()
        if self.pid_fd >= 0:
            os.close(self.pid_fd)
            self.pid_fd = -1
        if self._memory_log is not None:
            os.close(self._memory_log)
            self._memory_log = None

    def _ends_within(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the core's end; return False early if a signal has stopped it."""
        deadline = time.monotonic() + timeout
        while True:
            remaining = deadline - time.monotonic()
            try:
                self._popen.wait(max(0.0, min(remaining, _STOPPED_POLL_S)))
                return True
            except subprocess.TimeoutExpired:
                if remaining <= _STOPPED_POLL_S or is_stopped(self.pid):
                    return False

    def remove_files(self) -> None:
        """Remove the files of a core that has ended, except its log."""
        paths = [self._socket_path, self._status_path if self._has_page else self._waiting_path]
        if self._has_left_waiting_page():
            paths.append(self._waiting_path)
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()

    def _has_left_waiting_page(self) -> bool:
        """Return whether the core died at its turn, before it moved its page, and no other process waits now."""
        try:
            page = StatusPage.open(self._waiting_path) if self._has_page else None
        except OSError as error:  # such as no free file descriptor, which must not keep the next core from starting
            logger.warning(
                "cannot tell whether the core process %d has left %s: %s", self.pid, self._waiting_path, error
            )
            return False
        return page is not None and page.read().pid == self.pid

    def _open_log(self) -> AbstractContextManager[IO[bytes] | None]:
        """Return the log file, or one in memory if the disk is full; None: the core inherits its outputs.

        Raises OSError if no file can be opened.
        """
        if self.log_path is None:
            return contextlib.nullcontext()
        with contextlib.suppress(OSError):
            log = self.log_path.open("wb")
            try:
                os.posix_fallocate(log.fileno(), 0, _LOG_TAIL_BYTES)
                os.ftruncate(log.fileno(), 0)
                return log
            except BaseException:
                log.close()
                raise
        # The log says why a core has ended, also where the disk is full.
        self._memory_log = os.memfd_create("vllm_mp-core-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory_log, _MEMORY_LOG_BYTES)
        fcntl.fcntl(self._memory_log, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        return open(os.dup(self._memory_log), "wb")


def _has_working_folder() -> bool:
    """Return whether the working folder of this process exists; MKL ends a core whose working folder does not."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _full_disk(folder: Path) -> str:
    """Return the words for an error that say that the disk of `folder` is full; nothing if it is not."""
    with contextlib.suppress(OSError):
        if os.statvfs(folder).f_bavail == 0:
            return f", and no space is left in {folder}: free some, or set TMPDIR to another folder"
    return ""


def _exit_descriptor(pid: int) -> int:
    """Return a descriptor that becomes readable when the child process `pid` ends."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # some sandboxes have no pidfd: a thread waits instead, without reaping the child
        reader, writer = os.pipe()

        def wait() -> None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            os.close(writer)

        threading.Thread(target=wait, name="core-exit-watch", daemon=True).start()
        return reader


def _check_folder(folder: Path) -> None:
    """Raise PermissionError, with the remedy, if another user can read or write the runtime folder."""
    try:
        check_private(folder, folder.lstat())
    except ValueError as error:
        raise PermissionError(f"the runtime folder is not private: {error}") from error
