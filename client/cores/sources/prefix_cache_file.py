"""The prefix cache file of a core, and the process that writes it (`core/scheduler/cache/prefix_writer.py`)."""

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_environment import package_path
from vllm_mp.machine.file_owner import check_private, open_own_file

logger = logging.getLogger(__name__)

_LOCK_WAIT_S: Final = 4.0
"""Time that the writer of an engine that was killed gets to write what is left."""
_LOCK_STEP_S: Final = 0.01
_END_WAIT_S: Final = 10.0
"""Longer than the writer takes to start and to write what is left on a busy machine."""


class PrefixCacheFile:
    """The file, opened and locked by this process for its cores; whatever is wrong with it costs the cache alone."""

    def __init__(self, config: VllmConfig, memory: int, inherited: int | None = None) -> None:
        """Open the file that `config` names, if it does. `memory` is the descriptor of the KV cache.

        `inherited`: the file that another process has opened, which is used if it is the same, and else closed.
        """
        self.descriptor: int | None = None
        """None: there is no file, or it cannot be used; the log says why."""
        self._memory = memory
        self._writer: subprocess.Popen[bytes] | None = None
        path = config.cache_config.prefix_cache_file
        if path is None:
            return
        parallel = config.parallel_config
        if parallel.data_parallel_size > 1:
            path = f"{path}.{parallel.data_parallel_rank}"
        try:
            file = Path(os.path.expanduser(path))
            self.descriptor = _inherited(file, inherited)
            if self.descriptor is None:
                self.descriptor = _open(file)
        except (OSError, ValueError) as error:
            logger.warning("the engine goes on without prefix_cache_file=%r: %s", path, error)

    def keep_writing(self) -> None:
        """Start the process that writes, unless it runs."""
        if self.descriptor is None or (self._writer is not None and self._writer.poll() is None):
            return
        try:
            self._writer = subprocess.Popen(
                [
                    sys.executable,
                    "-P",  # import nothing from the current folder
                    "-m",
                    "vllm_mp.core.scheduler.cache.prefix_writer",
                    str(self._memory),
                    str(self.descriptor),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=os.environ | package_path() | {"OPENBLAS_NUM_THREADS": "1"},
                cwd="/",
                pass_fds=(self._memory, self.descriptor),
                process_group=0,  # Ctrl-C in the terminal does not reach it
            )
        except OSError as error:
            logger.warning("nothing is written to the prefix cache file: %s", error)

    def stop_writing(self) -> None:
        """End the process that writes at once: what it has not written completely is not read."""
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
            self._writer = None

    def close(self, *, goes_on: bool = False) -> None:
        """Let the process write what is left, and let go of the file; idempotent.

        `goes_on`: another process, which has the descriptor too, goes on with the file, and so keeps the lock.
        """
        if goes_on:
            self.stop_writing()
        if self._writer is not None:
            assert self._writer.stdin is not None
            with contextlib.suppress(OSError):
                self._writer.stdin.write(b"\n")
                self._writer.stdin.close()
            with contextlib.suppress(OSError):  # only a privileged process may
                os.sched_setscheduler(self._writer.pid, os.SCHED_OTHER, os.sched_param(0))
            try:
                self._writer.wait(_END_WAIT_S)
            except subprocess.TimeoutExpired:
                self._writer.kill()
                self._writer.wait()
            self._writer = None
        if self.descriptor is not None:
            if not goes_on:  # else a child that the app has forked, which has the descriptor too, would keep the lock
                fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)
            self.descriptor = None


def _inherited(path: Path, descriptor: int | None) -> int | None:
    """Return `descriptor` if it is of the file, which is locked then; else close it and return None."""
    if descriptor is None:
        return None
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)
    return None


def _open(path: Path) -> int:
    """Return a descriptor of the file, which no other engine has. Raises OSError or ValueError, with the remedy."""
    descriptor = open_own_file(path)
    try:
        if not os.fstat(descriptor).st_mode & 0o007:
            os.fchmod(descriptor, 0o600)  # Kubernetes gives each file of a volume to the group of the pod
        check_private(path, os.fstat(descriptor))
        _lock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int) -> None:
    """Take the lock, which lasts until this process, its cores and its writer have closed the file."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ValueError("another engine uses it; give each engine a file of its own") from None
            time.sleep(_LOCK_STEP_S)
