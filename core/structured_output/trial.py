"""A process that compiles a constraint first, because the libraries may take long, take much memory or crash.

`python -m vllm_mp.core.structured_output.trial` reads a `TrialSetup` and then constraints on standard input, and
answers each on standard output with a `TrialResult`. Messages are JSON in one line. An exceeded limit ends the process
by a signal, and the end of standard input ends it in any case.
"""

import contextlib
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np

from vllm_mp.core.structured_output.backends import Backends
from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.core.structured_output.trial_process import MAX_CPU_S, MAX_MEMORY, TrialResult, TrialSetup
from vllm_mp.structured_outputs import Constraint

_STACK_BYTES = 2**21
"""Stack of the thread that compiles. The core's threads have more, so a constraint that fits here fits there."""
_NUM_TOKENS = 48
"""Number of random tokens of output that are tried."""
_MAX_STEP_S = 0.1
"""Processor time of one mask, or of accepting one token. A core waits for both."""
_MAX_WALK_S = 1.0


def main() -> None:
    """Answer constraints until standard input ends."""
    os.nice(10)  # the core computes meanwhile
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is meant for the engine
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_input, daemon=True).start()
    lines = iter(sys.stdin.buffer.readline, b"")
    setup = msgspec.json.decode(next(lines), type=TrialSetup)
    backends = Backends(setup.source, setup.default)
    eos_token_ids = frozenset(setup.source.eos_token_ids)
    with contextlib.suppress(GrammarError):  # compiling raises it again
        backends.load()
    _answer(TrialResult())
    threading.stack_size(_STACK_BYTES)
    for line in lines:
        thread = threading.Thread(target=lambda: _answer(_try(backends, line, eos_token_ids)))  # noqa: B023
        thread.start()
        thread.join()


def _limit(memory: int, cpu_s: int) -> None:
    """Limit what the process may take beyond what it has now; -1: without limit."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_AS, (size + memory if memory >= 0 else -1, -1))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + cpu_s if cpu_s >= 0 else -1, -1))


def _answer(result: TrialResult) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


def _try(backends: Backends, line: bytes, eos_token_ids: frozenset[int]) -> TrialResult:
    """Compile a constraint and follow its grammar for some tokens."""

    def load(name: str) -> None:
        _limit(-1, -1)
        backends.load(name)
        _limit(MAX_MEMORY, MAX_CPU_S)

    try:
        constraint = msgspec.json.decode(line, type=Constraint)
        _limit(MAX_MEMORY, MAX_CPU_S)
        prepared, grammar = backends.prepare(constraint, backends.names(constraint), load)
        _walk(grammar, backends.vocab_size, eos_token_ids)
    except GrammarError as error:
        return TrialResult(error=str(error))
    except MemoryError:
        return TrialResult(error=f"compiling takes more than {MAX_MEMORY >> 20} MiB of memory; simplify the constraint")
    except Exception as error:
        return TrialResult(error=f"the constraint could not be compiled: {type(error).__name__}: {error}")
    return TrialResult(prepared)


def _walk(grammar: Grammar, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
    """Follow a grammar with random tokens. Raises GrammarError if that reaches a limit or takes too long."""
    matcher = grammar.matcher()
    mask = np.zeros((vocab_size + 31) // 32, np.int32)
    draws = random.Random(0)
    started = time.thread_time()
    for _ in range(_NUM_TOKENS):
        begin = time.thread_time()
        matcher.fill(mask)
        filled = time.thread_time()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        continuing = [token for token in allowed if token not in eos_token_ids]
        if not continuing:
            return
        token = draws.choice(continuing)
        accepted = time.thread_time()
        matcher.accept([token])
        end = time.thread_time()
        slowest = max(filled - begin, end - accepted)
        if slowest > _MAX_STEP_S:
            raise GrammarError(
                f"the constraint is too ambiguous: finding the tokens that may come next takes {slowest:.2f} s, the "
                f"limit is {_MAX_STEP_S} s; simplify it"
            )
        if end - started > _MAX_WALK_S:
            return


def _end_with_input() -> None:
    """End the process when standard input has no writer any more, whatever is being compiled."""
    poll = select.poll()
    poll.register(0, select.POLLHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
