"""The spelling of a core's address."""

import pytest

from vllm_mp.client.cores.endpoint import endpoint


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
