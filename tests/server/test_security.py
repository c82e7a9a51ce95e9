"""API keys, TLS and the web pages of other origins."""

import asyncio
import ssl
import subprocess

import httpx
import pytest
from support.server_process import served

from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.security import read_api_keys, tls_context

pytestmark = pytest.mark.usefixtures("forked_programs")

_KEYS = ("first-key", "second-key")
_ORIGIN = "https://app.example"


def _ask(client, method, path, **headers):
    """Return the response of an application in this process."""

    async def run():
        async with client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(run())


@pytest.mark.essential
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/core_status", "/live", "/unknown"])
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-ke"]
)
def test_request_without_a_key_is_refused(in_process, path, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    response = _ask(in_process(api_key=_KEYS), "GET", path, **headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", _KEYS)
def test_each_key_opens_the_server(in_process, key):
    assert _ask(in_process(api_key=_KEYS), "GET", "/v1/models", Authorization=f"Bearer {key}").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/"])
def test_probes_and_the_page_need_no_key(in_process, path):
    assert _ask(in_process(api_key=_KEYS), "GET", path).status_code == 200


def test_keys_come_from_flags_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("in-file\n\n  also-in-file  \n")
    options = ServerOptions(api_key=("flag",), api_key_file=str(file))
    environment = {"VLLM_API_KEY": "variable", "VLLM_MP_API_KEY": "own-variable"}
    keys = read_api_keys(options, environment)
    assert sorted(keys) == ["also-in-file", "flag", "in-file", "own-variable", "variable"]


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\nbreak"])
def test_unusable_key_is_refused(key):
    with pytest.raises(ValueError, match=r"^api_key must be a key"):
        read_api_keys(ServerOptions(api_key=(key,)), {})


def test_file_without_keys_is_refused(tmp_path):
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_api_keys(ServerOptions(api_key_file=str(tmp_path / "keys")), {})


def test_pages_of_other_origins_are_allowed_only_if_asked_for(in_process):
    # The openai client in a browser sends headers such as this one.
    headers = {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}
    preflight = {"Origin": _ORIGIN, "Access-Control-Request-Method": "POST"} | headers
    plain = _ask(in_process(), "OPTIONS", "/v1/completions", **preflight)
    assert "Access-Control-Allow-Origin" not in plain.headers
    allowed = _ask(in_process(cors_allow_origin=(_ORIGIN,), api_key=_KEYS), "OPTIONS", "/v1/completions", **preflight)
    assert allowed.status_code == 200
    assert allowed.headers["Access-Control-Allow-Origin"] == _ORIGIN
    private = preflight | {"Access-Control-Request-Private-Network": "true"}
    reached = _ask(in_process(cors_allow_origin=(_ORIGIN,)), "OPTIONS", "/v1/completions", **private)
    assert (reached.status_code, reached.headers["Access-Control-Allow-Private-Network"]) == (200, "true")
    other = preflight | {"Origin": "https://other.example"}
    refused = _ask(in_process(cors_allow_origin=(_ORIGIN,)), "OPTIONS", "/v1/completions", **other)
    assert "Access-Control-Allow-Origin" not in refused.headers
    assert refused.status_code == 400


def test_access_log_names_the_path_and_neither_query_nor_headers(in_process, caplog):
    client = in_process(access_log=True)
    _ask(client, "GET", "/version?prompt=secret", Authorization="Bearer secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "vllm_mp.server.http.access_log"]
    assert "GET /version 200" in line
    assert "secret" not in line


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with the certificate and key of an authority that signs itself: for the server and for a client."""
    folder = tmp_path_factory.mktemp("certificates")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder


def test_tls_serves_clients_with_a_certificate_only(certificates, replay_address, tmp_path):
    names = {"--ssl-certfile": "cert.pem", "--ssl-keyfile": "key.pem", "--ssl-ca-certs": "cert.pem"}
    flags = [word for flag, name in names.items() for word in (flag, str(certificates / name))]
    with served(DEFAULT_MODEL, tmp_path, "--connect", replay_address, *flags, core_flags=()) as server:
        assert server.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(certificates / "cert.pem"))
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            httpx.get(server.url + "/health", verify=trusting)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health")
        trusting.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
        assert httpx.get(server.url + "/health", verify=trusting).json() == {"status": "ok"}


def test_tls_files_that_cannot_be_used_are_named(certificates, tmp_path):
    with pytest.raises(ValueError, match="ssl_certfile is missing"):
        tls_context(ServerOptions(ssl_keyfile="key.pem"))
    with pytest.raises(OSError, match="cannot use the TLS files /nowhere"):
        tls_context(ServerOptions(ssl_certfile="/nowhere"))
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(OSError, match=r"key\.pem"):
        tls_context(ServerOptions(ssl_certfile=str(certificates / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem")))
