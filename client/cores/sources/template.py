"""The template process of this process, which forks its cores, and what keeps it alive."""

import contextlib
import enum
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from vllm_mp.core_link.early_template import Inherited, start_template, take_early_template, working_folder
from vllm_mp.core_link.fork_messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    Forked,
    ForkRefusal,
    ForkRequest,
    FromTemplate,
    TemplateReady,
)
from vllm_mp.machine.exit_status import describe_exit
from vllm_mp.machine.forked_process import ForkedProcess

logger = logging.getLogger(__name__)

_FORK_TIMEOUT_S = 2.0
"""Time that the template has to fork a core; a fork takes some milliseconds."""
_RETRY_S = 30.0
"""Time between two starts of a template."""
_END_TIMEOUT_S = 1.0
"""Time that the template has to end by itself."""
_IMPORT_TIMEOUT_S = 60.0
"""Time that a template that was started early gets to import everything."""


class _End(enum.Enum):
    OF_TEMPLATE = enum.auto()


class CoreTemplate:
    """Keeps a template process, which forks cores for all sources of this process.

    `prepare` starts it and starts it again after its death; `fork` returns None whenever it cannot fork a core at once,
    and the caller then starts a core as usual. All methods may be called in any thread.
    """

    def __init__(self, takes_early: bool = False) -> None:
        """`takes_early`: take over the template that `begin_core` has started."""
        self._takes_early = takes_early
        self._lock = threading.Lock()
        self._num_users = 0
        self._owner = os.getpid()
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        """The template; None also while a core that will fork it imports everything."""
        self._control: socket.socket | None = None
        """This process's end of the socket; None if there is no template and none is expected."""
        self._is_ready = False
        self._is_early = False
        """A core is to be forked from the template even if that has to wait for it."""
        self._inherited: Inherited | None = None
        self._retry_at = 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the template; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def join(self) -> None:
        """Count a user, without which `prepare` does nothing."""
        with self._lock:
            if self._owner != os.getpid():  # a forked child has its parent's descriptors, but not its children
                self._owner, self._num_users = os.getpid(), 0
                self._forget()
            self._num_users += 1
            if self._takes_early and self._control is None and (early := take_early_template()) is not None:
                self._process, self._control, self._inherited = early.process, early.control, early.inherited
                self._is_early = True

    def leave(self) -> None:
        """End the template with its last user; no-op in a forked child."""
        with self._lock:
            if self._owner == os.getpid():
                self._num_users -= 1
                if self._num_users == 0:
                    self._end()
                    self._retry_at = 0.0

    def renew(self) -> None:
        """End a template, which may have imported files that have changed since; `prepare` starts another one."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()
                self._retry_at = 0.0

    def prepare(self) -> bool:
        """Start a template if there is none; return whether it is ready, or none can be had at present.

        A template that died or could not start is started again after 30 seconds.
        """
        with self._lock:
            if self._owner != os.getpid() or self._num_users == 0:
                return True
            self._look()
            if self._control is None and time.monotonic() >= self._retry_at:
                self._start()
            return self._is_ready or self._control is None

    def is_ready(self) -> bool:
        """Return whether the template can fork a core at once."""
        with self._lock:
            if self._owner != os.getpid():
                return False
            self._look()
            return self._is_ready

    def offer(self) -> socket.socket | None:
        """Return the template's end of the socket for a core that starts now and leaves a template behind.

        Return None if no template is needed. The caller closes the socket once the core has it.
        """
        with self._lock:
            if self._owner != os.getpid() or self._num_users == 0 or self._control is not None:
                return None
            if time.monotonic() < self._retry_at:
                return None
            return self._connect()

    def fork(
        self, arguments: list[str], log: IO[bytes] | None, folder: Path, inherited: Sequence[int]
    ) -> ForkedProcess | None:
        """Fork a core; return None if no template is ready, or it does not fork one.

        `log`: its standard output and error; None: those of this process. `folder`: its working folder if that of this
        process does not exist. It has the descriptors `inherited`, with the same numbers. Raises OSError if this
        process can open no more descriptors.
        """
        with self._lock:
            if self._owner != os.getpid():
                return None
            if self._is_early and self._control is not None:
                self._wait_until_ready()
            self._look()
            if not self._is_ready:
                return None
            assert self._inherited is not None
            changes = Inherited.now().change_from(self._inherited)
            if changes is None:
                logger.info("the environment has changed since the template process started; another one replaces it")
                self._end()
                self._retry_at = 0.0
                return None
            request = ForkRequest(arguments=arguments, environment=changes, inherited=list(inherited))
            return self._fork(request, log, folder)

    def _fork(self, request: ForkRequest, log: IO[bytes] | None, folder: Path) -> ForkedProcess | None:
        output, error = (1, 2) if log is None else (log.fileno(), log.fileno())
        if len(request.inherited) > MAX_DESCRIPTORS:
            return None
        reader, writer = os.pipe()
        try:
            place = os.open(working_folder(folder), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                answer = self._ask(request, [place, reader, output, error, *request.inherited])
            finally:
                os.close(place)
        except OSError as cause:  # such as a standard output that this process has closed
            logger.info("the template process cannot fork the core: %s", cause)
            answer = None
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        if isinstance(answer, Forked):
            logger.info("the core process %d was forked from the template process %d", answer.pid, self.pid)
            return ForkedProcess(answer.pid, os.fdopen(writer, "wb"))
        os.close(writer)
        if isinstance(answer, ForkRefusal):
            logger.warning("the template process does not fork the core: %s", answer.reason)
            self._end()
            self._retry_at = time.monotonic() + _RETRY_S
        return None

    def _ask(self, request: ForkRequest, descriptors: list[int]) -> FromTemplate | None:
        """Return the answer of the template; None if it is dead or silent, and therefore ended."""
        assert self._control is not None
        assert self._process is not None
        try:
            socket.send_fds(self._control, [msgspec.json.encode(request)], descriptors)
            answer = self._receive(_FORK_TIMEOUT_S)
        except BrokenPipeError:
            answer = _End.OF_TEMPLATE
        if answer is not None and answer is not _End.OF_TEMPLATE:
            return answer
        if answer is None:
            logger.warning("the template process has not forked a core within %g s; it is ended", _FORK_TIMEOUT_S)
        else:
            logger.warning("the template process %d has ended", self._process.pid)
        self._end_at_once()
        return None

    def _look(self) -> None:
        """Notice that the template has become ready, or has ended."""
        if self._control is None:
            return
        if not self._is_ready:
            news = self._receive(0)
            if isinstance(news, TemplateReady):
                self._is_ready = True
                if self._process is None:  # a core has forked it
                    self._process = ForkedProcess(news.pid)
            elif isinstance(news, ForkRefusal):
                logger.warning("no template process can start: %s", news.reason)
                self._end_at_once()
                return
            elif news is _End.OF_TEMPLATE and self._process is None:
                self._forget()  # the core has died, for which others know the cause
                return
        if self._process is not None and (code := self._process.poll()) is not None:
            # A core that gives up its weights ends the template that holds them.
            level = logging.INFO if code == -signal.SIGTERM else logging.WARNING
            logger.log(level, "the template process %d ended with %s", self._process.pid, describe_exit(code))
            self._forget()

    def _wait_until_ready(self) -> None:
        """Wait until the template has imported everything, or has ended."""
        assert self._control is not None
        self._is_early = False
        if self._is_ready:
            return  # its message has been read, and no other follows
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.poll(1000 * _IMPORT_TIMEOUT_S)

    def _connect(self) -> socket.socket:
        """Make the socket; return the end of the template, which will say when it is ready."""
        self._retry_at = time.monotonic() + _RETRY_S
        self._inherited = Inherited.now()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return theirs

    def _start(self) -> None:
        """Start a template, which will be ready once it has imported everything.

        Raises OSError if the system cannot start a process.
        """
        with self._connect() as theirs:
            assert self._inherited is not None
            try:
                self._process = start_template(self._inherited, theirs)
            except BaseException:
                self._forget()
                raise

    def _receive(self, timeout: float) -> "FromTemplate | _End | None":
        """Return the next message, or that there will be none; None if none comes within `timeout` seconds."""
        assert self._control is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(1000 * timeout):
            return None
        try:
            data = self._control.recv(MAX_BYTES)
            return msgspec.json.decode(data, type=FromTemplate) if data else _End.OF_TEMPLATE
        except (OSError, msgspec.MsgspecError):
            return _End.OF_TEMPLATE

    def _end(self) -> None:
        """End the template, by force if it does not end by itself."""
        if self._control is None:
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # a child that the app forked may hold this end open
        if self._process is None:  # its core has ended, or has just forked it
            news = self._receive(_END_TIMEOUT_S)
            if isinstance(news, TemplateReady):
                self._process = ForkedProcess(news.pid)
        if self._is_ready and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
        self._end_at_once()

    def _end_at_once(self) -> None:
        """Kill the template, and also a core that it has forked without being able to say so."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            while (news := self._receive(0)) is not None and news is not _End.OF_TEMPLATE:
                if isinstance(news, Forked):
                    lost = ForkedProcess(news.pid)
                    lost.kill()
                    lost.wait()
        self._forget()

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
        self._process, self._control, self._is_ready = None, None, False


TEMPLATE = CoreTemplate(takes_early=True)
"""The template of this process."""
