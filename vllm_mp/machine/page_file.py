"""The file of a status page: on the disk, or in memory where the disk is full."""

import contextlib
import errno
import mmap
import os
from typing import Final

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMORY_PREFIX: Final = "/memfd:"
_MAX_NAME_BYTES: Final = 240
"""Bytes of a path that name a file in memory; the kernel allows 249."""


def make_page_file(path: str, size: int) -> mmap.mmap:
    """Make an empty file of `size` bytes at `path`, which only its owner can read, and return its mapped memory.

    If the disk has no space, the file lies in memory, and `path` is a symbolic link that leads to it as long as this
    process lives. Raises ValueError, with the cause and the remedy, if neither can be made.
    """
    try:
        try:
            # A new file is made: truncating a file that readers have mapped would end those processes.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                return _map(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            return _make_in_memory(path, size)
    except OSError as error:
        raise ValueError(
            f"cannot make the status page {path}: {error.strerror}; free space there, or set TMPDIR to another folder"
        ) from error


def page_path(mapping: str) -> str:
    """Return the path of a page file from the name of its mapping or descriptor in /proc."""
    return mapping.removesuffix(" (deleted)").removeprefix(_MEMORY_PREFIX)


def _make_in_memory(path: str, size: int) -> mmap.mmap:
    descriptor = os.memfd_create(os.fsdecode(os.fsencode(path)[-_MAX_NAME_BYTES:]))
    try:
        os.fchmod(descriptor, 0o600)
        memory = _map(descriptor, size)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.symlink(f"/proc/{os.getpid()}/fd/{descriptor}", path)
    except BaseException:
        os.close(descriptor)
        raise
    return memory


def _map(descriptor: int, size: int) -> mmap.mmap:
    # The space is allocated now: without it, the first write to the memory would end this process.
    os.posix_fallocate(descriptor, 0, size)
    return mmap.mmap(descriptor, size)
