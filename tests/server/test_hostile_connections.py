"""Connections that break the rules: each gets a status or is closed, and other clients are served as before."""

import contextlib
import os
import socket
import time

import psutil
import pytest
from support.server_process import served

from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.testing.engines import replay_core

pytestmark = pytest.mark.usefixtures("forked_programs")

_HEADER_BYTES = 4096
_LIMITS = {
    "--header-timeout": "0.5",
    "--body-timeout": "0.5",
    "--keep-alive-timeout": "0.5",
    "--max-header-bytes": str(_HEADER_BYTES),
    "--max-body-bytes": "100000",
}
_GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
_COMPLETION = b'{"prompt": "Hello", "max_tokens": 2}'


def _post(body=_COMPLETION, *headers, length=None):
    """Return a POST to /v1/completions; `length` is the declared length of its body."""
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    if length is not None:
        head.append(f"Content-Length: {length}")
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture(scope="module")
def server(replay_address, tmp_path_factory):
    """A server with short limits over a core without a model."""
    flags = [word for flag in _LIMITS.items() for word in flag]
    with served(
        DEFAULT_MODEL, tmp_path_factory.mktemp("hostile"), "--connect", replay_address, *flags, core_flags=()
    ) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(autouse=True)
def _others_are_served_and_nothing_is_left(server):
    """After each test: a normal request is served at once, and the server closes all connections of the test."""
    open_before = _num_open(server.pid)
    yield
    assert server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
    server.wait_for(lambda: _num_open(server.pid) <= open_before)
    assert "Traceback" not in server.log.read_text()


def _num_open(pid):
    """Return the number of open sockets of a process."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return count


def _connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def _read_to_end(connection):
    """Return what the server sends until it closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            answer += piece
    return answer


def _ask(server, *pieces):
    """Send `pieces`, and return what the server answers until it closes the connection."""
    with _connect(server) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        return _read_to_end(connection)


