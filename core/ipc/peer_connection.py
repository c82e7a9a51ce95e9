"""The connection of a peer of the core's socket, which ZeroMQ itself has no way to close."""

import contextlib
import os
import socket
from typing import NamedTuple

import zmq


class PeerConnection(NamedTuple):
    """The kernel's end of one accepted connection."""

    descriptor: int
    inode: int
    """Identifies the connection: another one may have got the descriptor since."""

    @classmethod
    def of(cls, frame: zmq.Frame) -> "PeerConnection | None":
        """Return the connection that brought `frame`; None if it is closed."""
        try:
            descriptor = int(frame.get(zmq.MessageOption.SRCFD))
            return cls(descriptor, os.fstat(descriptor).st_ino)
        except (OSError, ValueError, zmq.ZMQError):
            return None

    @property
    def is_open(self) -> bool:
        """ZeroMQ has not closed the connection, as it does when it sees that the peer is gone."""
        try:
            return os.fstat(self.descriptor).st_ino == self.inode
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection; ZeroMQ then drops what is queued in either direction, and the peer sees the break."""
        # The copy stays the same connection while it is compared, whatever ZeroMQ's thread closes meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.descriptor)) as copy:
            if os.fstat(copy.fileno()).st_ino == self.inode:
                copy.shutdown(socket.SHUT_RDWR)
