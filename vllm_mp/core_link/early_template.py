"""A template process that starts before this process has imported what it needs to use one.

A command that will run an engine starts it first thing, so that both processes import side by side. `CoreTemplate`
of the client takes it over. This module imports little.
"""

import atexit
import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_mp.core_link.core_environment import core_environment, package_path

if TYPE_CHECKING:
    from vllm_mp.config.engine_args import EngineArgs

_PROGRAM = ("-P", "-m", "vllm_mp.core", "--template")
_AWAITED = "--awaited"
"""The argument of a template process that the start of an engine waits for; others import beside a core that serves."""
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_READ_WHEN_USED = ("PYTEST_CURRENT_TEST", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
"""Variables that this package, transformers and pytest set at any time, and no module reads when it is imported."""


class Inherited(NamedTuple):
    """What a new process takes over from its parent, and a fork of the template from the time when that started."""

    environment: dict[str, str]
    cpus: frozenset[int]
    limits: tuple[tuple[int, int], ...]

    @classmethod
    def now(cls) -> "Inherited":
        limits = tuple(resource.getrlimit(number) for number in _LIMITS)
        return cls(core_environment() | package_path(), frozenset(os.sched_getaffinity(0)), limits)

    def change_from(self, other: "Inherited") -> dict[str, str | None] | None:
        """Return the variables that differ from `other`; None if a fork cannot take over the differences."""
        environment = self.environment
        changes = {
            name: environment.get(name)
            for name in environment.keys() | other.environment.keys()
            if environment.get(name) != other.environment.get(name)
        }
        is_same = (self.cpus, self.limits) == (other.cpus, other.limits)
        return changes if is_same and changes.keys() <= set(_READ_WHEN_USED) else None


class StartedTemplate(NamedTuple):
    """A template process that will say on `control` when it is ready."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket
    inherited: Inherited
    owner: int
    """The process that has started it; a fork of that has no claim to it."""


_early: StartedTemplate | None = None
_is_too_late = False
"""An engine has started, so that the modules which another one needs are imported, and there may be a template."""


def start_template(
    inherited: Inherited, control: socket.socket, *, is_awaited: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a template process, which speaks on `control`, and return it; it imports everything first.

    It does so at a low priority, which leaves the processors to a core that serves, unless `is_awaited`.
    Raises OSError if the system cannot start a process.
    """
    return subprocess.Popen(
        [sys.executable, *_PROGRAM, *((_AWAITED,) if is_awaited else ())],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=inherited.environment,
        cwd=working_folder(Path("/")),
        process_group=0,
    )


def begin_core(engine_args: "EngineArgs") -> None:
    """Start the template process that the first engine of this process takes over; it ends with this process.

    No-op if no template forks the cores of such an engine, if an engine has started before, and if the system cannot
    start a process: the engine will say why. The environment and the limits of this process must not change afterwards.
    """
    is_on_ray = engine_args.data_parallel_backend == "ray" or engine_args.engine_use_ray
    if engine_args.recovery and engine_args.core_template and not is_on_ray:
        start_template_early()


@contextlib.contextmanager
def template_beside_imports(engine_args: "EngineArgs") -> Iterator[None]:
    """Do what `begin_core` does, and end the template when the block ends if no engine has taken it over."""
    begin_core(engine_args)
    try:
        yield
    finally:
        _end_unused()


def start_template_early() -> None:
    """Start the template process that the first engine takes over, if there is none; no-op where it cannot start."""
    global _early
    if _early is not None or _is_too_late:
        return
    inherited = Inherited.now()
    try:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = start_template(inherited, theirs, is_awaited=True)
    except OSError:
        return
    _early = StartedTemplate(process, control, inherited, os.getpid())
    atexit.register(_end_unused)


def take_early_template() -> StartedTemplate | None:
    """Return the template process that `begin_core` has started, once; None: there is none."""
    global _early, _is_too_late
    early, _early, _is_too_late = _early, None, True
    return early if early is not None and early.owner == os.getpid() else None


def working_folder(other: Path) -> str | Path:
    """Return the working folder of this process, or `other` if it does not exist any more."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return other


def _end_unused() -> None:
    early = take_early_template()
    if early is not None:
        early.process.kill()
        early.process.wait()
        early.control.close()
