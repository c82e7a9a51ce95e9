"""Compiling of constraints beside the core's loop, and the cache of compiled grammars."""

import logging
import os
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.structured_outputs import Constraint, ConstraintKind

logger = logging.getLogger(__name__)

_MAX_PENDING = 256
"""Number of compilations that may run or wait."""
_MAX_GRAMMARS = 512
_MAX_BYTES = 2**28
"""Host memory of the cached grammars, as they estimate it."""
_MAX_FAILURES = 512
_STOP_S = 0.5
"""Time for which a closing compiler waits for each thread."""
_STACK_BYTES = 2**23
"""Stack of a thread that compiles, more than a constraint has where it is tried first."""
_MAX_PLAIN: dict[ConstraintKind, int] = {"json_object": 0, "json": 4096, "regex": 256, "choice": 65_536}
"""Maximum length of a constraint that is plain, in characters; constraints of other kinds never are."""
_COSTLY_KEYWORDS = ('"pattern', '"allOf"', '"multipleOf"', '"x-guidance"')
"""What stands in schemas that are short and take long to compile."""
_EXTREME_NUMBER = re.compile(r"\d{16}|\d[eE]\+?\d")
"""Numbers that may be beyond 2**53: with bounds near -2**63, llguidance ends its process."""
_FAILURE_S = 30.0
"""Time for which the error of a constraint is kept, so that its requests do not have it compiled again and again."""


def grammar_key(constraint: Constraint) -> Constraint:
    """Return what the grammar of `constraint` depends on; the beginning of the constrained output is no part of it."""
    if not constraint.starts_after:
        return constraint
    return msgspec.structs.replace(constraint, starts_after=(), reasoning_start=-1)


