"""The key file that lets a client and a core talk over TCP (CURVE, as in ZeroMQ).

One key pair serves both sides: who holds the file may connect, and knows that it talks to the right core.
"""

import os
from pathlib import Path

import zmq


def read_key_file(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """(public, secret) key, 40 characters of Z85 each; raises ValueError if the file does not hold them."""
    try:
        public, secret = Path(path).read_bytes().split()
    except OSError as error:
        raise ValueError(f"cannot read key file {path}: {error.strerror}; copy it from the core's machine") from error
    except ValueError:
        public = secret = b""
    if len(public) != 40 or len(secret) != 40:
        raise ValueError(f"key file {path} must hold a public and a secret key of 40 characters each")
    return public, secret


def ensure_key_file(path: str | os.PathLike[str]) -> None:
    """Make a key file at `path`, readable by its owner alone, unless there is a file already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ValueError(f"cannot make key file {path}: {error.strerror}; give a path in a writable folder") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"\n".join(zmq.curve_keypair()) + b"\n")
