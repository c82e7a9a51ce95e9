"""Requests that are wrong get a defined status and a message that names the fault, in OpenAI's shape."""

import asyncio
import re
import tracemalloc

import pytest


def _send(in_process, path, content, headers, method="POST", **options):
    async def send():
        async with in_process(**options) as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(send())


JSON = {"Content-Type": "application/json"}


@pytest.mark.essential
@pytest.mark.parametrize(
    ("content", "status", "param", "said"),
    [
        (b'{"prompt":', 400, None, "not valid JSON"),
        (b'{"prompt": "x"} {}', 400, None, "not valid JSON"),
        (b"", 400, None, "not valid JSON"),
        (b"[]", 400, None, "expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', 400, None, "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, None, "half of a surrogate pair"),
        (b'{"prompt": "x", "temperature": NaN}', 400, None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', 400, None, "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e400}', 400, "temperature", "out of range"),
        (b'{"prompt": "x", "max_tokens": 1' + b"0" * 40 + b"}", 400, "max_tokens", "must be in"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None, "nested too deeply"),
        (b"{}", 400, "prompt", "the field prompt is missing"),
        (b'{"prompt": null}', 400, "prompt", "the field prompt is missing"),
        (b'{"prompt": {}}', 400, "prompt", "expected `str | array | null`"),
        (b'{"prompt": []}', 400, "prompt", "prompt is empty"),
        (b'{"prompt": [1, "x"]}', 400, "prompt", "mixes token ids"),
        (b'{"prompt": [' + b"1," * 2**19 + b"1,1]}", 413, None, "too many values"),
        (b'{"prompt": ["x", null]}', 400, "prompt[1]", "got `null`"),
        (b'{"prompt": "x", "stream_options": {"include_usage": 2}}', 400, "stream_options.include_usage", "got `int`"),
        (b'{"prompt": "x", "suffix": "y"}', 400, "suffix", "suffix is not served yet"),
        (b'{"prompt": "x", "use_beam_search": true}', 400, "use_beam_search", "use_beam_search is not served"),
        (b'{"prompt_embeds": "gAJ9"}', 400, "prompt_embeds", "prompt_embeds would be a pickle, which can run code"),
        (b'{"prompt": null, "prompt_embeds": "gAJ9"}', 400, "prompt_embeds", "prompt_embeds would be a pickle"),
        (b'{"prompt": "x", "logits_processors": ["a"]}', 400, "logits_processors", "names 'a', and this engine has"),
        (b'{"prompt": "x", "vllm_xargs": {"a": 1}}', 400, "extra_args", "this engine has registered none"),
        (b'{"prompt": "x", "vllm_xargs": {"num_speculative_tokens": -1}}', 400, "extra_args", "at least 0, got -1"),
        (b'{"prompt": "x", "guided_json": "{"}', 400, "guided_json", "json must be valid JSON"),
        (b'{"prompt": "x", "structured_outputs": {}}', 400, "structured_outputs", "exactly one of json"),
        (b'{"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}', 400, "guided_regex", "exactly one of"),
        (
            b'{"prompt": "x", "guided_regex": "a", "response_format": {"type": "json_object"}}',
            400,
            "guided_regex",
            "leave out one",
        ),
        (b'{"prompt": "x", "n": 0}', 400, "n", "n must be in [1, 1024], got 0"),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', 400, "logit_bias", "expected `int`"),
        (b'{"prompt": "x", "priority": 1}', 400, "priority", "scheduling_policy"),
        (b'{"prompt": [9999999]}', 400, "prompt", "vocabulary"),
        (b'{"prompt": ""}', 400, "prompt", "the prompt is empty"),
        (b'{"prompt": ["x", ""]}', 400, "prompt[1]", "the prompt is empty"),
        (b'{"prompt": "x", "request_id": "a b"}', 400, "request_id", "'a b'"),
        (b'{"prompt": "x", "model": "gpt-9"}', 404, "model", "the model 'gpt-9' does not exist"),
    ],
)
def test_wrong_body_is_refused_with_the_field_at_fault(in_process, content, status, param, said):
    response = _send(in_process, "/v1/completions", content, JSON)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert said in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ('{"messages": []}', "messages", "messages is empty"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content", "missing"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role", "'tool', got 'robot'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}',
            "messages[0].content[0]",
            "takes no images",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "tools[0].type", "is missing"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "functions": [{}]}',
            "functions",
            "the older form of tools and tool_choice",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}',
            "response_format.type",
            "must be one of text, json_object, json_schema, structural_tag",
        ),
        (
            '{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema"}}',
            "response_format.json_schema",
            "is missing",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}', "top_logprobs", "logprobs=true"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "max_completion_tokens": 3}',
            "max_completion_tokens",
            "differ",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}', "chat_template", "does not run"),
    ],
)
def test_wrong_chat_body_is_refused_with_the_path_of_the_field(in_process, body, param, said):
    response = _send(in_process, "/v1/chat/completions", body.encode(), JSON)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert said in response.json()["error"]["message"]