class Compilation(Protocol):
    """What compiles constraints, in threads."""

    def load(self) -> None:
        """Load what compiling needs."""
        ...

    def compile_plain(self, constraint: Constraint) -> Grammar | None:
        """Return the grammar of a plain constraint; None if it must be compiled as a suspicious one.

        Raises GrammarError if it cannot be compiled.
        """
        ...

    def compile_suspicious(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint that may take long, take much memory or crash.

        Raises GrammarError if it cannot be compiled.
        """
        ...

    def stop(self) -> None:
        """Let suspicious constraints fail from now on, also the one that is being compiled."""
        ...


class GrammarCompiler:
    """Owns the compiled grammars.

    Constraints are compiled by two threads, one for plain and one for suspicious constraints, so that plain ones never
    wait for suspicious ones. Everything else happens in the core's thread. `fd` is readable when a
    compilation has ended; `take_compiled` then returns its result. A thread is started when it is first needed.
    """

    def __init__(self, compilation: Compilation) -> None:
        self._compilation = compilation
        self._suspicious = _Lane(compilation.compile_suspicious, self._note_end)
        self._plain = _Lane(compilation.compile_plain, self._note_end, self._suspicious)
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        """The cached grammars, least recently used first."""
        self._num_bytes = 0
        self._failures: OrderedDict[Constraint, tuple[GrammarError, float]] = OrderedDict()
        """(error, time of `time.monotonic()` until which it is kept), oldest first."""
        self._pending: set[Constraint] = set()
        self._ended: queue.SimpleQueue[tuple[Constraint, Grammar | GrammarError]] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def load(self) -> None:
        """Load what compiling needs, which the first request does otherwise; a core that serves would stall.

        It takes 0.3 s for a vocabulary of 49,000 tokens. If it fails, each constraint is refused.
        """
        self._compilation.load()

    def request(self, constraint: Constraint) -> Grammar | None:
        """Return the grammar of a constraint; None while it is compiled, which this call begins if need be.

        Raises GrammarError if the constraint was found to be invalid lately, or if too many are being compiled.
        """
        key = grammar_key(constraint)
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
            return grammar
        if key in self._failures:
            error, end = self._failures[key]
            if time.monotonic() < end:
                raise error
            del self._failures[key]
        if key not in self._pending:
            if len(self._pending) >= _MAX_PENDING:
                raise GrammarError(
                    f"too many constraints are being compiled: the limit is {_MAX_PENDING}; send it again later"
                )
            self._pending.add(key)
            (self._suspicious if is_suspicious(key) else self._plain).add(key)
        return None

    def take_compiled(self) -> list[tuple[Constraint, Grammar | GrammarError]]:
        """Return the compilations that have ended since the last call: (`grammar_key` of the constraint, result)."""
        try:
            count = os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        ended = [self._ended.get() for _ in range(count)]
        for key, result in ended:
            self._pending.discard(key)
            if isinstance(result, GrammarError):
                self._failures[key] = (result, time.monotonic() + _FAILURE_S)
            else:
                self._grammars[key] = result
                self._num_bytes += result.num_bytes
        self._evict()
        return ended

    def close(self) -> None:
        """End the threads, and close `fd`. A library that compiles may keep its thread until the process ends."""
        self._compilation.stop()
        if self._plain.stop() & self._suspicious.stop():
            os.close(self.fd)

    def _evict(self) -> None:
        """Forget the least recently used grammars beyond the limits; requests that use them keep them alive."""
        while len(self._grammars) > _MAX_GRAMMARS or (self._num_bytes > _MAX_BYTES and len(self._grammars) > 1):
            _, grammar = self._grammars.popitem(last=False)
            self._num_bytes -= grammar.num_bytes
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _note_end(self, key: Constraint, result: Grammar | GrammarError) -> None:
        """Make the result of a compilation known; runs in a thread."""
        self._ended.put((key, result))
        os.eventfd_write(self.fd, 1)


class _Lane:
    """A thread that compiles constraints in the order in which they were added."""

    def __init__(
        self,
        compile: Callable[[Constraint], Grammar | None],
        note_end: Callable[[Constraint, Grammar | GrammarError], None],
        other: "_Lane | None" = None,
    ) -> None:
        """`other` gets the constraints for which `compile` returns None."""
        self._compile = compile
        self._note_end = note_end
        self._other = other
        self._queue: queue.SimpleQueue[Constraint | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._is_stopped = False

    def add(self, key: Constraint) -> None:
        with self._start_lock:
            if self._thread is not None:
                self._queue.put(key)
                return
            self._thread = threading.Thread(target=self._run, name="compile-grammars", daemon=True)
            before = threading.stack_size(_STACK_BYTES)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system has no thread left; that must not end the core
                self._thread = None
                self._note_end(key, GrammarError(f"the constraint cannot be compiled now: {error}"))
            else:
                self._queue.put(key)
            finally:
                threading.stack_size(before)

    def stop(self) -> bool:
        """End the thread; return False if it is still compiling."""
        self._is_stopped = True
        self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (key := self._queue.get()) is not None and not self._is_stopped:
            try:
                result: Grammar | GrammarError | None = self._compile(key)
            except GrammarError as error:
                result = error.with_traceback(None)
            except Exception as error:
                logger.exception("a constraint of kind %s could not be compiled", key.kind)
                result = GrammarError(f"the constraint could not be compiled: {type(error).__name__}: {error}")
            if result is None:
                assert self._other is not None
                self._other.add(key)
            else:
                self._note_end(key, result)


def is_suspicious(constraint: Constraint) -> bool:
    """Return whether compiling a constraint may take long, take much memory or crash."""
    if constraint.backend == "xgrammar" or constraint.whitespace_pattern:
        return True
    if len(constraint.text) > _MAX_PLAIN.get(constraint.kind, -1):
        return True
    if constraint.kind != "json":
        return False
    return any(keyword in constraint.text for keyword in _COSTLY_KEYWORDS) or bool(
        _EXTREME_NUMBER.search(constraint.text)
    )
