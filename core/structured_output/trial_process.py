"""The core's end of the process that compiles suspicious constraints first."""

import os
import select
import signal
import subprocess
import sys
import threading
import time

import msgspec

from vllm_mp.core.structured_output.grammar import GrammarError, PreparedConstraint
from vllm_mp.core.structured_output.tokenizer import TokenizerSource
from vllm_mp.structured_outputs import Backend, Constraint

MAX_CPU_S = 4
"""Processor time for a constraint, in seconds."""
MAX_MEMORY = 2**30
"""Memory that compiling may take beyond the process's own, in bytes."""
_MAX_WALL_S = 30.0
"""Time for a constraint, in seconds: loading of a library, and time in which other processes run, included."""
_MAX_START_S = 60.0
_END_S = 0.5
"""Time that a process without an answer has to end by itself."""
_MAX_TRIALS = 256
"""Number of constraints after which the process is replaced, so that memory that the libraries keep is freed."""


class TrialSetup(msgspec.Struct, frozen=True):
    """The first message to the process."""

    source: TokenizerSource
    default: Backend


class TrialResult(msgspec.Struct, frozen=True):
    """The process's answer to a message."""

    prepared: PreparedConstraint | None = None
    """The constraint in the form in which it was compiled; None for the first message, and if there is an error."""
    error: str = ""


class TrialProcess:
    """Owns the process, which is started when it is first needed and replaced when a constraint has ended it.

    The process ends with the core, because its standard input does. Only one thread may call `run`.
    """

    def __init__(self, source: TokenizerSource, default: Backend) -> None:
        self._setup = TrialSetup(source, default)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_trials = 0
        self._is_stopped = False
        self._lock = threading.Lock()

    def run(self, constraint: Constraint) -> PreparedConstraint:
        """Compile a constraint in the process, and return it in the form in which that succeeded.

        Raises GrammarError if compiling fails, takes too long or ends the process.
        """
        process = self._running()
        self._num_trials += 1
        result = self._exchange(process, constraint, _MAX_WALL_S)
        if result is None:
            raise GrammarError(f"{self._reason_of_end(process)}; simplify the constraint")
        if result.prepared is None:
            raise GrammarError(result.error)
        return result.prepared

    def stop(self) -> None:
        """End the process, and start none any more; any thread may call this."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _end(self) -> None:
        process, self._process = self._process, None
        self._num_trials = 0
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> "subprocess.Popen[bytes]":
        """Return the process, started if need be."""
        with self._lock:
            if self._process is not None and self._num_trials < _MAX_TRIALS and self._process.poll() is None:
                return self._process
            self._end()
            if self._is_stopped:
                raise GrammarError("the engine stops")
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_mp.core.structured_output.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        if self._exchange(process, self._setup, _MAX_START_S) is None:
            raise GrammarError(f"the constraint cannot be compiled now: {self._reason_of_end(process)}")
        return process

    def _exchange(
        self, process: "subprocess.Popen[bytes]", message: msgspec.Struct, timeout_s: float
    ) -> TrialResult | None:
        """Send a message and return the result; None if the process ends, or gives none in time."""
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
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
        if code is None or code == -signal.SIGXCPU:
            return f"compiling takes longer than {MAX_CPU_S} s"
        if code == -signal.SIGABRT:
            return f"compiling takes more than {MAX_MEMORY >> 20} MiB of memory"
        if code == -signal.SIGSEGV:
            return (
                "compiling crashes the library: definitions refer to one another in too long a chain, which needs more "
                "stack than there is, or bounds of numbers are near -2**63"
            )
        return f"compiling ended its process with exit code {code}"
