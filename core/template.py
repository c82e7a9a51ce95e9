"""The template process: it has imported everything that a core imports, and forks the next core at once.

It has one thread and has touched no device, because a fork copies neither other threads nor the state of a device. Its
parent sends a request (`vllm_mp.core_link.fork_messages`) for each core.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from vllm_mp.core.sibling_fork import ForkRefused, end_idle_threads, fork_sibling
from vllm_mp.core_link.fork_messages import (
    MAX_BYTES,
    MAX_DESCRIPTORS,
    Forked,
    ForkRefusal,
    ForkRequest,
    FromTemplate,
    TemplateReady,
)
from vllm_mp.machine.loading_thread import run_in_thread

PROCESS_NAME: Final = "core-template"
"""The name of a template process in `ps -e` and `top`."""
STANDBY: Final = "--standby"
"""The argument of a process that waits until it becomes the core."""
_STANDBY_NAME: Final = "core-standby"
"""Its name in `ps -e` and `top` if a template has forked it."""
LEAVE_TEMPLATE: Final = "--leave-template="
"""The argument of a core that leaves a template; a socket's descriptor follows."""
LEAVE_MODEL_TEMPLATE: Final = "--leave-model-template="
"""The argument of a core that leaves a template with its model (`core.model_template`); a descriptor follows."""
_PARENT_CHECK_MS: Final = 2000
_PR_SET_NAME: Final = 15
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 48, 49
"""Where `/proc/self/stat` has the addresses of the arguments of the process."""
_DESCRIPTORS: Final = Path("/proc/self/fd")


def run_template(import_core: Callable[[], None], niceness: int) -> None:
    """Call `import_core`, then fork a core for each request on standard input, a socket, until its other end closes.

    `import_core` imports everything, with the `niceness` of `run_in_thread`. Returns in the forked processes only.
    `sys.argv` then has the arguments of the request, and the process has the descriptors, the working folder and the
    process group of a core that was started as usual.
    """
    control = socket.socket(fileno=0)
    parent = os.getppid()
    _set_name(PROCESS_NAME)
    try:
        run_in_thread(import_core, niceness=niceness)
        end_idle_threads()
    except Exception as error:
        tell_parent(control, ForkRefusal(reason=f"{type(error).__name__}: {error}"))
        os._exit(1)
    fork_on_request(control, parent)


def leave_template(descriptor: int, import_core: Callable[[], None]) -> None:
    """Call `import_core`, and fork a template process, a sibling, for the socket `descriptor`; this process goes on.

    So the first core and its template import everything once. Returns in this process, which has its other arguments
    then, and in the processes that the template forks, as `run_template` does.
    """
    control = socket.socket(fileno=descriptor)
    parent = os.getppid()
    pid = -1
    try:
        import_core()
        end_idle_threads()
        pid = fork_sibling()
    except Exception as error:  # also a failed import, with which the core will fail and say why
        tell_parent(control, ForkRefusal(reason=f"{type(error).__name__}: {error}"))
    if pid == 0:
        become_template(control, parent)
        fork_on_request(control, parent)
        return
    control.close()
    drop_argument(LEAVE_TEMPLATE)


def drop_argument(name: str) -> str | None:
    """Take the argument that begins with `name` from those of this process, and return the rest; None without it."""
    found = next((argument for argument in sys.argv[1:] if argument.startswith(name)), None)
    if found is None:
        return None
    sys.argv.remove(found)
    show_arguments(sys.argv[1:])
    return found.removeprefix(name)


def end_standby() -> None:
    """Let this process look as a core that was no standby before."""
    if drop_argument(STANDBY) is not None:
        _set_name(os.path.basename(sys.executable))


def become_template(control: socket.socket, parent: int) -> None:
    """Give up what belongs to the core that this process was forked from."""
    if os.getppid() != parent:
        os._exit(1)  # the parent died in the meantime
    os.setpgid(0, 0)
    close_all_but([control.fileno()])
    for number in range(3):
        os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        os.set_inheritable(number, True)
    _set_name(PROCESS_NAME)
    show_arguments(["--template"])


def fork_on_request(control: socket.socket, parent: int) -> None:
    """Fork a core for each request, and end this process after the last; return in each new process."""
    tell_parent(control, TemplateReady(pid=os.getpid()))
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while os.getppid() == parent:
        # A child that the parent forked may hold the other end open after the parent's death.
        if not poll.poll(_PARENT_CHECK_MS):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)  # a child that has written a file; cores are siblings
            continue
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MAX_BYTES, MAX_DESCRIPTORS + 4)
        except OSError:
            break
        if not data:
            break
        try:
            request = msgspec.json.decode(data, type=ForkRequest)
            pid = fork_sibling()
        except (ForkRefused, OSError, msgspec.MsgspecError) as error:
            tell_parent(control, ForkRefusal(reason=str(error)))
        else:
            if pid == 0:
                # Not the template, which may be killed between the fork and the message: then no process would reap
                # this one.
                tell_parent(control, Forked(pid=os.getpid()))
                control.detach()  # `_become_core` closes it
                _become_core(request, descriptors, parent)
                return
        for descriptor in descriptors:
            os.close(descriptor)
    os._exit(0)


def _become_core(request: ForkRequest, descriptors: list[int], parent: int) -> None:
    """Take on what a core process has that was started as usual."""
    if os.getppid() != parent:
        os._exit(1)  # the parent died in the meantime
    os.setpgid(0, 0)
    folder, *given = descriptors
    os.fchdir(folder)
    for name, value in request.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    numbers = [0, 1, 2, *request.inherited]
    # No number may be overwritten before it is copied.
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for each in given]
    close_all_but(copies)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    _set_name(_STANDBY_NAME if STANDBY in request.arguments else os.path.basename(sys.executable))
    show_arguments(request.arguments)
    sys.argv[1:] = request.arguments
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # Python's own generator has a new seed after each fork


def close_all_but(kept: list[int]) -> None:
    """Close all descriptors of this process except `kept`."""
    for name in os.listdir(_DESCRIPTORS):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing had a descriptor of its own
                os.close(int(name))


def _set_name(name: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def show_arguments(arguments: list[str]) -> None:
    """Let `ps` show `arguments` behind the name of the module, as far as the place of the former ones has room."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The first field after the name of the process, which may hold spaces, is the third of all.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = (int(fields[number - 3]) for number in (_ARGUMENTS_BEGIN, _ARGUMENTS_END))
        shown = b"".join(argument.encode() + b"\0" for argument in arguments)
        if 0 < begin < end:
            _, module, after = ctypes.string_at(begin, end - begin).partition(b"\0vllm_mp.core\0")
            if module and len(shown) <= len(after):
                ctypes.memmove(end - len(after), shown.ljust(len(after), b"\0"), len(after))


def tell_parent(control: socket.socket, news: FromTemplate) -> None:
    """Send `news` to the parent, if it lives."""
    with contextlib.suppress(OSError):  # the parent has died, which the next look shows
        control.send(msgspec.json.encode(news))
