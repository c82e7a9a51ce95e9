"""What a core remembers of its peers' connections."""

import os
import socket

from vllm_mp.core.ipc import clients
from vllm_mp.core.ipc.clients import Clients
from vllm_mp.core.ipc.peer_connection import PeerConnection


class Outbox:
    """A socket that every peer can be reached through."""

    def send(self, frame, flags):
        pass


def connection_of(end):
    return PeerConnection(end.fileno(), os.fstat(end.fileno()).st_ino)


def test_closed_connection_stays_known_for_messages_that_outlive_it(monkeypatch):
    monkeypatch.setattr(clients, "_CONFIRM_S", 0)
    known = Clients(Outbox(), 1, is_shared=True)
    near, far = socket.socketpair()
    with near, far:
        connection, later = connection_of(near), connection_of(far)
        known.close(b"peer", connection, "it sent a message of several parts")
        assert known.is_closing(b"peer", connection)
        known.close_due()
        assert far.recv(1) == b"", "the connection is closed"
        assert known.is_closing(b"peer", connection)
        assert known.is_closing(b"peer", None)
        assert not known.is_closing(b"peer", later), "the peer is back"
        assert not known.is_closing(b"another", connection)
