"""Where the ranks of torch.distributed find each other: a private file, or on several machines a port of node 0.

The connections of torch.distributed, to this port and between the ranks, are neither encrypted nor authenticated.
"""

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import ip_address

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TCP: Final = "tcp://"
_TIMEOUT: Final = datetime.timedelta(seconds=60)
_GET_ADDRESS: Final = 0x8915
"""SIOCGIFADDR of Linux: the IPv4 address of an interface."""


class MeetingPlace:
    """The meeting place as the core keeps it."""

    def __init__(self, config: VllmConfig, folder: Path) -> None:
        """`folder` is private to the core. Raises ValueError if `master_addr` is not an address of this machine."""
        parallel = config.parallel_config
        self.address = str(folder / f"ranks-of-{os.getpid()}")
        """What `open_store` needs."""
        self._store: Store | None = None  # listens until it is freed
        if parallel.nnodes == 1:
            return
        host = ip_address(parallel.master_addr)
        try:
            listener = socket.create_server((host, 0))  # the library itself would listen on all interfaces
        except OSError as error:
            raise ValueError(
                f"master_addr={parallel.master_addr!r}: cannot listen there: {error}; give an address of the machine "
                "of node 0"
            ) from error
        from torch._C._distributed_c10d import TCPStore

        port = listener.getsockname()[1]
        self.address = f"{_TCP}{host}:{port}"
        self._store = TCPStore(
            host, port, None, True, _TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def open_store(address: str, size: int) -> "Store":
    """Return the store of `size` ranks at a meeting place; raises RuntimeError if it cannot be reached in a minute."""
    from torch._C._distributed_c10d import FileStore, TCPStore

    if not address.startswith(_TCP):
        return FileStore(address, size)
    host, port = _host_and_port(address)
    return TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)


def use_network_of(address: str) -> None:
    """Let Gloo and NCCL connect the ranks through the network of a meeting place, unless the operator chose one."""
    if not address.startswith(_TCP):
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_host_and_port(address))  # sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(probe, _GET_ADDRESS, request)[20:24]) == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    return host, int(port)
