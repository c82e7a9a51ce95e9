"""The address of this machine, and a port that is free."""

import os
import socket


def get_ip() -> str:
    """Return VLLM_HOST_IP if it is set, else the address from which this machine reaches others; 0.0.0.0: none."""
    if host := os.environ.get("VLLM_HOST_IP"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))  # which chooses a route and sends nothing
        except OSError:
            return "0.0.0.0"
        address: str = probe.getsockname()[0]
        return address


def get_open_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def get_open_ports_list(count: int = 5) -> list[int]:
    """Return `count` different TCP ports that are free now."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(get_open_port())
    return list(ports)
