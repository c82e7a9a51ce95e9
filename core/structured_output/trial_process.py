"""The core's end of a process that compiles constraints before the core does."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import PreparedConstraint
from vllm_mp.core_link.core_environment import package_path
from vllm_mp.requests.structured_outputs import Constraint

MAX_MEMORY: Final = 2**30
"""Memory that a trial may take beyond the process's own, in bytes."""
_PATIENCE: Final = 4
"""How many times as much processor time and time the trial of a replayed request may take."""
_MAX_START_S: Final = 60.0
_ANSWER_S: Final = 10.0
"""Time that the process has to answer after the end of a trial's time."""
_CANCEL_S: Final = 0.01
_END_S: Final = 0.5
"""Time that a process without an answer has to end by itself."""


class TrialLimits(msgspec.Struct, frozen=True):
    """What a trial may take, and what happens beyond that."""

    cpu_s: int
    """Processor time, in seconds."""
    wall_s: float
    """Time, in seconds, in which other processes run too."""
    is_nice: bool
    """Other processes come first."""
    is_last: bool
    """A constraint beyond these limits is refused; False: another process tries it, with higher limits."""


QUICK: Final = TrialLimits(cpu_s=1, wall_s=10.0, is_nice=False, is_last=False)
SLOW: Final = TrialLimits(cpu_s=4, wall_s=60.0, is_nice=True, is_last=True)


class TrialRequest(msgspec.Struct, frozen=True):
    """A constraint to try. The number of the request, alone in a line, cancels the trial."""

    number: int
    constraint: Constraint
    limits: TrialLimits
    is_replay: bool


class TrialResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The process's answer to a message; empty for the first message."""

    prepared: PreparedConstraint | None = None
    """The constraint in the form in which it was compiled; None without success."""
    error: str = ""
    is_beyond: bool = False
    """Another process must try the constraint, because it has exceeded the limits."""
    is_late: bool = False
    """The trial got too little processor time within its time; `error` says so."""
    was_killed: bool = False
    """The trial ended as if it took too much memory, which may also have been the machine's fault; `error` says so."""


class TrialUnavailableError(Exception):
    """A constraint cannot be tried now, for a reason that passes; the message says why."""


class TrialKilledError(TrialUnavailableError):
    """The trial of a replayed request's constraint was killed; the constraint or the machine may be the reason."""


class TrialProcess:
    """Owns a process that tries constraints, each in a fork of its own, so that the end of a trial costs nothing else.

    The process is started when it is first needed, and ends with the core, because its standard input does. Only one
    thread may call `run`.
    """

    def __init__(self, source: TokenizerSource, limits: TrialLimits) -> None:
        self._source = source
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0
        self._is_needed: Callable[[], bool] | None = None
        """Whether the trial that runs is needed; None: none runs."""
        self._is_stopped = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, which `run` does otherwise. Raises TrialUnavailableError if that fails."""
        self._running()

    def run(
        self, constraint: Constraint, is_replay: bool = False, is_needed: Callable[[], bool] = lambda: True
    ) -> PreparedConstraint | None:
        """Compile a constraint in the process, and return it in the form in which that succeeded.

        None: another process must try it. A constraint of a replayed request, `is_replay`, was compiled before, so it
        has more time. `is_needed` is false as soon as `cancel` may be called for this trial.

        Raises GrammarError if compiling fails, takes too much, is cancelled or ends the trial, and
        TrialUnavailableError.
        """
        process, limits = self._running(), self._limits
        if is_replay and limits.is_last:
            limits = msgspec.structs.replace(limits, cpu_s=_PATIENCE * limits.cpu_s, wall_s=_PATIENCE * limits.wall_s)
        with self._lock:
            if not is_needed():
                raise GrammarError("no request needs the constraint any longer")
            self._number += 1
            self._is_needed = is_needed
        result = self._exchange(
            process, TrialRequest(self._number, constraint, limits, is_replay), limits.wall_s + _ANSWER_S
        )
        with self._lock:
            self._is_needed = None
        if result is None:
            raise TrialUnavailableError(self._reason_of_end(process))
        if result.is_late:
            raise TrialUnavailableError(result.error)
        if result.was_killed and is_replay:
            raise TrialKilledError(result.error)
        if result.prepared is None and not result.is_beyond:
            raise GrammarError(result.error)
        return result.prepared

    def cancel(self) -> None:
        """Let the trial that runs fail if it is no longer needed; any thread may call this.

        The trial of another constraint may have begun since the caller looked. No-op if the process does not read; then
        the limits end the trial.
        """
        if not self._lock.acquire(timeout=_CANCEL_S):
            return
        try:
            is_unneeded = self._is_needed is not None and not self._is_needed()
            if is_unneeded and self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError):  # the process has ended, and the trial with it
                    self._process.stdin.write(b"%d\n" % self._number)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """End the process and refuse to start another; any thread may call this."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if it does not run."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return self._process
            self._end()
            if self._is_stopped:
                raise GrammarError("the engine stops")
            try:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "vllm_mp.core.structured_output.trial"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env=os.environ | package_path(),
                )
            except OSError as error:  # such as no memory for another process
                raise TrialUnavailableError(f"the process that compiles constraints cannot start: {error}") from error
        if self._exchange(process, self._source, _MAX_START_S) is None:
            reason = self._reason_of_end(process)
            raise TrialUnavailableError(f"the process that compiles constraints did not start: {reason}")
        return process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", message: msgspec.Struct, timeout_s: float
    ) -> TrialResult | None:
        """Send a message and return the result; None if the process ends, or gives none in time."""
        assert process.stdin is not None
        data = memoryview(msgspec.json.encode(message) + b"\n")
        try:
            with self._lock:  # so that a number which cancels comes after the message
                while data:
                    data = data[process.stdin.write(data) or 0 :]
        except OSError:
            return None
        line = self._read(process, timeout_s)
        return msgspec.json.decode(line, type=TrialResult) if line.endswith(b"\n") else None

    def _read(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
        """Return the next line from the process; what it wrote of a line if it ends or the time is over."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        end = time.monotonic() + timeout_s
        line = bytearray()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                break
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                break
            line += chunk
        return bytes(line)

    def _reason_of_end(self, process: "subprocess.Popen[bytes]") -> str:
        """Return why the process gave no answer, and end it."""
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        with self._lock:
            if self._process is process:
                self._end()
        if code is None:
            return "it gave no answer in time"
        return f"it ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