def test_prompt_that_is_too_long_names_its_tokens_and_the_limit(in_process, replay_engine):
    limit = replay_engine.model_config.max_model_len
    body = b'{"prompt": "%b"}' % (b"hello " * (limit + 10))
    error = _send(in_process, "/v1/completions", body, JSON).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert f"{limit + 11} tokens" in error["message"]
    assert f"max_model_len={limit}" in error["message"]


def test_request_for_more_completions_than_may_ever_wait_is_refused(in_process):
    body = b'{"prompt": ["x", "x", "x"], "n": 1000}'
    response = _send(in_process, "/v1/completions", body, JSON, max_waiting_requests=1500)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_completions")
    assert "3000 completions" in response.json()["error"]["message"]


def test_prompts_are_counted_before_they_are_made(in_process):
    body = b'{"prompt": [%b""]}' % (b'"",' * 500_000)
    tracemalloc.start()
    try:
        response = _send(in_process, "/v1/completions", body, JSON)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_completions")
    assert peak < 25 * 2**20


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_body_that_is_not_declared_as_json_is_refused(in_process, headers):
    response = _send(in_process, "/v1/completions", b'{"prompt": "x"}', headers)
    assert (response.status_code, response.json()["error"]["param"]) == (415, "Content-Type")


def test_error_repeats_a_bounded_part_of_the_body(in_process):
    long = b"x" * 10_000
    for body in (
        b'{"%b": 1}' % long,
        b'{"x - at `$%b": 1}' % (b".a" * 10_000),
        b'{"messages": [{"role": "x - at `$%b"}]}' % (b".a" * 10_000),
        b'{"messages": [{"role": "%b"}]}' % long,
        b'{"model": "%b", "messages": []}' % long,
    ):
        response = _send(in_process, "/v1/chat/completions", body, JSON | {"Prefer": "handling=strict"})
        assert 400 <= response.status_code <= 404
        assert len(response.content) < 1000


