"""The spelling of a core's address, and hosts without an address."""

import pytest

from vllm_mp.client.cores.endpoint import endpoint, name_trouble


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tcp://localhost:5000", "tcp://127.0.0.1:5000"),
        ("tcp://Node-1:5000", "tcp://node-1:05000"),
        ("ipc:///tmp//one.sock", "ipc:///tmp/x/../one.sock"),
    ],
)
def test_spellings_of_one_endpoint_are_equal(one, other):
    assert endpoint(one) == endpoint(other)


def test_endpoints_differ_by_host_port_and_path():
    addresses = ["tcp://a:1", "tcp://b:1", "tcp://a:2", "ipc:///a", "ipc:///A", "tcp://a:x", "a"]
    assert len(set(map(endpoint, addresses))) == len(addresses)


@pytest.mark.parametrize("host", ["nosuch.invalid", "a" * 100])
def test_host_without_an_address_is_named_with_the_remedy(host):
    trouble = name_trouble(f"tcp://{host}:5000")
    assert trouble.startswith(f"'{host}' has no address (")
    assert trouble.endswith("; check the name")


@pytest.mark.parametrize("address", ["tcp://localhost:5000", "tcp://127.0.0.1:5000", "tcp://[::1]:5000", "ipc:///a"])
def test_host_with_an_address_has_no_trouble(address):
    assert name_trouble(address) == ""
