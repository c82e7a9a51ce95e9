"""The folder where fetched and converted models are kept, each of them prepared exactly once.

An entry is a folder under its final name, and it is complete: it is prepared in a hidden sibling, under a
lock, and renamed into place as the last act. Whatever a killed process left behind has another name.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_mp.model_store.progress import Progress

CACHE_VARIABLE = "VLLM_MP_CACHE"

Build = Callable[[Path, int], Path]


def cache_root() -> Path:
    """Return the cache folder: `$VLLM_MP_CACHE`, else `$XDG_CACHE_HOME/vllm_mp`, else `~/.cache/vllm_mp`.

    Nothing is created. Raises OSError when neither variable is set and there is no home folder.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / "vllm_mp"
    try:
        return Path.home() / ".cache" / "vllm_mp"
    except RuntimeError as error:
        raise OSError(f"no home folder to keep models in: set {CACHE_VARIABLE} to a folder") from error


def build_once(folder: Path, build: Build, progress: Progress) -> Path:
    """Return `folder`, calling `build` to make it where it does not exist yet.

    `build(workspace, lock)` gets an empty folder beside `folder`, fills a folder inside it and returns that
    one, which becomes `folder`; the rest of the workspace is removed. `lock` is the file descriptor of the
    held lock: a child process that writes into the workspace inherits it, so that it still holds the lock
    if this process is killed and nobody clears the workspace under its feet.

    One process builds an entry at a time, the others wait for it and use its result. Raises OSError when
    the cache cannot be written or its disk is full, and whatever `build` raises.
    """
    if folder.is_dir():
        return folder
    workspace = folder.with_name(f".{folder.name}.partial")
    with _lock(folder.with_name(f".{folder.name}.lock"), folder.name, progress) as lock:
        if folder.is_dir():
            return folder
        shutil.rmtree(workspace, ignore_errors=True)
        try:
            workspace.mkdir()
            build(workspace, lock).rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise disk_full(folder, error.strerror or str(error)) from error
            raise
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
    return folder


def disk_full(folder: Path, detail: str) -> OSError:
    """Return the error to raise when there is no room to prepare `folder`; `detail` says what was tried."""
    return OSError(
        errno.ENOSPC,
        f"no space left to prepare {folder.name}: {detail}. Free some, or set {CACHE_VARIABLE} to a folder "
        f"on a larger disk (now {folder.parent})",
    )


@contextmanager
def _lock(path: Path, subject: str, progress: Progress) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path.with_name(subject), str(error)) from error
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
