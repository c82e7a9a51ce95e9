"""Endpoints for platforms and tools: /ping, /load, /invocations, /tokenizer_info, render and tokens in, tokens out."""

import asyncio

import pytest

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.fixture
def ask(in_process):
    """A function that sends requests, each a method, a path and a body, to one application; returns the responses."""

    def send(*requests, **options):
        async def play():
            async with in_process(**options) as client:
                return [await client.request(method, path, json=body) for method, path, body in requests]

        return asyncio.run(play())

    return send


def test_invocation_is_answered_as_its_fields_say(ask):
    bodies = [CHAT, {"prompt": "Once", "max_tokens": 2}, {"input": "Once"}, {"query": "a", "documents": ["b"]}]
    chat, completion, *vectors = ask(*(("POST", "/invocations", body) for body in bodies))
    assert [chat.json()["object"], completion.json()["object"]] == ["chat.completion", "text_completion"]
    for answer, kind in zip(vectors, ("embd", "rerank"), strict=True):
        assert answer.json()["error"]["message"].startswith(f"request {kind}-"), "a replay core has no vectors"


def test_invocation_without_known_fields_is_refused(ask):
    [answer, late] = ask(
        ("POST", "/invocations", {"text": "a"}), ("POST", "/invocations", {"prompt": "a" * 3000}), max_body_bytes=1000
    )
    assert answer.status_code == 400
    assert "messages; prompt;" in answer.json()["error"]["message"]
    assert late.status_code == 413


def test_rendered_request_is_answered_as_tokens(ask):
    rendered, listed = ask(
        ("POST", "/v1/chat/completions/render", {**CHAT, "temperature": 0.5}),
        ("POST", "/v1/completions/render", {"prompt": ["Once upon", [5, 6]], "max_tokens": 2}),
    )
    request = rendered.json()
    assert request["sampling_params"]["temperature"] == 0.5
    assert request["sampling_params"]["max_tokens"] == 3
    assert [each["token_ids"] for each in listed.json()][1] == [5, 6]
    counted, whole, streamed = ask(
        ("POST", "/tokenize", {"messages": CHAT["messages"]}),
        ("POST", "/inference/v1/generate", request),
        ("POST", "/inference/v1/generate", {**request, "stream": True}),
    )
    assert counted.json()["tokens"] == request["token_ids"]
    [choice] = whole.json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    assert whole.json()["usage"]["completion_tokens"] == 3
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_paths_of_a_proxy_and_slashes_at_the_end_are_those_of_the_routes(ask):
    paths = ("/llm/v1/models", "/v1/models", "/llm/v1/models/", "/llm", "/llmx/v1/models")
    found = ask(*(("GET", path, None) for path in paths), root_path="/llm/")
    assert [answer.status_code for answer in found] == [200, 200, 200, 200, 404]


def test_probes_and_facts(ask):
    ping, load, info, page, counted, models = ask(
        ("POST", "/ping", None),
        ("GET", "/load", None),
        ("GET", "/tokenizer_info", None),
        ("GET", "/docs", None),
        ("POST", "/v1/responses/input_tokens", {"input": "Hello"}),
        ("GET", "/v1/models/", None),
    )
    assert ping.status_code == 200
    assert load.json() == {"server_load": 0}
    assert info.json()["eos_token"] == "<|im_end|>"
    assert "messages" in info.json()["chat_template"]
    assert "POST /v1/chat/completions" in page.text
    assert "http" not in page.text, "the page needs nothing of other servers"
    assert counted.json()["input_tokens"] > 5
    assert models.json()["data"][0]["id"] == "smollm2-135m-instruct"


@pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
def test_served_model_answers_if_the_name_is_missing_or_empty(ask, named):
    requests = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": "Once", "max_tokens": 2},
        "/v1/responses": {"input": "Once", "max_output_tokens": 2},
        "/v1/messages": CHAT,
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/tokenize": {"prompt": "Once"},
    }
    answers = ask(*(("POST", path, body | named) for path, body in requests.items()))
    assert [answer.status_code for answer in answers] == [200] * len(requests)


@pytest.mark.parametrize("model", ["alias", "organisation/name", "/secret/model", "~/model.gguf", "secret"])
def test_root_of_the_model_is_the_name_it_was_started_as_but_no_path(ask, replay_engine, monkeypatch, tmp_path, model):
    (tmp_path / "secret").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay_engine.model_config, "model", model)
    monkeypatch.setattr(replay_engine.model_config, "served_model_name", "house")
    [answer] = ask(("GET", "/v1/models", None))
    [card] = answer.json()["data"]
    assert (card["id"], card["root"]) == ("house", model if model in ("alias", "organisation/name") else "house")
