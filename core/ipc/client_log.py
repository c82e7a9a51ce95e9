"""The lines of the log about clients that connect and leave."""

import logging
import os
import time

from vllm_mp.core.ipc.peer_connection import PeerConnection

logger = logging.getLogger(__name__)

_WINDOW_S = 60.0
_MAX_LINES = 100
"""Lines in `_WINDOW_S`, so that a client that connects again and again does not fill the log."""


class ClientLog:
    """Logs the clients of a shared core; the parent of the core is not a client."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        """By client, who it is: a process of this machine, or an address."""
        self._window_end = 0.0
        self._num_lines = 0

    def joined(self, client: int, connection: PeerConnection | None) -> None:
        """Log that `client` has connected."""
        name = "" if connection is None else connection.peer()
        if name != f"process {os.getppid()}":
            self._names[client] = name or "unknown"
            self._write("connected", client)

    def left(self, client: int) -> None:
        """Log that `client` has left."""
        if client in self._names:
            self._write("left", client)
            del self._names[client]

    def _write(self, event: str, client: int) -> None:
        now = time.monotonic()
        if now >= self._window_end:
            self._window_end, self._num_lines = now + _WINDOW_S, 0
        self._num_lines += 1
        if self._num_lines <= _MAX_LINES:
            logger.info("client %d (%s) has %s", client, self._names[client], event)
        elif self._num_lines == _MAX_LINES + 1:
            logger.info("more than %d clients have connected or left within a minute; not all are logged", _MAX_LINES)
