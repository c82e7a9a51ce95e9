"""The private folder of a parent of cores for their files: sockets, status pages and logs."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import zmq

_PREFIX: Final = "vllm_mp-"
_LOCK: Final = "owner.lock"


def make_folder() -> Path:
    """Make a folder, and return its path; remove the folders of this user whose owners were killed."""
    root = _root()
    _remove_abandoned(root)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))


def own_folder(folder: Path) -> int | None:
    """Return a descriptor that keeps a result of `make_folder` from being removed until it is closed.

    The system closes it also when the process is killed. None if the file system has no room or no locks; then the
    folder of a process that was killed stays.
    """
    path = folder / f"{_LOCK}.new"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        path.rename(folder / _LOCK)  # others look at a file of this name only, which is locked already
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(root: Path) -> None:
    for lock in root.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if lock.parent.lstat().st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _root() -> Path:
    """Return the usual folder of temporary files, or /tmp if the path of a socket there would be too long."""
    usual = tempfile.gettempdir()
    longest = len(os.fsencode(usual)) + len("/vllm_mp-xxxxxxxx/core-9999999999999.sock")
    return Path(usual if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp")
