"""A process that compiles constraints before the core does: the library may take long, take much memory or crash.

`python -m vllm_mp.core.structured_output.trial` reads a `TokenizerSource` and then `TrialRequest`s on standard input,
and answers each on standard output with a `TrialResult`. Messages are JSON in one line. The process loads the library
and parses nothing of a constraint: each trial is a fork of it, whose end by a crash or a limit ends nothing else. The
process ends with its standard input, whatever is being compiled.
"""

import contextlib
import ctypes
import gc
import os
import random
import resource
import select
import signal
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import LLGuidanceLibrary
from vllm_mp.core.structured_output.trial_process import MAX_MEMORY, TrialLimits, TrialRequest, TrialResult

_NICENESS: Final = 10
_STACK_BYTES: Final = 2**21
"""Stack of the thread that compiles. The core's threads have more, so a constraint that fits here fits there."""
_NUM_TOKENS: Final = 48
"""Number of random tokens of output that are tried."""
_MAX_STEP_S: Final = 0.1
"""Processor time of one mask, or of accepting one token. A core waits for both."""
_MAX_WALK_S: Final = 1.0
_MAX_QUOTED: Final = 100
"""Characters of a constraint's text in an error."""
_SET_DEATH_SIGNAL: Final = 1
_TOO_LITTLE_TIME: Final = 0.75
"""Share of its processor time that a trial must have got by the end of its time, or the machine is too busy."""


def main() -> None:
    """Answer constraints until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the engine
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = _Lines(0)
    first = lines.next()
    if first is None:
        return
    trials = _Trials(msgspec.json.decode(first, type=TokenizerSource), lines)
    _write(1, _encoded(TrialResult()))
    while (line := lines.next()) is not None:
        if not line.isdigit():  # a number cancels a trial that has ended
            _write(1, trials.run(msgspec.json.decode(line, type=TrialRequest)))


class _Lines:
    """The lines from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._data = b""
        self.has_ended = False

    def next(self) -> bytes | None:
        """Wait for the next line and return it; None at the end."""
        while (line := self.ready()) is None and not self.has_ended:
            self.read()
        return line

    def ready(self) -> bytes | None:
        """Return the next line if it was read already."""
        line, newline, rest = self._data.partition(b"\n")
        if not newline:
            return None
        self._data = rest
        return line

    def read(self) -> None:
        """Read what there is; wait if there is nothing."""
        data = os.read(self.descriptor, 2**20)
        self._data += data
        self.has_ended = not data


class _Trials:
    """The library, loaded once, and the trials that are forked with it."""

    def __init__(self, source: TokenizerSource, lines: _Lines) -> None:
        self._lines = lines
        self._source = source
        self._library = LLGuidanceLibrary(source)
        with contextlib.suppress(GrammarError):  # compiling raises it again
            self._library.load()
        gc.collect()
        gc.freeze()  # a collection in a fork would copy all pages

    def run(self, request: TrialRequest) -> bytes:
        """Return the answer to a request, as a line."""
        reader, writer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._try_in_fork(request, writer, parent)
            finally:
                os._exit(1)
        os.close(writer)
        try:
            is_cancelled, is_late, line = self._follow(pid, reader, request)
        finally:
            os.close(reader)
        _, status, used = os.wait4(pid, 0)
        if line.endswith(b"\n"):
            return line
        if is_cancelled:
            return _encoded(TrialResult(error="no request needs the constraint any longer"))
        limits, code = request.limits, os.waitstatus_to_exitcode(status)
        is_over = is_late or code == -signal.SIGXCPU
        if is_over and not limits.is_last:
            return _encoded(TrialResult(is_beyond=True))
        if is_late and used.ru_utime + used.ru_stime < _TOO_LITTLE_TIME * limits.cpu_s:
            error = f"compiling did not end within {limits.wall_s:g} s, because the machine is busy"
            return _encoded(TrialResult(error=error, is_late=True))
        reason = f"compiling takes longer than {limits.cpu_s} s" if is_over else _reason_of_end(code)
        was_killed = not is_over and code in _KILLED
        return _encoded(TrialResult(error=f"{reason}; simplify the constraint", was_killed=was_killed))

    def _follow(self, pid: int, reader: int, request: TrialRequest) -> tuple[bool, bool, bytes]:
        """Wait for the end of a trial; return whether it was cancelled, whether it took too long, and its answer."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        poll.register(self._lines.descriptor, select.POLLIN)
        deadline = time.monotonic() + request.limits.wall_s
        is_cancelled = is_late = False
        answer = bytearray()
        while True:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready and not is_late:
                is_late, deadline = True, float(2**20) + deadline
                os.kill(pid, signal.SIGKILL)
            if self._lines.descriptor in ready:
                self._lines.read()
                if self._lines.has_ended:
                    os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                while (line := self._lines.ready()) is not None:
                    if line == b"%d" % request.number:
                        is_cancelled = True
                        os.kill(pid, signal.SIGKILL)
            if reader in ready:
                chunk = os.read(reader, 2**16)
                if not chunk:
                    return is_cancelled, is_late, bytes(answer)
                answer += chunk

    def _try_in_fork(self, request: TrialRequest, writer: int, parent: int) -> None:
        """Try a constraint, and write the answer; ends the process."""
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            return
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        if request.limits.is_nice:
            os.nice(_NICENESS)  # the core computes meanwhile
        _limit(request.limits)
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=lambda: _write(writer, _encoded(self._try(request))))
        thread.start()
        thread.join()
        os._exit(0)

    def _try(self, request: TrialRequest) -> TrialResult:
        """Compile a constraint and follow its grammar for some tokens."""
        try:
            prepared, grammar = self._library.compile_constraint(request.constraint)
            _walk(grammar, self._source, is_timed=not request.is_replay)
        except GrammarError as error:
            return TrialResult(error=str(error))
        except MemoryError:
            return TrialResult(error=f"{_TOO_MUCH_MEMORY}; simplify the constraint")
        except Exception as error:
            return TrialResult(error=f"the constraint could not be compiled: {type(error).__name__}: {error}")
        return TrialResult(prepared)


_KILLED: Final = (-signal.SIGABRT, -signal.SIGKILL)
"""Ends of a trial that takes too much memory, or whose machine has none left: then the system kills."""
_TOO_MUCH_MEMORY: Final = f"compiling takes more than {MAX_MEMORY >> 20} MiB of memory"


def _limit(limits: TrialLimits) -> None:
    """Limit the processor time of this process, and the memory that it may take beyond what it has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY, -1))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


