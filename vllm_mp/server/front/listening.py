"""The socket on which the server listens."""

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Generator
from pathlib import Path

_BACKLOG = 2048
"""Connections that the kernel holds until the server accepts them."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 60, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 4}
"""Seconds of silence after which the kernel probes a client, seconds between probes, and unanswered probes that end
the connection: a client that vanished is noticed after 2 minutes."""
_UNACKNOWLEDGED_MS = 120_000
"""Milliseconds after which a connection ends whose client acknowledges no data."""


def listen(host: str, port: int, share_port: bool = False) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 lets the system choose.

    With `share_port`, further sockets may listen on the same address, and the kernel spreads connections over them.
    Accepted sockets inherit the socket's options. Raises OSError, naming the address and the remedy, if that fails.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OSError(f"cannot listen on {host}: {error.strerror}; check --host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, share_port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        remedy = "give the address of this machine with --host, and a --port that you may use"
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another --port (0: any free port), or stop the process that uses it"
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {remedy}") from error
    listener.setblocking(False)
    return listener


def listen_together(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` sockets that listen on the same address, over which the kernel spreads connections.

    Raises OSError as `listen` does, also if the address is in use by sockets that could share it.
    """
    if count == 1:
        return [listen(host, port)]
    with listen(host, port) as probe:
        port = probe.getsockname()[1]
    return [listen(host, port, share_port=True) for _ in range(count)]


def listen_at_path(path: str, count: int) -> list[socket.socket]:
    """Return `count` descriptors of one socket that listens at `path`. The umask decides who may connect.

    A socket file that no process listens on, as a killed server leaves it, is replaced. Raises OSError, naming the path
    and the remedy, if that fails.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(Path(path).parent):
            if _is_left_over(path):
                os.unlink(path)
            listener.bind(path)
            listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        remedy = "give --uds a path in a folder that exists and is writable, of at most 107 bytes"
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another --uds, or stop the process that listens there"
            if not Path(path).is_socket():
                remedy = "the path is not that of a socket; choose another --uds"
        raise OSError(f"cannot listen on unix:{path}: {error.strerror or error}; {remedy}") from error
    listener.setblocking(False)
    return [listener, *(listener.dup() for _ in range(count - 1))]


@contextlib.contextmanager
def removing_file_of(listener: socket.socket) -> Generator[None, None, None]:
    """Remove the file of a Unix socket after the block, unless another process has replaced it."""
    if listener.family != socket.AF_UNIX:
        yield
        return
    path = os.path.abspath(listener.getsockname())
    own = os.open(path, os.O_PATH | os.O_NOFOLLOW)  # no other file can get the inode as long as this is open
    try:
        yield
    finally:
        with contextlib.suppress(OSError), _locked(Path(path).parent):
            if os.path.samestat(os.fstat(own), os.lstat(path)):
                os.unlink(path)
        os.close(own)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    """Let no other server replace a socket file in `folder` during the block."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_left_over(path: str) -> bool:
    """Return whether `path` is a socket file that no process listens on."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.setblocking(False)  # a server may have no room for another connection
            client.connect(path)
    except FileNotFoundError:
        return False
    except ConnectionRefusedError:
        return True
    except OSError:  # such as BlockingIOError: a process listens there
        return False
    return False


def url_of(listener: socket.socket, is_tls: bool) -> str:
    """Return the URL at which clients on this machine reach the socket; that of a Unix socket is "unix:PATH"."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http{'s' if is_tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Return whether only this machine reaches the socket."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
