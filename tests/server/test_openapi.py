"""The OpenAPI document: it describes all endpoints, and what it allows never makes the server fail."""

import re

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

_FREQUENT = ("/v1/completions", "/v1/chat/completions", "/detokenize")


@pytest.fixture(scope="module")
def document(server):
    return httpx.get(server.url + "/openapi.json").json()


def test_document_has_every_endpoint_with_the_fields_of_its_body(document):
    paths = document["paths"]
    assert paths.keys() >= {"/v1/completions", "/v1/chat/completions", "/v1/models/{model}", "/tokenize", "/health"}
    body = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "top_k", "typical_p", "stream_options", "suffix"} <= body.keys()
    assert body["suffix"]["type"] == "null"
    assert "additionalProperties" not in document["components"]["schemas"]["CompletionBody"], "others are ignored"
    assert {"type": "integer", "minimum": 1, "maximum": 1024} in body["n"]["anyOf"]


def test_references_of_the_document_resolve_and_operations_have_their_own_ids(document):
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"')))
    assert references == set(document["components"]["schemas"])
    ids = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("paths", "examples"),
    [(_FREQUENT, 4), pytest.param(None, 40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_no_request_that_the_document_suggests_makes_the_server_fail(server, paths, examples):
    import schemathesis

    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if paths is None or operation.path in paths:
            _attack(operation, examples, server.url)
    assert server.process.poll() is None
    assert server.get("/health")[0] == 200


def _attack(operation, examples, url):
    """Send requests that fit the description of `operation`, and requests that almost do."""
    from schemathesis import GenerationMode

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy() | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def attack(case):
        _bound_work(case.body)
        response = case.call(base_url=url, timeout=60)
        assert response.status_code < 500, (case.as_curl_command(), response.text)
        if response.status_code >= 400 and case.method != "HEAD":
            assert response.json()["error"]["message"], case.as_curl_command()

    attack()


def _bound_work(body):
    """Lower the numbers of completions and tokens that `body` asks for, if they are valid."""
    if not isinstance(body, dict):
        return
    for name, bound in (("n", 2), ("best_of", 2), ("max_tokens", 3), ("max_completion_tokens", 3)):
        if isinstance(body.get(name), int) and body[name] > bound:
            body[name] = bound
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_output_tokens" if "input" in body else "max_tokens"] = 3
