"""A client that hangs up, a time limit and a slow client: the request ends in the engine, or waits there."""

import asyncio
import gc

import msgspec
import pytest

from vllm_mp.server.anthropic.body import Message
from vllm_mp.server.app import build_app
from vllm_mp.server.http.body import RequestBody
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.openai.chat import ChatBody
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.responses.input import InputItem


class FakeConnection:
    """The server's side of a connection: what the application receives and sends."""

    def __init__(self, body, path="/v1/completions"):
        self.sent = []
        self.on_send = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.hung_up = asyncio.Event()
        self._body = msgspec.json.encode(body)
        self._is_read = False
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }

    async def receive(self):
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._body}
        await self.hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        self.on_send.set()
        await self.may_send.wait()

    @property
    def text(self):
        return b"".join(message.get("body", b"") for message in self.sent).decode()


CHAT = "/v1/chat/completions"
LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 20}


def _run(replay_engine, body, act, path="/v1/completions", **options):
    """Run the application for a request while `act(connection)` runs; return the connection after both have ended."""

    async def run():
        app = build_app(replay_engine, ServerOptions(**options))
        connection = FakeConnection(body, path)
        async with asyncio.timeout(60):
            await asyncio.gather(app(connection.scope, connection.receive, connection.send), act(connection, app))
        assert await replay_engine.get_num_unfinished_requests() == 0
        assert app.state.server.admission.num_live == 0
        return connection

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", LONG | {"prompt": ["x", "y", "z"], "n": 8}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "n": 20}),
    ],
)
@pytest.mark.parametrize("num_turns", [0, 1, 3, 30])
def test_hang_up_before_the_response_aborts_the_request(replay_engine, path, body, num_turns):
    async def hang_up(connection, app):
        for _ in range(num_turns):
            await asyncio.sleep(0)
        connection.hung_up.set()

    assert _run(replay_engine, body, hang_up, path).sent == []


@pytest.mark.parametrize(
    ("content", "num_turns"),
    [*(("x", count) for count in (0, 3, 10)), ([{"type": "image_url", "image_url": {"url": "data:,"}}], 0)],
)
def test_body_of_a_request_that_ended_early_is_freed_without_a_garbage_collection(replay_engine, content, num_turns):
    async def wait(connection, app):
        if content == "x":
            for _ in range(num_turns):
                await asyncio.sleep(0)
            connection.hung_up.set()
        else:  # the model takes no images: the request is refused
            await connection.on_send.wait()

    gc.collect()
    gc.disable()
    try:
        connection = _run(replay_engine, {"messages": [{"role": "user", "content": content}]}, wait, CHAT)
        assert [message["status"] for message in connection.sent[:1]] == ([] if content == "x" else [400])
        assert not any(isinstance(each, ChatBody) for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "messages"),
        ("/invocations", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "max_output_tokens": 4000}, "input"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 4000}}, "token_ids"),
    ],
)
def test_stream_keeps_no_prompt_in_the_form_in_which_it_was_sent(replay_engine, path, body, field):
    """It may have megabytes of images."""

    async def look(connection, app):
        connection.may_send.clear()
        await connection.on_send.wait()
        bodies = [each for each in gc.get_objects() if isinstance(each, RequestBody)]
        kept = [
            each for each in bodies if isinstance(each, ChatMessage | Message | InputItem) or getattr(each, field, None)
        ]
        connection.hung_up.set()
        connection.may_send.set()
        assert kept == []

    gc.collect()
    limit = {} if "input" in body or "token_ids" in body else {"max_tokens": 4000}
    _run(replay_engine, {**body, **limit, "stream": True}, look, path)


@pytest.mark.essential
@pytest.mark.parametrize("prompts", ["x", ["x", "y"]])
def test_hang_up_in_a_stream_aborts_the_request(replay_engine, prompts):
    async def hang_up(connection, app):
        connection.may_send.clear()
        await connection.on_send.wait()
        assert app.state.server.admission.num_live == 8 * len(prompts)
        connection.hung_up.set()

    connection = _run(replay_engine, LONG | {"prompt": prompts, "n": 8, "stream": True}, hang_up)
    assert "[DONE]" not in connection.text


def test_time_limit_ends_a_request_with_504(replay_engine):
    async def wait(connection, app):
        await connection.on_send.wait()

    connection = _run(replay_engine, LONG, wait, request_timeout=0.001)
    assert connection.sent[0]["status"] == 504
    assert (b"x-should-retry", b"false") in connection.sent[0]["headers"]
    assert "--request-timeout" in connection.text


def test_stream_that_the_server_ends_has_an_error_event(replay_engine):
    async def end(connection, app):
        connection.may_send.clear()
        await connection.on_send.wait()
        app.state.server.admission.end_all("stops")
        connection.may_send.set()

    connection = _run(replay_engine, LONG | {"stream": True}, end)
    events = connection.text.split("\n\n")
    assert connection.sent[0]["status"] == 200
    assert '"message":"the server stops"' in events[-3]
    assert events[-2:] == ["data: [DONE]", ""]


def test_streamed_response_that_the_server_ends_has_a_last_event_with_its_error(replay_engine):
    async def end(connection, app):
        while not connection.text:
            await connection.on_send.wait()
            connection.on_send.clear()
        app.state.server.admission.end_all("stops")

    body = {"input": "x", "max_output_tokens": 4000, "ignore_eos": True, "stream": True}
    connection = _run(replay_engine, body, end, "/v1/responses")
    first, last = connection.text.split("\n\n")[0], connection.text.split("\n\n")[-2]
    assert connection.sent[0]["status"] == 200
    assert first.startswith("event: response.created\n")
    assert last.startswith("event: response.failed\n")
    assert '"message":"the server stops"' in last


def test_tokens_merge_while_the_client_is_slow(replay_engine):
    async def stall(connection, app):
        connection.may_send.clear()
        await connection.on_send.wait()
        await replay_engine.wait_for_requests_to_drain(50)
        connection.may_send.set()

    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    connection = _run(replay_engine, body | {"stream_options": {"include_usage": True}}, stall)
    assert '"completion_tokens":1000' in connection.text
    assert connection.text.count("data: ") < 10
