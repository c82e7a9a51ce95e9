"""Cores, `vllm-mp` commands and programs that are forked from a process which has imported all their modules.

A core is the same process otherwise: a child of its client, with its own pipe, log and process group, which reads its
launch line and runs `python -m vllm_mp.core`. So is a command, `python -m vllm_mp.cli`, or a program, `python FILE.py`,
whose own cores are forked too. The imports, of torch above all, take most of the start of a small core.

The template process runs this file. For each request, which comes with the descriptors of the new process, it forks an
intermediate process that forks the new process and ends. So the new process is an orphan, which the system gives to the
nearest ancestor that asks for orphans: the process that sent the request. A forked command or
program first forks a template for its own cores, a child called `TEMPLATE_NAME` that ends with it.
"""

import atexit
import collections
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_mp.testing.terminal import TAKE_TERMINAL

TEMPLATE_NAME: Final = "core-template"
HELPER_NAMES: Final = (TEMPLATE_NAME, "core-standby")
"""The names of the processes beside a core."""
"""Name of the process from which a forked command forks its cores, as psutil.Process.name() returns it."""
FORKS_RANKS: Final = "VLLM_MP_TESTS_FORK_RANKS"
"""Variable in whose presence a forked core forks its other ranks too."""
_CORE: Final = ["-P", "-m", "vllm_mp.core"]
_RANK: Final = [*_CORE, "--worker"]
_COMMAND: Final = ["-m", "vllm_mp.cli"]
_TEMPLATE_ARGUMENTS: Final = ("--template", "--leave-")
"""Arguments of cores about the product's own template processes, which import nothing more when they are forked."""
_CORE_IN_CODE: Final = "runpy.run_module('vllm_mp.core'"
"""Code of `python -c` that becomes a core."""
_ROOT: Final = str(Path(__file__).resolve().parents[2])
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_WITHOUT_EFFECT: Final = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TERM", "TMPDIR", "VLLM_MP_CACHE"),
    *("TOKENIZERS_PARALLELISM", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRITON_DEFAULT_FP_FUSION"),
    "STAND_IN_CUDA_LIBRARY",
    FORKS_RANKS,
}
"""Variables that pytest, torch, tokenizers and fixtures set while the tests run, and those that no module reads when it
is imported. Any other variable that stays changed would end the forks of all tests after it.
"""
NOT_FORKED: Final[collections.Counter[str]] = collections.Counter()
"""Number of processes of this one that started as usual because a variable of their environment differed, by name."""
_FIRST_FREE_DESCRIPTOR: Final = 500
_libc = ctypes.CDLL(None)


class _Request(NamedTuple):
    """A process to fork. Descriptors come beside it: standard input, output and error, then those in `inherited`."""

    arguments: list[str]
    """Those of the Python interpreter."""
    folder: str
    environment: dict[str, str]
    inherited: list[int]
    """Numbers that further descriptors have in the new process."""
    leads: str
    """What the new process leads: "nothing", "group", or "session", whose terminal is then its standard input."""


class _Template:
    """A template process, as the process that sends it requests sees it."""

    def __init__(self, control: socket.socket, core_environment: Mapping[str, str]) -> None:
        """`core_environment`: the environment in which the template imported its modules."""
        self._control = control
        self._core_environment = core_environment
        self._environment = dict(os.environ)
        self._lock = threading.Lock()

    def can_fork(self, arguments: list[str], environment: Mapping[str, str]) -> bool:
        """Return whether the template's modules are those that a new interpreter would import."""
        if arguments in (_CORE, _RANK) or _concerns_template(arguments):
            return _is_alike(environment, self._core_environment)
        is_known = arguments[:2] == _COMMAND or (arguments[:1] == ["-c"] and _CORE_IN_CODE in arguments[1])
        is_known = is_known or (arguments[:1] != [] and arguments[0].endswith(".py"))
        return is_known and _is_alike(environment, self._environment)

    def fork(self, request: _Request, descriptors: list[int]) -> int:
        """Return the process id of a new child of this process."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                return int(self._control.recv(20))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._control.close()


def _adopt_orphans(adopts: bool) -> None:
    """Let this process become the parent of descendants whose parent has ended, or no longer."""
    assert _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) == 0


def _set_name(name: str) -> None:
    """Set the name of this process."""
    assert _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0) == 0


def _is_core(arguments: list[str]) -> bool:
    """Return whether the arguments are those of a process of a core whose ranks, if any, are not forked."""
    if arguments == _CORE:
        return FORKS_RANKS not in os.environ
    return arguments == _RANK or _concerns_template(arguments)


def _concerns_template(arguments: list[str]) -> bool:
    """Return whether the arguments are those of a template process, or of a core that leaves one."""
    module, others = arguments[: len(_CORE)], arguments[len(_CORE) :]
    return module == _CORE and others != [] and all(each.startswith(_TEMPLATE_ARGUMENTS) for each in others)


def _is_alike(environment: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether a process with `environment` may be forked from one with `other`; note the variables if not."""
    first, second = _comparable(environment), _comparable(other)
    NOT_FORKED.update(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    return first == second


def _comparable(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name not in _WITHOUT_EFFECT}
    others = [folder for folder in kept.pop("PYTHONPATH", "").split(os.pathsep) if folder not in ("", _ROOT)]
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(others))}


