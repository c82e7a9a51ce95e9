"""The operator key of a core, whose holders may pause it, put it to sleep, and change it otherwise for all clients."""

import os
import secrets
from pathlib import Path

from vllm_mp.machine.file_owner import check_private

_KEY_BYTES = 32


def new_operator_key() -> bytes:
    """Return a random key."""
    return secrets.token_bytes(_KEY_BYTES)


def read_operator_key(path: str | os.PathLike[str]) -> bytes:
    """Return the key in the file at `path`.

    Raises ValueError, naming the file and the remedy, if the file cannot be read, if another user may read or change
    it, or if it does not hold a key.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(4 * _KEY_BYTES)
    except OSError as error:
        raise ValueError(
            f"cannot read operator key file {path}: {error.strerror}; copy it from the core's machine"
        ) from error
    check_private(path, status)
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(
            f"operator key file {path} does not hold a key of {2 * _KEY_BYTES} hexadecimal digits; copy it from the "
            "core's machine again"
        )
    return key


def ensure_operator_key(path: str | os.PathLike[str]) -> bytes:
    """Return the key in the file at `path`; without a file, make one that only its owner can read.

    Raises ValueError as `read_operator_key` does, and if the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_operator_key(path)
    except OSError as error:
        raise ValueError(
            f"cannot make operator key file {path}: {error.strerror}; give a path in a writable folder"
        ) from error
    with os.fdopen(descriptor, "w") as file:
        file.write(new_operator_key().hex() + "\n")
    return read_operator_key(path)
