"""The owner of the core behind a Unix socket: the client talks to no core of another user."""

import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

from vllm_mp.errors import EngineStartError
from vllm_mp.machine.file_owner import check_writers, user_name

_CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id, as SO_PEERCRED gives them."""
_REMEDY = "name that user as core_owner (--core-owner) if you trust them"


def check_socket_file(path: Path, owners: Collection[int]) -> bool:
    """Return whether there is a socket file at `path` yet.

    Raises EngineStartError if it belongs to a user outside `owners`, or if such a user could replace it.
    """
    for each in {path.absolute(), path.resolve()}:
        try:
            info = each.lstat()
            if info.st_uid not in owners:
                raise EngineStartError(f"the socket {each} belongs to user {user_name(info.st_uid)}; {_REMEDY}")
            check_writers(each.parent, owners)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise EngineStartError(f"cannot look at the socket {each}: {error.strerror}; check the address") from error
        except ValueError as error:
            raise EngineStartError(f"the folder of the socket {each} is not safe: {error}") from error
    return True


def check_peer(descriptor: int, owners: Collection[int]) -> bool:
    """Return whether the connection of `descriptor`, to a Unix socket, lasts and its peer can be believed.

    Raises EngineStartError if the process that listens there is not of `owners`.
    """
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family != socket.AF_UNIX:
                return False  # the connection has ended, and its descriptor was used again
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid not in owners:
        raise EngineStartError(f"process {pid}, which serves the socket, is of user {user_name(uid)}; {_REMEDY}")
    return True
