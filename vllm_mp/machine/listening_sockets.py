"""The TCP addresses at which a process listens, as Linux tells them."""

import contextlib
import ipaddress
import os
import re
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_SOCKET: Final = re.compile(r"socket:\[(\d+)\]")
_TABLES: Final = ("net/tcp", "net/tcp6")


def listening_addresses(pid: int, proc: Path = Path("/proc")) -> list[str]:
    """Return the addresses, as "127.0.0.1:8000" or "[::]:8000", at which a process listens; [] if that is not known."""
    process = proc / str(pid)
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in list((process / "fd").iterdir()):
            with contextlib.suppress(OSError):
                if found := _SOCKET.fullmatch(os.readlink(descriptor)):
                    inodes.add(found[1])
    addresses = []
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in (process / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and rest[5] in inodes:
                    addresses.append(_address(local))
    return sorted(set(addresses))


def _address(local: str) -> str:
    """Return the address that the kernel writes as hexadecimal words in the machine's byte order."""
    words, port = local.split(":")
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"{host}:{int(port, 16)}"
