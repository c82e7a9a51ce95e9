"""The keys with which a client and a core talk over TCP, encrypted by ZeroMQ's CURVE.

The server and each client have a key pair of their own. A client's key file also holds the server's public key, by
which the client knows the server; the server knows its clients by `AuthorizedClients`. Keys are 32 bytes, and base64 in
files.
"""

import base64
import binascii
import os
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from vllm_mp.machine.file_owner import check_private

_KEY_BYTES = 32
_OLD_KEY_CHARACTERS = 40
"""Length of a key in the files of earlier versions, which held one key pair for the core and all clients."""
_SERVER_FIELDS = ("server-public", "server-secret")
_CLIENT_FIELDS = ("client-public", "client-secret", "server-public")


class ServerKey(NamedTuple):
    """The key pair of a core."""

    public: bytes
    secret: bytes


class ClientKey(NamedTuple):
    """The key pair of a client, and the public key of its server."""

    public: bytes
    secret: bytes
    server: bytes


def encode_key(key: bytes) -> str:
    """Return a key as text."""
    return base64.b64encode(key).decode()


def decode_key(text: str) -> bytes:
    """Return the key that `encode_key` wrote. Raises ValueError for other text."""
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{text.strip()!r:.60} is not a key of {_KEY_BYTES} bytes in base64")
    return key


def make_server_key(path: str | os.PathLike[str]) -> ServerKey:
    """Make the key file of a server, and PATH.pub with its public key. Raises ValueError if `path` cannot be made."""
    key = ServerKey(*map(z85.decode, zmq.curve_keypair()))
    _write(path, "server", dict(zip(_SERVER_FIELDS, key, strict=True)), key.public)
    return key


def make_client_key(path: str | os.PathLike[str], server: bytes) -> ClientKey:
    """Make the key file of a client, and PATH.pub with its public key. Raises ValueError if `path` cannot be made."""
    public, secret = map(z85.decode, zmq.curve_keypair())
    key = ClientKey(public, secret, server)
    _write(path, "client", dict(zip(_CLIENT_FIELDS, key, strict=True)), key.public)
    return key


def read_server_key(path: str | os.PathLike[str]) -> ServerKey:
    """Return the key of a server's key file.

    Raises ValueError, naming the file and the remedy, if it cannot be read, is for others to read, or is no key file.
    """
    return ServerKey(*_read(path, _SERVER_FIELDS, f"make it with `vllm-mp keys server {os.fspath(path)}`"))


def read_client_key(path: str | os.PathLike[str]) -> ClientKey:
    """Return the key of a client's key file; raises ValueError as `read_server_key` does."""
    return ClientKey(
        *_read(path, _CLIENT_FIELDS, f"make it with `vllm-mp keys client {os.fspath(path)} --server SERVER.pub`")
    )


def read_public_key(text: str) -> bytes:
    """Return the public key that `text` is, or that the file of this name holds.

    The file is a .pub file or a key file. Raises ValueError if it is neither.
    """
    try:
        return decode_key(text)
    except ValueError:
        pass
    try:
        content = Path(text).read_text()
        fields = _fields(content)
        for kind in ("client", "server"):
            if f"{kind}-secret" in fields:
                return decode_key(fields[f"{kind}-public"])
        return decode_key(content)
    except (OSError, ValueError, KeyError):
        raise ValueError(f"{text!r:.200} is neither a public key nor a file with one; give a .pub file") from None


def _write(path: str | os.PathLike[str], kind: str, fields: dict[str, bytes], public: bytes) -> None:
    """Write a key file that its owner alone can read, and the public key beside it."""
    lines = [
        f"# Key of a vllm-mp {kind}: keep it secret",
        *(f"{name} {encode_key(key)}" for name, key in fields.items()),
    ]
    try:
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write("\n".join(lines) + "\n")
        public_path = Path(f"{os.fspath(path)}.pub")
        public_path.unlink(missing_ok=True)  # of an earlier key, or a link to another file
        with public_path.open("x") as file:
            file.write(encode_key(public) + "\n")
    except FileExistsError as error:
        raise ValueError(f"{os.fspath(path)} exists; remove it first if the key is not needed any more") from error
    except OSError as error:
        raise ValueError(f"cannot make key file {os.fspath(path)}: {error.strerror}; check the folder") from error


def _read(path: str | os.PathLike[str], names: tuple[str, ...], remedy: str) -> list[bytes]:
    """Return the keys in the fields `names` of a key file. Raises ValueError as `read_server_key` does."""
    try:
        with open(path) as file:
            check_private(path, os.fstat(file.fileno()))
            content = file.read()
    except OSError as error:
        raise ValueError(f"cannot read key file {os.fspath(path)}: {error.strerror}; {remedy}") from error
    except UnicodeDecodeError:
        content = ""
    if [len(word) for word in content.split()] == [_OLD_KEY_CHARACTERS] * 2:
        raise ValueError(
            f"key file {os.fspath(path)} holds the one key pair for core and clients that earlier versions used; now "
            f"each has a key of its own: remove the file and {remedy}"
        )
    fields = _fields(content)
    if missing := [name for name in names if name not in fields]:
        raise ValueError(f"key file {os.fspath(path)} has no {missing[0]}, it is not of this kind; {remedy}")
    try:
        return [decode_key(fields[name]) for name in names]
    except ValueError as error:
        raise ValueError(f"key file {os.fspath(path)} is damaged: {error}; {remedy}") from error


def _fields(content: str) -> dict[str, str]:
    """Return the fields of a key file, which are lines of a name and a key."""
    return {words[0]: words[1] for line in content.splitlines() if len(words := line.split()) == 2}
