"""The folder that keeps fetched and converted models. Each model in it is prepared exactly once.

An entry is a folder under its final name, and it is complete: it is prepared in a hidden sibling, under a lock, and
renamed into place as the last act. Files that a killed process leaves behind have another name.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_mp.model_store.progress import Progress

CACHE_VARIABLE = "VLLM_MP_CACHE"

Build = Callable[[Path, int], Path]
"""A function that fills a workspace under a lock; see `build_once`."""


def cache_root() -> Path:
    """Return the cache folder: `$VLLM_MP_CACHE`, else `$XDG_CACHE_HOME/vllm_mp`, else `~/.cache/vllm_mp`.

    Creates nothing. Raises OSError if neither variable is set and there is no home folder.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.expanduser(chosen)).absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(os.path.expanduser(base)).absolute() / "vllm_mp"
    try:
        return Path.home() / ".cache" / "vllm_mp"
    except RuntimeError as error:
        raise OSError(f"no home folder to keep models in: set {CACHE_VARIABLE} to a folder") from error


def build_once(folder: Path, build: Build, progress: Progress) -> Path:
    """Return `folder`; call `build` to make it if it does not exist.

    `build(workspace, lock)` gets an empty folder beside `folder`, fills a folder inside that workspace and returns it.
    The returned folder becomes `folder`, and the rest of the workspace is removed. `lock` is the file descriptor of the
    held lock. A child process that writes into the workspace inherits `lock`: it then still holds the lock if this
    process is killed, so that no other process clears the workspace while the child writes.

    Only one process builds an entry at a time; other processes wait and use its result. Raises OSError if the cache
    cannot be written or its disk is full, and any error that `build` raises.
    """
    if folder.is_dir():
        with contextlib.suppress(OSError):  # a cache that only others can write
            os.utime(folder)  # the time of the last use
        return folder
    workspace = folder.with_name(f".{folder.name}.partial")
    with _lock(folder.with_name(f".{folder.name}.lock"), folder.name, progress) as lock:
        if folder.is_dir():
            return folder
        shutil.rmtree(workspace, ignore_errors=True)
        _remove_abandoned(folder.parent)
        try:
            workspace.mkdir()
            build(workspace, lock).rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, DiskFullError):
                raise DiskFullError(folder, error.strerror or str(error)) from error
            raise
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove the workspaces in `parent` that killed processes left behind, which are those whose lock is free."""
    for workspace in parent.glob(".*.partial"):
        try:
            lock = os.open(workspace.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except PermissionError:
            continue  # the workspace of another user
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(workspace, ignore_errors=True)
        except BlockingIOError:
            pass  # a process is at work there
        finally:
            os.close(lock)


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    lock: int,
    follow: Callable[[subprocess.Popen[str]], None],
) -> tuple[int, str]:
    """Run `command`, a child process of a build; return its exit status and the last line of its stderr.

    `environment` is added to the environment of this process. The child inherits `lock`. `follow` watches the child
    while it runs; the child is killed if `follow` raises, as it does on Ctrl-C.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | dict(environment),
            pass_fds=(lock,),
        ) as child,
    ):
        try:
            follow(child)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    return status, lines[-1] if lines else "it gave no reason"


class DiskFullError(OSError):
    """There is no space to prepare `folder`; `detail` says what was tried."""

    def __init__(self, folder: Path, detail: str) -> None:
        super().__init__(
            errno.ENOSPC,
            f"no space left to prepare {folder.name}: {detail}. Free some space, or set {CACHE_VARIABLE} or "
            f"--download-dir to a folder on a larger disk (now {folder.parent})",
        )
        self.folder = folder
        self.detail = detail

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (self.folder, self.detail), self.__dict__


@contextlib.contextmanager
def _lock(path: Path, subject: str, progress: Progress) -> Iterator[int]:
    """Hold the lock file `path` and yield its descriptor; announce a wait for the process that prepares `subject`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(path.with_name(subject), str(error)) from error
        raise OSError(
            error.errno,
            f"cannot write to the model cache {path.parent} ({error.strerror}): set {CACHE_VARIABLE} to a "
            "folder that you can write",
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.line(f"waiting for another process to prepare {subject}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
