"""The key file that lets a client and a core talk over TCP with ZeroMQ's CURVE encryption.

Both sides use the same key pair: a peer that holds the file may connect, and knows that the other side holds it too.
"""

import os
from pathlib import Path

import zmq

_KEY_CHARACTERS = 40
"""Length of a CURVE key in Z85, the text encoding of ZeroMQ."""


def read_key_file(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """Return the public and the secret key, 40 characters of Z85 each.

    Raises ValueError, naming the file and the remedy, if the file cannot be read or does not hold two keys.
    """
    try:
        public, secret = Path(path).read_bytes().split()
    except OSError as error:
        raise ValueError(f"cannot read key file {path}: {error.strerror}; copy it from the core's machine") from error
    except ValueError:
        public = secret = b""
    if len(public) != _KEY_CHARACTERS or len(secret) != _KEY_CHARACTERS:
        raise ValueError(
            f"key file {path} does not hold a public and a secret key of {_KEY_CHARACTERS} characters each; copy it "
            "from the core's machine again"
        )
    return public, secret


def ensure_key_file(path: str | os.PathLike[str]) -> None:
    """Make a key file at `path` that only its owner can read; keep a file that exists.

    Raises ValueError, naming the file and the remedy, if the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise ValueError(f"cannot make key file {path}: {error.strerror}; give a path in a writable folder") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"\n".join(zmq.curve_keypair()) + b"\n")
