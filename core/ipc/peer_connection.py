"""The connection of a peer of the core's socket, which ZeroMQ itself has no way to close."""

import contextlib
import os
import socket
import struct
from typing import NamedTuple

import zmq
from zmq.utils import z85

from vllm_mp.keys.curve_keys import encode_key

_CREDENTIALS = struct.Struct("3i")
"""The pid, user and group of a peer of a Unix socket, as SO_PEERCRED gives them."""


class PeerConnection(NamedTuple):
    """The kernel's end of one accepted connection."""

    descriptor: int
    inode: int
    """Identifies the connection: another one may have got the descriptor since."""
    key: str = ""
    """The public key with which the peer has proved who it is, as text; empty over a Unix socket."""

    @classmethod
    def of(cls, frame: zmq.Frame) -> "PeerConnection | None":
        """Return the connection that brought `frame`; None if it is closed."""
        try:
            descriptor = int(frame.get(zmq.MessageOption.SRCFD))
            inode = os.fstat(descriptor).st_ino
        except (OSError, ValueError, zmq.ZMQError):
            return None
        with contextlib.suppress(zmq.ZMQError, ValueError):  # if there is none
            return cls(descriptor, inode, encode_key(z85.decode(str(frame.get("User-Id")))))
        return cls(descriptor, inode)

    @property
    def owner(self) -> str:
        """What the peer belongs to: a key, or a process of this machine; empty if the connection is closed."""
        return f"the key {self.key}" if self.key else self.peer()

    @property
    def is_open(self) -> bool:
        """ZeroMQ has not closed the connection, as it does when it sees that the peer is gone."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def peer(self) -> str:
        """Return the process of this machine, or the address, at the other end; empty if the connection is closed."""
        try:
            with socket.socket(fileno=os.dup(self.descriptor)) as copy:
                if os.fstat(copy.fileno()).st_ino != self.inode:
                    return ""
                if copy.family == socket.AF_UNIX:
                    credentials = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                    return f"process {_CREDENTIALS.unpack(credentials)[0]}"
                host, port, *_ = copy.getpeername()
                return f"{host}:{port}"
        except OSError:
            return ""

    def close(self) -> None:
        """Close the connection; ZeroMQ then drops what is queued in either direction, and the peer sees the break."""
        # The copy stays the same connection while it is compared, whatever ZeroMQ's thread closes meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino == self.inode:
                copy.shutdown(socket.SHUT_RDWR)