def _encoded(result: TrialResult) -> bytes:
    return msgspec.json.encode(result) + b"\n"


def _write(descriptor: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _reason_of_end(code: int) -> str:
    """Return why a trial gave no answer; a negative `code` is that of a signal."""
    if code in _KILLED:
        return _TOO_MUCH_MEMORY
    if code == -signal.SIGSEGV:
        return (
            "compiling crashes the library: definitions refer to one another in too long a chain, which needs more "
            "stack than there is, or bounds of numbers are near -2**63"
        )
    return f"compiling ended its process with exit code {code}"


def _walk(grammar: Grammar, source: TokenizerSource, is_timed: bool) -> None:
    """Follow a grammar with random tokens. Raises GrammarError if that reaches a limit or, timed, takes too long."""
    matcher = grammar.matcher()
    tokens: list[int] = []
    mask = np.zeros((source.vocab_size + 31) // 32, np.int32)
    draws = random.Random(0)
    started = time.thread_time()
    for _ in range(_NUM_TOKENS):
        begin = time.thread_time()
        matcher.fill(mask)
        filled = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        continuing = [token for token in allowed if token not in source.eos_token_ids]
        if not continuing:
            return
        token = draws.choice(continuing)
        accepted = time.thread_time()
        try:
            matcher.accept([token])
        except GrammarError as error:
            _check_spelling(grammar, tokens, error)
            raise
        end = time.thread_time()
        tokens.append(token)
        slowest = max(filled - begin, end - accepted)
        if is_timed and slowest > _MAX_STEP_S:
            raise GrammarError(
                f"the constraint is too ambiguous: finding the tokens that may come next takes {slowest:.2f} s, the "
                f"limit is {_MAX_STEP_S} s; simplify it"
            )
        if end - started > _MAX_WALK_S:
            return


def _check_spelling(grammar: Grammar, tokens: list[int], error: GrammarError) -> None:
    """Raise GrammarError if the text that a grammar demands after `tokens` has no spelling in tokens of the model.

    Then a mask allows a token that stands for what the vocabulary does not have, and accepting it fails with `error`.
    """
    matcher = grammar.matcher()
    matcher.accept(tokens)
    text = matcher.forced_bytes()
    if grammar.bytes_of(grammar.tokens_of(text)) != text:
        quoted = text.decode(errors="replace")[:_MAX_QUOTED]
        raise GrammarError(
            f"the constraint demands {quoted!r}, which the model's vocabulary cannot spell; leave out its rare "
            "characters, or use a model whose vocabulary has a token for each byte"
        ) from error


if __name__ == "__main__":
    main()
