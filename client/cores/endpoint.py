"""The spelling of a core's address, and whether its host has an address."""

import os
import socket


def endpoint(address: str) -> str:
    """Return `address` in a spelling that equivalent ones have in common. No name but localhost is looked up."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return f"ipc://{os.path.realpath(rest)}"
    host, _, port = rest.lower().rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    return f"{scheme}://{host}:{int(port) if port.isdecimal() else port}"


def name_trouble(address: str) -> str:
    """Return why the host of a TCP address cannot be reached by its name, with the remedy; empty if it can."""
    scheme, _, rest = address.partition("://")
    if scheme != "tcp":
        return ""
    host = rest.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return f"{host!r} has no address ({error}); check the name"
    return ""