def test_compressed_body_is_refused(in_process):
    response = _send(in_process, "/v1/completions", b"\x1f\x8b", JSON | {"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["param"]) == (415, "Content-Encoding")


@pytest.mark.parametrize("headers", [JSON, JSON | {"Transfer-Encoding": "chunked"}])
def test_body_that_is_too_large_is_refused(in_process, headers):
    response = _send(in_process, "/v1/completions", b'{"prompt": "%b"}' % (b"x" * 1000), headers, max_body_bytes=500)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert "500 bytes" in response.json()["error"]["message"]


def test_body_that_does_not_arrive_in_time_is_refused(in_process):
    async def slow():
        yield b'{"prompt":'
        await asyncio.Event().wait()

    response = _send(in_process, "/v1/completions", slow(), JSON, body_timeout=0.05)
    assert response.status_code == 408
    assert "0.05 s" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/v1/completions", 405, "method_not_allowed"), ("GET", "/v1/engines", 404, "not_found")],
)
def test_unknown_path_and_method_are_refused_in_the_same_shape(in_process, method, path, status, code):
    response = _send(in_process, path, b"", {}, method)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert path in response.json()["error"]["message"]


def test_request_id_comes_back_in_the_header_of_answers_and_of_errors(in_process):
    headers = JSON | {"X-Request-Id": "my-id"}
    answer = _send(in_process, "/v1/completions", b'{"prompt": "x", "max_tokens": 1}', headers)
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("my-id", "cmpl-my-id")
    error = _send(in_process, "/v1/completions", b"{}", headers)
    assert (error.headers["x-request-id"], error.status_code) == ("my-id", 400)


def test_request_id_in_the_body_precedes_the_header(in_process):
    headers = JSON | {"X-Request-Id": "my-id"}
    for status, body in (
        (200, b'{"prompt": "x", "max_tokens": 1, "request_id": "own"}'),
        (400, b'{"prompt": "", "request_id": "own"}'),
    ):
        response = _send(in_process, "/v1/completions", body, headers)
        assert (response.status_code, response.headers["x-request-id"]) == (status, "own")
    response = _send(in_process, "/v1/embeddings", b'{"input": "x", "request_id": "own"}', headers)
    assert response.headers["x-request-id"] == "own"


def test_request_id_of_a_live_request_is_refused(in_process):
    async def send():
        body = {"prompt": "x", "max_tokens": 1, "request_id": "taken"}
        async with in_process() as client:
            return await asyncio.gather(*[client.post("/v1/completions", json=body) for _ in range(2)])

    answer, refusal = asyncio.run(send())
    assert (answer.status_code, refusal.status_code) == (200, 400)
    assert "'cmpl-taken' is in use" in refusal.json()["error"]["message"]


@pytest.mark.parametrize("first", [{"headers": {"X-Request-Id": "taken"}}, {"json": {"request_id": "taken"}}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_header_with_the_id_of_a_live_request_comes_back_and_gives_another_id(in_process, path, first):
    async def send():
        body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        async with in_process() as client:
            return await asyncio.gather(
                client.post(path, headers=first.get("headers"), json=body | first.get("json", {})),
                *[client.post(path, json=body, headers={"X-Request-Id": "taken"}) for _ in range(2)],
            )

    answers = asyncio.run(send())
    assert [answer.status_code for answer in answers] == [200] * 3
    assert [answer.headers["x-request-id"] for answer in answers] == ["taken"] * 3
    ids = [answer.json()["id"] for answer in answers]
    assert len(set(ids)) == 3
    assert ids[0].endswith("taken")


def test_ids_of_several_prompts_are_those_of_no_other_request(in_process):
    async def send():
        body = {"prompt": "x", "max_tokens": 1}
        async with in_process() as client:
            return await asyncio.gather(
                client.post("/v1/completions", json=body | {"prompt": ["x", "y"]}, headers={"X-Request-Id": "a"}),
                *[
                    client.post("/v1/completions", json=body | fields, headers=headers)
                    for fields, headers in (({}, {"X-Request-Id": "a-0"}), ({"request_id": "a-1"}, {}))
                ],
            )

    answers = asyncio.run(send())
    assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
    assert [answer.json()["id"] for answer in answers] == ["cmpl-a", "cmpl-a-0", "cmpl-a-1"]


@pytest.mark.parametrize("given", ["a b", "x" * 129, "a\tb", "a#1", "\u00e9".encode("latin-1")])
def test_header_with_other_characters_than_an_id_comes_back_and_the_id_is_drawn(in_process, given):
    response = _send(in_process, "/v1/completions", b'{"prompt": "x"}', JSON | {"X-Request-Id": given})
    assert response.status_code == 200
    assert response.headers.raw.count((b"x-request-id", given if isinstance(given, bytes) else given.encode())) == 1
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", response.json()["id"])


def test_empty_header_is_no_id(in_process):
    response = _send(in_process, "/v1/completions", b'{"prompt": "x"}', JSON | {"X-Request-Id": ""})
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"


def test_text_with_nul_bytes_is_completed(in_process):
    response = _send(in_process, "/v1/completions", b'{"prompt": "a\\u0000b", "max_tokens": 2, "echo": true}', JSON)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"].startswith("a\0b")


def test_prompts_stay_out_of_the_log(server):
    secret = "xyzzy-plugh"
    for path, body in {
        "/v1/completions": {"prompt": secret, "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": secret}], "max_tokens": 1},
        "/tokenize": {"prompt": secret},
    }.items():
        assert server.post(path, body)[0] == 200
        assert server.post(path, body | {"model": "no model"})[0] == 404
    assert server.post("/v1/completions", {"prompt": f"{secret} " * 600})[0] == 400
    assert secret not in server.log.read_text()


def test_failure_before_the_first_token_of_a_stream_has_its_own_status(in_process):
    # A replay core fails requests for log-probabilities of prompts.
    response = _send(in_process, "/v1/completions", b'{"prompt": "x", "prompt_logprobs": 1, "stream": true}', JSON)
    assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
    assert response.json()["error"]["code"] == "generation_failed"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_echo_of_tokens_without_a_text_is_refused(in_process, replay_engine, monkeypatch, stream):
    async def detokenize(token_ids, **options):
        raise ValueError(f"token ids must be in [0, 5), got {token_ids[0]}")

    monkeypatch.setattr(replay_engine, "detokenize", detokenize)
    content = b'{"prompt": [7], "max_tokens": 1, "echo": true, "stream": %b}' % stream
    response = _send(in_process, "/v1/completions", content, JSON)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")
