"""Requests that web pages of other sites make a browser send: by other names of this machine, or across origins."""

import asyncio

import httpx
import pytest

from vllm_mp.server.http.errors import public_text
from vllm_mp.server.http.security import host_name

BODY = {"prompt": [1, 2, 3], "max_tokens": 1}


def ask(client: httpx.AsyncClient, *headers: tuple[str, str], method: str = "POST") -> httpx.Response:
    """Return the response to a completion, or to a GET of the models, with these headers beside the usual ones."""

    async def run() -> httpx.Response:
        async with client:
            path, body = ("/v1/completions", BODY) if method == "POST" else ("/v1/models", None)
            request = client.build_request(method, path, json=body)
            usual = [(name, value) for name, value in request.headers.raw if name.lower() != b"host"]
            request.headers = httpx.Headers(usual + [(name.encode(), value.encode()) for name, value in headers])
            return await client.send(request)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "host", "is_served"),
    [
        ({}, "localhost:8000", True),
        ({}, "LOCALHOST.", True),
        ({}, "app.localhost", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "127.9.9.9", True),
        ({}, "[::1]:8000", True),
        ({}, "attacker.example", False),
        ({}, "localhost.attacker.example", False),
        ({}, "127.0.0.1.attacker.example:8000", False),
        ({}, "192.168.1.5", False),
        ({}, "", False),
        ({"host": "192.168.1.5"}, "192.168.1.5:8000", True),
        ({"host": "192.168.1.5"}, "192.168.1.6:8000", False),
        ({"host": "0.0.0.0"}, "192.168.1.6:8000", True),
        ({"host": "0.0.0.0"}, "attacker.example", False),
        ({"allowed_hosts": ("Model.Example",)}, "model.example:80", True),
        ({"allowed_hosts": ("model.example",)}, "other.example", False),
        ({"allowed_hosts": ("*",)}, "other.example", True),
    ],
)
def test_without_keys_only_names_of_the_server_are_served(in_process, options, host, is_served):
    response = ask(in_process(**options), ("Host", host))
    assert response.status_code == (200 if is_served else 403)
    if not is_served:
        error = response.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert "--allowed-hosts NAME" in error["message"]
        assert repr(host_name(host)) in error["message"]


def test_with_keys_every_name_is_served(in_process):
    headers = ("Host", "model.example"), ("Authorization", "Bearer key"), ("Origin", "https://page.example")
    assert ask(in_process(api_key=("key",)), *headers).status_code == 200


@pytest.mark.parametrize("api_key", [(), ("key",)])
@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "attacker.example"]])
def test_request_must_have_one_host_header(in_process, api_key, hosts):
    response = ask(in_process(api_key=api_key), *(("Host", host) for host in hosts), ("Authorization", "Bearer key"))
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"the request has {len(hosts)} Host headers; send 1"


@pytest.mark.parametrize(
    ("origin", "allowed", "status"),
    [
        ("http://localhost:8000", (), 200),
        ("http://localhost:3000", (), 403),
        ("https://page.example", (), 403),
        ("null", (), 403),
        ("https://page.example", ("https://page.example",), 200),
        ("https://page.example", ("*",), 200),
    ],
)
def test_page_of_another_origin_may_post_only_if_it_was_allowed(in_process, origin, allowed, status):
    response = ask(in_process(cors_allow_origin=allowed), ("Host", "localhost:8000"), ("Origin", origin))
    assert response.status_code == status
    if status == 403:
        assert response.json()["error"]["code"] == "origin_not_allowed"


def test_any_origin_may_read_what_a_browser_then_keeps_from_it(in_process):
    headers = ("Host", "localhost:8000"), ("Origin", "https://page.example")
    response = ask(in_process(), *headers, method="GET")
    assert response.status_code == 200
    assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "the core process 4711 ended with SIGKILL; its last log lines (/tmp/vllm-mp-1/core.log):\nsecret\nlines",
            "the core process ended with SIGKILL; the server's log says more",
        ),
        (
            "the core died 3 times within 60 s: the core process 12 ended with exit code 1; its log is empty",
            "the core died 3 times within 60 s: the core process ended with exit code 1; the server's log says more",
        ),
        ("the engine was shut down", "the engine was shut down"),
    ],
)
def test_clients_read_the_cause_of_a_death_and_nothing_of_the_log(text, expected):
    assert public_text(RuntimeError(text)) == expected
