"""The mailbox in which a descriptor of a device's memory waits for the next core: a pair of connected sockets."""

import socket


def new_mailbox() -> tuple[int, int]:
    """Return descriptors of the end to send to and of the end to receive from. Raises OSError."""
    sends, receives = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return sends.detach(), receives.detach()


def empty_mailbox(receives: int) -> None:
    """Discard what waits at the end to receive from; the system then closes the descriptors that came with it."""
    end = socket.socket(fileno=receives)
    try:
        while end.recv(1, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        pass
    finally:
        end.detach()  # the descriptor stays open
