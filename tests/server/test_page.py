"""The page at `/` in headless Chromium, against real servers."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.chromium import expect
from support.server_process import ServedModel, served

from vllm_mp.model_store import DEFAULT_MODEL

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.usefixtures("forked_programs")

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
KEY = "the-key-of-the-page"
RESTART_MS = 60_000
"""Time that a core gets to restart, or an answer to end, on a busy machine."""

OpenPage = Callable[..., "Page"]


@pytest.fixture
def open_page(browser) -> Iterator[OpenPage]:
    """A function that opens the page of a server in a tab of its own.

    After the test, no page may have logged an error, except those expected, or sent a request to another origin.
    """
    problems: list[str] = []
    contexts = []

    def ignore_eos(route: "Route") -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    def open_page(url: str, expected_error: str = "(?!)", **options) -> "Page":
        def note_error(text: str) -> None:
            if not re.search(expected_error, text):
                problems.append(text)

        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(RESTART_MS)
        page.on("console", lambda message: note_error(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: note_error(str(error)))
        page.on("request", lambda request: None if request.url.startswith(url) else problems.append(request.url))
        page.route("**/v1/chat/completions", ignore_eos)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page, server) -> "Page":
    """The page of the shared server, with the first snapshot."""
    page = open_page(server.url)
    wait_for_state(page, "Running")
    return page


def wait_for_state(page: "Page", state: str) -> None:
    expect(page.locator("#state")).to_have_text(state, timeout=RESTART_MS)


def ask(page: "Page", message: str, max_tokens: int) -> None:
    """Send `message` in the chat; the answer has exactly `max_tokens` tokens."""
    page.locator("#settings [name=max_tokens]").evaluate("(field, value) => (field.value = value)", str(max_tokens))
    page.get_by_label("Message", exact=True).fill(message)
    page.keyboard.press("Enter")


def wait_for_answer(page: "Page") -> None:
    expect(page.locator(".turn").last).to_have_attribute("data-state", "done", timeout=RESTART_MS)


def reading(page: "Page", card: str, name: str) -> float:
    return float(page.locator(f"#{card} [data-value={name}] b").inner_text().replace("–", "nan"))


def wait_until(page: "Page", server: ServedModel, condition: Callable[[], bool]) -> None:
    """Return once `condition()` is true; meanwhile the page runs on."""

    def poll() -> bool:
        page.wait_for_timeout(20)
        return condition()

    server.wait_for(poll)


def content_width(page: "Page") -> int:
    # Not compared with window.innerWidth, which grows on a phone, because the browser zooms out.
    return page.evaluate("document.documentElement.scrollWidth")


def test_page_shows_model_core_and_readings(page: "Page", server: ServedModel) -> None:
    model = server.get("/v1/models")[1]["data"][0]
    expect(page.locator("#model")).to_have_text(model["id"])
    expect(page.locator("#model-facts")).to_have_text(f"Context {model['max_model_len']:,} tokens")
    expect(page.locator("#version")).to_have_text(f"vllm_mp {server.get('/version')[1]['version']}")
    expect(page.locator("#core-facts")).to_contain_text(f"Core {server.get('/core_status')[1]['incarnation']} · up")
    expect(page.locator("#streams [data-value=running]")).to_have_text("0")
    expect(page.locator("#kv-cache [data-value=usage]")).to_have_text("0 %")
    assert page.locator(".plot svg").count() == 4


def test_answer_streams_and_says_its_speed_while_the_readings_move(page: "Page", server: ServedModel) -> None:
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    ask(page, "Count from one to one hundred.", 50)
    answer = page.locator(".answer").last
    expect(answer).not_to_be_empty()
    expect(page.locator(".turn").last).to_have_attribute("data-state", "answering")
    wait_until(page, server, lambda: reading(page, "throughput", "output") > 0)
    wait_for_answer(page)
    speed, wait, length = page.locator(".stats span").all_inner_texts()
    assert re.fullmatch(r"[\d.,]+ tokens/s", speed)
    assert re.fullmatch(r"first token [\d.]+ m?s", wait)
    assert length == "50 tokens (limit)"
    expect(page.locator("#latency tr").nth(1).locator("td").first).to_contain_text("s")
    expect(page.locator("#throughput polyline")).not_to_have_count(0)

    ask(page, "Go on.", 4)
    wait_for_answer(page)
    assert [message["role"] for message in bodies[-1]["messages"]] == ["user", "assistant", "user"]
    assert (
        bodies[-1]["messages"][1]["content"].split() == answer.first.inner_text().split() or bodies[-1]["messages"][1]
    )


def test_stop_ends_the_request_in_the_core(page: "Page", server: ServedModel) -> None:
    ask(page, "Tell a very long story.", 4000)
    expect(page.locator(".answer").last).not_to_be_empty()
    assert server.get("/core_status")[1]["num_running"] == 1
    page.get_by_role("button", name="Stop").click()
    wait_for_answer(page)
    expect(page.locator(".stats").last).to_contain_text("stopped")
    wait_until(page, server, lambda: server.get("/core_status")[1]["num_running"] == 0)


def test_answer_that_a_reload_interrupts_is_kept_and_can_go_on(page: "Page", server: ServedModel) -> None:
    ask(page, "Tell a very long story.", 4000)
    answer = page.locator(".answer")
    expect(answer).not_to_be_empty()
    page.reload()
    expect(page.locator(".turn")).to_have_attribute("data-state", "done")
    expect(page.locator(".turn .error-text")).to_contain_text("left before the answer was complete")
    expect(page.locator(".stats")).to_contain_text("(interrupted)")
    wait_until(page, server, lambda: server.get("/core_status")[1]["num_running"] == 0)
    kept = answer.inner_text()
    assert kept

    page.locator("#settings [name=max_tokens]").evaluate("(field) => (field.value = '8')")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".stats")).to_contain_text("(limit)")
    assert answer.inner_text().startswith(kept)
    assert answer.inner_text() != kept
    expect(page.locator(".turn .error-text")).to_be_hidden()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".stats")).to_contain_text("8 tokens (limit)")
    expect(page.locator(".prompt")).to_have_count(1)


def test_error_of_the_server_is_shown_in_its_place_and_can_be_retried(open_page, server: ServedModel) -> None:
    page = open_page(server.url, expected_error="status of 400")
    wait_for_state(page, "Running")
    system_prompt = page.locator("#settings [name=system]")
    system_prompt.evaluate("(field) => (field.value = 'too long '.repeat(1000))")
    ask(page, "Hello", 3)
    wait_for_answer(page)
    expect(page.locator(".turn .error-text")).to_contain_text("max_model_len")
    system_prompt.evaluate("(field) => (field.value = 'Be brief.')")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".turn .stats")).to_contain_text("3 tokens")
    expect(page.locator(".turn .error-text")).to_be_hidden()


def test_text_of_the_model_never_becomes_markup(page: "Page") -> None:
    text = "A **bold** <img src=x onerror=alert(1)>\n\n```html\n<script>alert(2)</script>\n```\nand `code`"

    def reply(route: "Route") -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    page.route("**/v1/chat/completions", reply)
    ask(page, "<b>hello</b>", 16)
    wait_for_answer(page)
    answer = page.locator(".answer")
    expect(page.locator(".prompt")).to_have_text("<b>hello</b>")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("pre")).to_have_text("<script>alert(2)</script>")
    expect(answer.locator("p code")).to_have_text("code")
    assert answer.locator("img, script").count() == 0
    assert page.locator(".prompt b").count() == 0


def test_thoughts_and_calls_are_shown_and_the_next_message_is_the_result(page: "Page") -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"city": "Bern"}'}}
    deltas = [
        {"reasoning_content": "I must "},
        {"reasoning_content": "look."},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
    ]
    bodies = []

    def reply(route: "Route") -> None:
        bodies.append(route.request.post_data_json)
        events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", reply)
    page.locator("#settings [name=tools]").evaluate("(field) => (field.value = '[{}]')")
    ask(page, "How is the weather?", 16)
    wait_for_answer(page)
    expect(page.locator(".calls")).to_have_text('weather({"city": "Bern"})')
    expect(page.locator(".thought-text")).to_be_hidden()
    page.locator(".thought summary").click()
    expect(page.locator(".thought-text")).to_have_text("I must look.")
    ask(page, "Sunny.", 16)
    expect(page.locator(".turn[data-state=done]")).to_have_count(2)
    assert bodies[0]["tools"] == [{}]
    question, answer, result = bodies[1]["messages"]
    assert (question["role"], answer["tool_calls"][0]["id"]) == ("user", "call_1")
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}


def test_nothing_is_wider_than_a_phone(open_page, server: ServedModel) -> None:
    page = open_page(server.url, **PHONE)
    wait_for_state(page, "Running")
    assert content_width(page) <= PHONE["viewport"]["width"]
    page.get_by_role("button", name="Chat").click()
    expect(page.locator(".engine")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    ask(page, "wide" * 100, 8)
    wait_for_answer(page)
    assert content_width(page) <= PHONE["viewport"]["width"]


def test_page_is_dark_in_a_dark_system_until_the_reader_chooses(open_page, server: ServedModel) -> None:
    page = open_page(server.url, color_scheme="dark")

    def brightness() -> int:
        color = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return max(map(int, re.findall(r"\d+", color)))

    assert brightness() < 50
    page.get_by_role("button", name="Change between light and dark").click()
    assert brightness() > 200
    page.reload()
    assert brightness() > 200


@pytest.fixture
def slow_to_restart(tmp_path: Path) -> Iterator[ServedModel]:
    """A server whose cores are not forked, neither by the tests nor by a template, so that a restart takes its time."""
    with served(DEFAULT_MODEL, tmp_path, "--no-core-template", IMPORTS_ITS_MODULES="1") as process:
        process.wait_until_ready()
        yield process


def test_page_shows_the_death_of_the_core_while_its_answer_continues(
    slow_to_restart: ServedModel, open_page: OpenPage
) -> None:
    page = open_page(slow_to_restart.url)
    wait_for_state(page, "Running")
    before = slow_to_restart.get("/core_status")[1]["incarnation"]
    ask(page, "Count from one to one hundred.", 50)
    expect(page.locator(".answer").last).not_to_be_empty()
    os.kill(slow_to_restart.core_pid(), signal.SIGKILL)
    wait_for_state(page, "Restarting")
    expect(page.locator("#banner")).to_contain_text("SIGKILL")
    wait_for_state(page, "Running")
    expect(page.locator("#core-facts")).to_contain_text(f"Core {before + 1}")
    expect(page.locator("#restarts li")).to_have_count(1)
    expect(page.locator("#restarts li").first).to_contain_text(re.compile(r"back in [\d.]+ m?s · 1 stream recovered"))
    wait_for_answer(page)
    expect(page.locator(".restart-mark").last).to_have_text("The engine restarted; the answer continued.")
    expect(page.locator(".stats").last).to_contain_text("50 tokens")
    expect(page.locator("#banner")).to_be_hidden()


def test_page_waits_for_the_model_asks_for_the_api_key_and_keeps_it(open_page, replay_address, tmp_path) -> None:
    flags = ("--connect", replay_address, "--api-key", KEY)
    with served(DEFAULT_MODEL, tmp_path, *flags, core_flags=()) as server:
        page = open_page(server.url, expected_error="status of (401|503)|net::ERR")
        dialog = page.get_by_role("dialog", name="API key")
        for key in ("a-wrong-key", KEY):
            dialog.get_by_role("textbox").fill(key)
            dialog.get_by_role("button", name="Continue").click()
            if key != KEY:
                expect(page.locator("#key-error")).to_have_text("The server refused this key.")
        wait_for_state(page, "Running")
        ask(page, "Hello", 8)
        expect(page.locator(".stats")).to_contain_text("8 tokens")
        page.reload()
        wait_for_state(page, "Running")
        expect(dialog).to_be_hidden()
        server.process.kill()
        wait_for_state(page, "Offline")
        expect(page.locator("#banner")).to_contain_text("No connection.")