def _forking_class(template: _Template) -> type["subprocess.Popen[Any]"]:
    """Return a class in place of `subprocess.Popen`, which forks cores and commands from `template`.

    It starts all other processes as usual, also standbys, and cores and commands with another environment.
    """

    class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, command: Any, *others: Any) -> None:
            _, preexec, _, pass_fds, folder, environment, _, _, shell, stdin, _, _, stdout, _, stderr, *rest = others
            _, _, _, _, _, new_session, group = rest
            environment = os.environ if environment is None else environment
            interpreter, *arguments = [""] if shell or isinstance(command, str) else map(os.fspath, command)
            leads = "session" if new_session else {-1: "nothing", 0: "group"}.get(group)
            if (arguments[:2] == ["-c", TAKE_TERMINAL]) == bool(new_session):
                arguments = arguments[2:] if new_session else arguments
            else:
                leads = None
            is_plain = interpreter == sys.executable and preexec is None and leads is not None
            if not is_plain or not template.can_fork(arguments, environment):
                super()._execute_child(command, *others)  # type: ignore[misc]
                return
            standard = [own if given == -1 else given for own, given in enumerate((stdin, stdout, stderr))]
            request = _Request(arguments, os.fspath(folder or os.getcwd()), dict(environment), list(pass_fds), leads)
            self.pid = template.fork(request, [*standard, *pass_fds])
            self._child_created = True
            self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]

    return ForkingPopen


@contextlib.contextmanager
def forking(environment: dict[str, str], modules: Sequence[str] = ()) -> Iterator[type["subprocess.Popen[Any]"]]:
    """Run a template process in the `environment` of cores; yield a class in place of `subprocess.Popen`.

    `modules` are those that it imports beside those of every core.
    """
    control, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
            env=environment,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    template = _Template(control, environment)
    try:
        yield _forking_class(template)
    finally:
        template.close()
        assert process.wait(30) == 0


def _wait_for_fork(control: socket.socket) -> _Request:
    """Fork a process for each request; return the request in the new process.

    Ends this process when the sender of requests closes its end.
    """
    sender = os.getppid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 2**18, 100)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            parent = os.getpid()
            forked = os.fork()
            if forked == 0:
                break
            os.write(writer, str(forked).encode())
            os._exit(0)
        os.waitpid(intermediate, 0)  # afterwards the new process is the sender's child
        control.send(os.read(reader, 20))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)
    control.close()
    os.close(reader)
    os.close(writer)
    while os.getppid() == parent:
        time.sleep(0.0005)
    if os.getppid() != sender:
        os._exit(1)  # the sender was killed
    request = _Request(*json.loads(data))
    _adopt(request, descriptors, sender)
    return request


def _adopt(request: _Request, descriptors: list[int], parent: int) -> None:
    """Take on the descriptors, the folder, the environment and the process group of `request`."""
    _set_name(os.path.basename(sys.executable))
    if request.leads == "session":
        os.setsid()
    else:
        os.setpgid(0, 0 if request.leads == "group" else os.getpgid(parent))
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None  # read TMPDIR again
    # No number may be overwritten before it is copied.
    copies = [os.dup2(each, _FIRST_FREE_DESCRIPTOR + i) for i, each in enumerate(descriptors)]
    for descriptor in descriptors:
        os.close(descriptor)
    for copy, number in zip(copies, [0, 1, 2, *request.inherited], strict=True):
        os.dup2(copy, number)
        os.close(copy)
    if request.leads == "session":
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.orig_argv = [sys.executable, *request.arguments]


def _fork_template(core_environment: Mapping[str, str]) -> _Request | None:
    """Make a template for the children of this process. Return None in this process, and the request in each child."""
    control, theirs = socket.socketpair()
    process = os.fork()
    if process == 0:
        control.close()
        os.setpgid(0, 0)
        _set_name(TEMPLATE_NAME)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.close(nothing)
        return _wait_for_fork(theirs)
    theirs.close()
    template = _Template(control, core_environment)
    subprocess.Popen = _forking_class(template)  # type: ignore[misc]

    def close() -> None:
        template.close()
        os.waitpid(process, 0)

    atexit.register(close)
    execve = os.execve

    def become(path: Any, command: Any, others: Mapping[str, str]) -> None:
        """Run a rank host in this process, which has imported its modules."""
        if command[1 : len(_CORE) + 1] != _CORE or not template.can_fork(_CORE, others):
            execve(path, command, others)
        os.environ.update(others)
        _run(command[1:])

    os.execve = become  # type: ignore[assignment]
    return None


def _run_template(control: socket.socket, modules: Sequence[str]) -> None:
    gc.disable()  # as in a core, until it has imported everything
    import vllm_mp.cli
    import vllm_mp.client.async_llm
    import vllm_mp.core.engine_core
    import vllm_mp.core.fault_hooks.hooks
    import vllm_mp.core.parallel.followers
    import vllm_mp.core.worker.model_runner
    import vllm_mp.server.app  # noqa: F401
    from vllm_mp.core.models import import_native_models

    import_native_models()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    environment = dict(os.environ)
    request = _wait_for_fork(control)
    while not _is_core(request.arguments):
        of_child = _fork_template(environment)
        if of_child is None:
            break
        request = of_child
    _run(request.arguments)


def _run(arguments: list[str]) -> None:
    """Do what the Python interpreter does with `arguments`."""
    if arguments[:1] == ["-P"]:
        arguments = arguments[1:]
    else:
        gc.enable()
        sys.path.insert(0, os.getcwd())
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _run_template(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
