"""Cores that are forked from a process which has imported all modules of a core, for tests that start many cores.

A core is the same process otherwise: a child of its client, with its own pipe, log and process group, which reads its
launch line and runs `python -m vllm_mp.core`. The imports, of torch above all, take most of the start of a small core.

The template process runs this file. For each request, which comes with the core's standard input, output and error, it
forks an intermediate process that forks the core and ends. So the core is an orphan, which the system gives to the
nearest ancestor that asks for orphans: the client.
"""

import contextlib
import ctypes
import gc
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

_COMMAND: Final = ["-P", "-m", "vllm_mp.core"]
_PR_SET_CHILD_SUBREAPER: Final = 36
_WITHOUT_EFFECT: Final = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
"""Variables that pytest and torch change while the tests run, and no core reads."""


class _Template:
    """The template process, as its clients see it."""

    def __init__(self, environment: dict[str, str]) -> None:
        """Start the process, whose cores have this environment."""
        self.environment = environment
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def fork(self, folder: str, descriptors: list[int]) -> int:
        """Return the process id of a new core with this working folder and these standard descriptors."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._control, [folder.encode()], descriptors)
                return int(self._control.recv(20))
            finally:
                _adopt_orphans(False)

    def close(self) -> None:
        self._control.close()
        assert self._process.wait(30) == 0


def _adopt_orphans(adopts: bool) -> None:
    """Let this process become the parent of descendants whose parent has ended, or no longer."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0) == 0


def _comparable(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _WITHOUT_EFFECT}


@contextlib.contextmanager
def forking(environment: dict[str, str]) -> Iterator[type[subprocess.Popen[bytes]]]:
    """Run a template process; yield a class in place of `subprocess.Popen`, which forks cores from it.

    It starts all other processes as usual, also standbys and cores with another environment or a public address.
    """
    template = _Template(environment)

    class ForkedCore(subprocess.Popen[bytes]):
        def _execute_child(self, command: Any, *others: Any) -> None:
            _, _, _, pass_fds, folder, its_environment, _, _, _, stdin, _, _, stdout, _, stderr, *_ = others
            if command[1:] != _COMMAND or pass_fds or _comparable(its_environment) != _comparable(template.environment):
                super()._execute_child(command, *others)  # type: ignore[misc]
                return
            outputs = [own if given == -1 else given for own, given in ((1, stdout), (2, stderr))]
            self.pid = template.fork(folder or os.getcwd(), [stdin, *outputs])
            self._child_created = True
            self._close_pipe_fds(*others[9:15])  # type: ignore[attr-defined]

    try:
        yield ForkedCore
    finally:
        template.close()


def _wait_for_fork(control: socket.socket) -> None:
    """Fork a core for each request; return in the core. Ends this process when the client closes its end."""
    client = os.getppid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 65_536, 3)
        if not request:
            os._exit(0)
        reader, writer = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            core = os.fork()
            if core == 0:
                break
            os.write(writer, str(core).encode())
            os._exit(0)
        os.waitpid(intermediate, 0)  # afterwards the core is the client's
        control.send(os.read(reader, 20))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)
    control.close()
    os.close(reader)
    os.close(writer)
    while os.getppid() != client:
        time.sleep(0.0005)
    os.setpgid(0, 0)
    os.chdir(request.decode())
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run_template(control: socket.socket) -> None:
    gc.disable()  # as in a core, until it has imported everything
    import vllm_mp.core.engine_core
    import vllm_mp.core.parallel.followers
    import vllm_mp.core.worker.model_runner
    import vllm_mp.fault_injection.hooks  # noqa: F401
    from vllm_mp.core.models import import_native_models

    import_native_models()
    gc.freeze()
    _wait_for_fork(control)
    sys.argv = ["vllm_mp.core"]
    runpy.run_module("vllm_mp.core", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run_template(socket.socket(fileno=int(sys.argv[1])))
