"""The spelling of a core's address."""

import os


def endpoint(address: str) -> str:
    """Return `address` in a spelling that equivalent ones have in common. No name but localhost is looked up."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        return f"ipc://{os.path.realpath(rest)}"
    host, _, port = rest.lower().rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host
    return f"{scheme}://{host}:{int(port) if port.isdecimal() else port}"