def _statuses(answer):
    """Return the statuses of the responses in `answer`."""
    return [int(part.split(b" ", 1)[0]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(_post(_COMPLETION, "Content-Length: 3", length=36), 400, id="two lengths"),
        pytest.param(_post(b"0\r\n\r\n", "Transfer-Encoding: chunked", length=5), 400, id="length and chunks"),
        pytest.param(_post(b"", "Transfer-Encoding: chunked, gzip"), 400, id="chunks inside another encoding"),
        pytest.param(_post(b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400, id="chunk size no number"),
        pytest.param(_post(b"-1\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400, id="negative chunk size"),
        pytest.param(_post(b"f" * 20 + b"\r\n", "Transfer-Encoding: chunked"), 400, id="chunk size of 80 bits"),
        pytest.param(_post(b"", length=-1), 400, id="negative length"),
        pytest.param(_post(b"", length="1e3"), 400, id="length no integer"),
        pytest.param(_post(b"", length="9" * 30), 400, id="length of 100 bits"),
        pytest.param(_post(b"", length="99999999999"), 413, id="length beyond the limit"),
        pytest.param(b"GET /version HTTP/1.1\r\nHost: localhost\r\n folded: b\r\n\r\n", 400, id="folded header"),
        pytest.param(b"GET /version HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, id="space before colon"),
        pytest.param(b"GET /version HTTP/1.1\r\nX: a\0b\r\n\r\n", 400, id="nul in header"),
        pytest.param(b"GET /vers\0ion HTTP/1.1\r\n\r\n", 400, id="nul in path"),
        pytest.param(b"GET /version HTTP/1.1\nHost: localhost\n\n", 400, id="line ends without carriage return"),
        pytest.param(b"GET\r\n\r\n", 400, id="no path"),
        pytest.param(b"GET /version\r\n\r\n", 200, id="no version, as HTTP/0.9"),
        pytest.param(b"GET /version HTTP/9.9\r\n\r\n", 400, id="unknown version"),
        pytest.param(b"BREW /version HTTP/1.1\r\n\r\n", 400, id="unknown method"),
        pytest.param(b"CONNECT elsewhere:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="connect"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, id="asterisk"),
        pytest.param(b"GET http://elsewhere/version HTTP/1.1\r\nHost: localhost\r\n\r\n", 200, id="absolute path"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="http/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400, id="tls on a plain port"),
        pytest.param(b"\xff" * 1000, 400, id="garbage"),
        pytest.param(b"GET /version HTTP/1.1\r\nX: " + b"a" * 2**20 + b"\r\n\r\n", 431, id="header of 1 MiB"),
        pytest.param(b"GET /version HTTP/1.1\r\nX: " + b"a" * _HEADER_BYTES + b"\r\n\r\n", 431, id="large header"),
        pytest.param(b"GET /" + b"a" * _HEADER_BYTES + b" HTTP/1.1\r\n\r\n", 431, id="long path"),
        pytest.param(b"GET /version HTTP/1.1\r\n" + b"X: a\r\n" * 500 + b"\r\n", 431, id="500 headers"),
        pytest.param(_GET[:-2] + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n", 200, id="upgrade"),
    ],
)
def test_malformed_request_has_a_defined_status(server, request_bytes, status):
    assert _statuses(_ask(server, request_bytes)) == [status]


_H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAA")
"""Headers with which clients of Java ask for HTTP/2 in each request."""
_H2C_GET = _GET[:-2] + "\r\n".join([*_H2C, "", ""]).encode()
_CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(_COMPLETION), _COMPLETION)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(_post(_COMPLETION, *_H2C, length=len(_COMPLETION)), id="length"),
        pytest.param(_post(_CHUNKS, *_H2C, "Transfer-Encoding: chunked"), id="chunks"),
        pytest.param(_H2C_GET, id="no body"),
        pytest.param(_H2C_GET[:-2] + b"Content-Length: 0\r\n\r\n", id="length 0"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [7, 10_000], ids=["in pieces", "at once"])
def test_request_that_asks_for_another_protocol_is_served_as_any_other(server, request_bytes, piece_bytes):
    sent = request_bytes + _GET + request_bytes
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    assert _statuses(_ask(server, *pieces)) == [200, 200, 200]


def test_body_after_an_upgrade_has_the_limits_of_others(server):
    assert _statuses(_ask(server, _post(b'{"prompt"', *_H2C, length=1000))) == [408]
    assert _statuses(_ask(server, _post(b"", *_H2C, length=10**9))) == [413]
    assert _statuses(_ask(server, _post(b"zz\r\n", *_H2C, "Transfer-Encoding: chunked"))) == [400]


def test_large_header_is_refused_before_it_ends(server):
    assert _statuses(_ask(server, b"GET /version HTTP/1.1\r\n", *[b"X: " + b"a" * 1000 + b"\r\n"] * 50)) == [431]


def test_large_body_in_chunks_is_refused_while_it_arrives(server):
    chunk = b"%x\r\n" % 50_000 + b" " * 50_000 + b"\r\n"
    with _connect(server) as connection:
        connection.sendall(_post(b"", "Transfer-Encoding: chunked") + 3 * chunk)
        # The response comes though the body has not ended.
        assert connection.recv(65_536).startswith(b"HTTP/1.1 413 ")


def test_client_that_stops_in_the_headers_is_told_and_dropped(server):
    assert _statuses(_ask(server, b"GET /version HTTP/1.1\r\nHost: te")) == [408]


@pytest.mark.parametrize("piece", [b"\r\n", b"G", b"GET / HTTP/1.1\r\nX: a\r\n"], ids=["nothing", "method", "headers"])
def test_headers_that_trickle_in_are_cut_off(server, piece):
    with _connect(server) as connection:
        started = time.monotonic()
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(piece)
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(1000) or b"closed"
        assert time.monotonic() - started < 20


def test_body_that_stops_is_refused(server):
    assert _statuses(_ask(server, _post(b'{"prompt"', length=1000))) == [408]


def test_body_that_no_endpoint_reads_cannot_hold_a_connection(server):
    answer = _ask(server, b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
    assert _statuses(answer) == [200]


def test_connection_that_sends_nothing_is_closed(server):
    assert _ask(server) == b""


def test_connection_is_closed_after_its_request(server):
    assert _statuses(_ask(server, _GET)) == [200]


def test_pipelined_requests_are_answered_in_order(server):
    answer = _ask(server, _GET + _post(length=len(_COMPLETION)) + _GET)
    assert _statuses(answer) == [200, 200, 200]
    assert answer.index(b'"version"') < answer.index(b'"text_completion"') < answer.rindex(b'"version"')


def test_pipeline_has_a_limit(server):
    assert len(_statuses(_ask(server, 1000 * _GET))) < 1000


def test_client_that_hangs_up_behind_pipelined_requests_aborts_the_running_one(default_model, tmp_path):
    def num_running():
        return server.get("/core_status")[1]["num_running"]

    body = b'{"prompt": "Hello", "max_tokens": 4000, "ignore_eos": true}'
    with (
        replay_core(tmp_path, "--rate", "20") as address,
        served(DEFAULT_MODEL, tmp_path, "--connect", address, core_flags=()) as server,
    ):
        server.wait_until_ready()
        with _connect(server) as connection:
            connection.sendall(_post(body, length=len(body)))
            server.wait_for(lambda: num_running() == 1)
            connection.sendall(_GET + _GET)
        server.wait_for(lambda: num_running() == 0)


def test_garbage_behind_a_request_does_not_get_into_its_response(server):
    answer = _ask(server, _post(length=len(_COMPLETION)) + b"\xff\xff\xff\r\n\r\n")
    assert _statuses(answer) in ([], [200], [200, 400])


def test_client_that_closes_its_sending_side_counts_as_gone(server):
    with _connect(server) as connection:
        connection.sendall(_post(b"", length=1000))
        connection.shutdown(socket.SHUT_WR)
        assert _read_to_end(connection) == b""


@pytest.fixture(scope="module")
def patient_server(replay_address, tmp_path_factory):
    """A server with the usual limits over a core without a model."""
    folder = tmp_path_factory.mktemp("patient")
    with served(DEFAULT_MODEL, folder, "--connect", replay_address, core_flags=()) as process:
        process.wait_until_ready()
        yield process


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_idle_connections_disturb_nobody(patient_server, count):
    process = psutil.Process(patient_server.pid)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(_connect(patient_server)) for _ in range(count)]
        ports = {connection.getsockname()[1] for connection in idle}

        def num_accepted():
            return sum(bool(peer.raddr) and peer.raddr.port in ports for peer in process.net_connections("tcp"))

        patient_server.wait_for(lambda: num_accepted() == count)
        assert patient_server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
        idle[-1].sendall(_GET)
        assert idle[-1].recv(1000).startswith(b"HTTP/1.1 200 ")
    patient_server.wait_for(lambda: num_accepted() == 0)
