"""The OpenAPI document: it describes all endpoints, and what it allows never makes the server fail."""

import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from support.server_process import served

from vllm_mp.model_store import DEFAULT_MODEL


@pytest.fixture(scope="module")
def replay_server(replay_address, tmp_path_factory):
    """A server process of the replay core."""
    with served(
        DEFAULT_MODEL, tmp_path_factory.mktemp("replay_server"), "--connect", replay_address, core_flags=()
    ) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def document(replay_server):
    return httpx.get(replay_server.url + "/openapi.json").json()


def test_document_has_every_endpoint_with_the_fields_of_its_body(document):
    paths = document["paths"]
    assert paths.keys() >= {"/v1/completions", "/v1/chat/completions", "/v1/models/{model}", "/tokenize", "/health"}
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "top_k", "typical_p", "stream_options", "suffix"} <= body.keys()
    assert body["suffix"]["type"] == "null"
    assert {"type": "integer", "minimum": 1, "maximum": 1024} in body["n"]["anyOf"]


def test_references_of_the_document_resolve_and_operations_have_their_own_ids(document):
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"')))
    assert references == set(document["components"]["schemas"])
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("examples", [3, pytest.param(150, marks=pytest.mark.slow)])
def test_no_request_that_the_document_suggests_makes_the_server_fail(replay_server, examples):
    schema = schemathesis.openapi.from_url(replay_server.url + "/openapi.json")
    for result in schema.get_all_operations():
        _attack(result.ok(), examples, f"{replay_server.url}")
    assert replay_server.process.poll() is None
    assert replay_server.get("/health")[0] == 200


def _attack(operation, examples, url):
    """Send requests that fit the description of `operation`, and requests that almost do."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def attack(case):
        response = case.call(base_url=url, timeout=60)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400 and case.method != "HEAD":
            assert response.json()["error"]["message"], case.as_curl_command()

    attack()
