"""A fork whose child becomes a sibling of this process: a child of its parent."""

import contextlib
import ctypes
import functools
import os
import platform
import signal
import time
import warnings
from pathlib import Path
from typing import Final

_CLONE: Final = {"x86_64": 56, "aarch64": 220}
"""The number of the system call `clone` by architecture."""
_CLONE_PARENT: Final = 0x8000
_CLONE_CHILD_CLEARTID: Final = 0x200000
_CLONE_CHILD_SETTID: Final = 0x1000000
_PR_GET_TID_ADDRESS: Final = 40
_TASKS: Final = Path("/proc/self/task")
_END_OF_THREADS_S: Final = 0.2
"""Time that threads get to end, such as those of OpenMP after the thread that has made them."""


class ForkRefused(Exception):
    """This process cannot be forked safely; the message says why."""


def fork_sibling() -> int:
    """Fork this process; return 0 in the child, and the child's process id in this process.

    The parent of the child is the parent of this process, which reaps it and learns its end as that of any other child.
    The system call is made directly, because `os.fork` cannot pass CLONE_PARENT. So the C library runs no fork
    handlers, which matter only to processes with several threads. Python runs its own.

    Raises ForkRefused if this process has other threads, or if the system or the processor is not supported, and
    OSError if the system cannot make a process.
    """
    clone, libc, address = _prepared()
    if (count := count_threads()) != 1:
        raise ForkRefused(f"the process has {count} threads; a fork would copy the locks that the others hold")
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    # The last two arguments change places between architectures, and the new thread pointer is not used.
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(clone, flags, None, None, address, address))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot fork: {os.strerror(code)}")
    return pid


def end_idle_threads() -> None:
    """Let libraries end the idle threads that they made when they were imported, as NumPy's OpenBLAS does.

    It ends its threads before each fork, and makes them again for the next product of matrices. Return when no other
    thread is left, or after `_END_OF_THREADS_S`: a thread that was joined takes a moment to leave the system.
    """
    with contextlib.suppress(ForkRefused):  # the system does not tell, which `fork_sibling` reports
        if count_threads() == 1:
            return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about the threads
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + _END_OF_THREADS_S
    with contextlib.suppress(ForkRefused):
        while count_threads() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)


def reset_signals() -> None:
    """Give each signal that this process handles in Python its default effect again, after a fork."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def count_threads() -> int:
    """Return the number of threads of this process. Raises ForkRefused if the system does not tell."""
    try:
        return len(list(_TASKS.iterdir()))
    except OSError as error:
        raise ForkRefused(f"cannot count the threads of the process: {error}") from error


@functools.cache
def _prepared() -> tuple[int, ctypes.PyDLL, ctypes.c_void_p]:
    """Return the number of the system call, the C library, and the address where it keeps the id of this thread.

    The library finds its own thread id in the child only if the system writes it there, as it does for `fork`.

    Raises ForkRefused if one of them is not known.
    """
    try:
        os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError) as error:
        raise ForkRefused("forking is supported with the GNU C library only") from error
    if (clone := _CLONE.get(platform.machine())) is None:
        raise ForkRefused(f"forking is not supported on the processor {platform.machine()}")
    libc = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter's lock during calls
    libc.syscall.argtypes = [
        *(ctypes.c_long, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    ]
    libc.syscall.restype = ctypes.c_long
    address = ctypes.c_void_p()
    if libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) != 0 or not address.value:
        raise ForkRefused("the system does not tell where the C library keeps the id of its thread")
    return clone, libc, address
