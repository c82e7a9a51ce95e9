"""Chat templates that refuse, fail, loop or grow: the request fails with the reason, and its thread is free again."""

import asyncio
import threading

import pytest

from vllm_mp.client.prompts import chat_template
from vllm_mp.client.prompts.chat_template import ChatTemplate, ChatTemplateError
from vllm_mp.client.prompts.tokenizer import load_tokenizer
from vllm_mp.model_store import cache_root

MESSAGES = [{"role": "user", "content": "hello"}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_tokenizer(default_model, cache_dir=cache_root())


def _render(tokenizer, *, time_limit=2.0, **options):
    return asyncio.run(ChatTemplate(tokenizer, time_limit).render(MESSAGES, **options))


def test_variables_reach_the_template(tokenizer):
    text = _render(tokenizer, template="{{ messages[0].content }} {{ mood }}", variables={"mood": "gladly"})
    assert text == "hello gladly"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('only assistants') }}", "only assistants"),
        ("{{ messages[0].name + 'x' }}", "has no attribute 'name'"),
        ("{{ 1 // 0 }}", "integer division"),
        ("{% if %}", "the chat template failed"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.mro() }}", "unsafe"),
    ],
)
def test_template_that_fails_says_why(tokenizer, template, said):
    with pytest.raises(ChatTemplateError, match=said):
        _render(tokenizer, template=template, time_limit=30)


def test_text_that_is_too_long_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_CHARACTERS", 10)
    assert _render(tokenizer, template="{{ 'x' * 10 }}") == "x" * 10
    with pytest.raises(ChatTemplateError, match="made 11 characters, the limit is 10"):
        _render(tokenizer, template="{{ 'x' * 11 }}")


def test_variable_with_the_name_of_an_argument_is_refused(tokenizer):
    with pytest.raises(ChatTemplateError, match="'tokenize'"):
        _render(tokenizer, variables={"tokenize": True})


@pytest.mark.parametrize("cancel", [False, True])
def test_looping_templates_end_and_leave_their_threads_to_others(tokenizer, cancel):
    async def run():
        template = ChatTemplate(tokenizer, 0.2 if not cancel else 1000)
        # More renderings than there are threads.
        loops = [asyncio.create_task(template.render(MESSAGES, template=LOOP)) for _ in range(6)]
        if cancel:
            await asyncio.sleep(0)
            for task in loops:
                task.cancel()
        errors = await asyncio.gather(*loops, return_exceptions=True)
        text = await template.render(MESSAGES)
        return errors, text

    errors, text = asyncio.run(run())
    assert "hello" in text
    for error in errors:
        assert isinstance(error, asyncio.CancelledError if cancel else ChatTemplateError)
        if not cancel:
            assert "did not end within 0.2 s" in str(error)


def test_rendering_waits_for_the_import_of_jinja_which_no_limit_or_cancellation_ends(tokenizer, monkeypatch):
    is_importing, may_go_on = threading.Event(), threading.Event()

    def slow_import():
        is_importing.set()
        may_go_on.wait(60)

    async def run():
        monkeypatch.setattr(chat_template, "import_jinja", slow_import)
        template = ChatTemplate(tokenizer, 0.1)
        cancelled, waiting = (asyncio.create_task(template.render(MESSAGES)) for _ in range(2))
        await asyncio.to_thread(is_importing.wait, 60)
        cancelled.cancel()
        done, _ = await asyncio.wait([cancelled, waiting], timeout=0.3)
        may_go_on.set()
        return done == {cancelled}, await waiting

    was_waiting, text = asyncio.run(run())
    assert was_waiting
    assert "hello" in text


def test_event_loop_goes_on_while_a_template_loops(tokenizer):
    async def run():
        template = ChatTemplate(tokenizer, 0.5)
        loop = asyncio.create_task(template.render(MESSAGES, template=LOOP))
        ticks = 0
        while not loop.done():
            await asyncio.sleep(0.001)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 3


def test_request_with_a_template_is_served_if_the_operator_trusts_it(in_process):
    async def send(chat_template, **options):
        body = {"messages": MESSAGES, "chat_template": chat_template}
        async with in_process(**options) as client:
            return await client.post("/tokenize", json=body)

    asked = "{{ messages[0].content }} again"
    trusted = asyncio.run(send(asked, trust_request_chat_template=True))
    assert (trusted.status_code, trusted.json()["count"]) == (200, 2)
    refused = asyncio.run(send(asked))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
    failing = asyncio.run(send("{{ raise_exception('no users') }}", trust_request_chat_template=True))
    assert failing.status_code == 400
    assert failing.json()["error"]["code"] == "chat_template_failed"
    assert "no users" in failing.json()["error"]["message"]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
def test_reasoning_effort_reaches_the_template(in_process, effort):
    async def send():
        body = {"messages": MESSAGES, "reasoning_effort": effort, "chat_template": "{{ reasoning_effort }}"}
        async with in_process(trust_request_chat_template=True) as client:
            rendered = await client.post("/v1/chat/completions/render", json=body)
            assert rendered.status_code == 200, rendered.text
            return await client.post("/detokenize", json={"tokens": rendered.json()["token_ids"]})

    assert asyncio.run(send()).json()["prompt"] == effort


@pytest.mark.parametrize(("of_request", "expected"), [({}, "calm"), ({"mood": "glad"}, "glad")])
def test_variables_of_the_server_reach_the_template_unless_the_request_has_its_own(in_process, of_request, expected):
    async def send():
        body = {"messages": MESSAGES, "chat_template": "{{ mood }}", "chat_template_kwargs": of_request}
        options = {"trust_request_chat_template": True, "default_chat_template_kwargs": {"mood": "calm"}}
        async with in_process(**options) as client:
            tokens = await client.post("/tokenize", json=body)
            return await client.post("/detokenize", json={"tokens": tokens.json()["tokens"]})

    assert asyncio.run(send()).json()["prompt"] == expected
