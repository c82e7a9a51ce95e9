"""Who owns a file, and who else can read or write it: checks of secrets, of sockets and of their folders."""

import errno
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path


def trusted_owners() -> frozenset[int]:
    """Return the user ids that this process trusts: its own and root's."""
    return frozenset({os.geteuid(), 0})


def user_id(user: str) -> int:
    """Return the id of `user`, a name or a number. Raises ValueError if there is no such user."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ValueError(
            f"there is no user {user!r} on this machine; give a name or a number that `id` knows"
        ) from None


def user_name(uid: int) -> str:
    """Return the name of a user for an error, or the number if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_private(path: str | os.PathLike[str], info: os.stat_result) -> None:
    """Raise ValueError, with the remedy, if `path`, whose status is `info`, is not for this user and root alone."""
    is_folder = stat.S_ISDIR(info.st_mode)
    what, mode = ("folder", "700") if is_folder else ("file", "600")
    if info.st_uid not in trusted_owners():
        raise ValueError(
            f"{what} {path} belongs to user {user_name(info.st_uid)}; it must be your own: "
            f"{'remove it' if is_folder else f'chown {os.geteuid()} {path}'}"
        )
    if info.st_mode & 0o077:
        raise ValueError(
            f"{what} {path} can be read or written by other users (mode {stat.S_IMODE(info.st_mode):o}); "
            f"run: chmod {mode} {path}"
        )


def check_writers(path: Path, owners: Collection[int]) -> None:
    """Raise ValueError, with the remedy, if a user outside `owners` can write the file or folder `path`.

    A sticky folder, such as /tmp, may be writable by all: only its owner and that of a file can replace the file.
    Raises OSError if `path` does not exist.
    """
    info = path.stat()
    if info.st_uid not in owners:
        raise ValueError(f"{path} belongs to user {user_name(info.st_uid)}, who is not trusted; use another path")
    is_sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
    if info.st_mode & 0o022 and not is_sticky:
        raise ValueError(
            f"{path} can be written by other users (mode {stat.S_IMODE(info.st_mode):o}); run: chmod go-w {path}"
        )


def open_own_file(path: Path) -> int:
    """Open a file to read and write it, made for its owner alone if it does not exist; return the descriptor.

    In a folder that others may write, the name may be a trap: a link to a file of this user, or a file of another user.
    Raises ValueError, with the remedy, for such a file, and OSError if it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a symbolic link, which is not followed; remove it") from error
        raise
    info = os.fstat(descriptor)
    if info.st_uid in trusted_owners() and stat.S_ISREG(info.st_mode) and info.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    if info.st_uid not in trusted_owners():
        raise ValueError(f"{path} belongs to user {user_name(info.st_uid)}, who is not trusted; use another path")
    what = f"has {info.st_nlink} names" if stat.S_ISREG(info.st_mode) else "is not a regular file"
    raise ValueError(f"{path} {what}; remove it")


def write_output(path: Path, text: str) -> None:
    """Replace the content of the file `path`, which the user has named, by `text`.

    In a folder that others may write, such as /tmp, the file is opened by `open_own_file`, whose errors are raised.
    Elsewhere, links and devices are the user's own. Raises OSError if it cannot be written.
    """
    if not _others_may_write(path.parent):
        path.write_text(text)
        return
    with os.fdopen(open_own_file(path), "w") as file:
        file.truncate(0)
        file.write(text)


def _others_may_write(folder: Path) -> bool:
    info = folder.stat()
    return bool(info.st_mode & 0o022) or info.st_uid not in trusted_owners()
