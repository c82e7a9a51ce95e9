"""The addresses at which a process listens are found without its help."""

import os
import socket

import pytest

from vllm_mp.machine.listening_sockets import listening_addresses


@pytest.mark.parametrize(
    ("family", "host", "shown"), [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")]
)
def test_listening_socket_is_found_and_a_connected_one_is_not(family, host, shown):
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this machine has no such addresses")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        found = listening_addresses(os.getpid())
        assert f"{shown}:{listener.getsockname()[1]}" in found
        assert not any(address.endswith(f":{client.getsockname()[1]}") for address in found)


def test_process_that_does_not_exist_listens_nowhere(tmp_path):
    assert listening_addresses(1, tmp_path) == []
