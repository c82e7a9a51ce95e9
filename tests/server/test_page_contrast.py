"""The page at `/`, and the pages beside it, can be read: contrast and focus, in light and dark, wide and narrow."""

from typing import TYPE_CHECKING, Any

import pytest
from support.chromium import expect
from support.contrast import weak_contrasts, without_focus_ring
from support.image_models import file_of, picture
from support.page_stand_in import PageStandIn, ask
from support.server_process import ServedModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ANSWER = """# Title
Words, **bold**, `code`, ~~gone~~, [link](https://example.org) and ![image](https://example.org/a.png).

> quoted, with `code` and [link](https://example.org)

| name | count |
|---|--:|
| a | 1 |

```python
x = 1
```
"""
STATES = ["connecting", "running", "loading", "restarting", "paused", "asleep", "draining", "dead", "offline"]
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1400, 360)]


@pytest.fixture(scope="module", params=LOOKS, ids=lambda look: f"{look[0]}-{look[1]}")
def page(request: pytest.FixtureRequest, browser: "Browser") -> Any:
    """The page with an answer of every kind, in one scheme and width. The tests show more and more of it, in order."""
    scheme, width = request.param
    stand_in = PageStandIn(browser, color_scheme=scheme, viewport={"width": width, "height": 900})
    stand_in.images = {"max_images": 9, "max_file_bytes": 2**20, "max_pixels": 2**20, "max_body_bytes": 2**20}
    page = stand_in.open()
    show_chat(page)
    page.get_by_role("button", name="Settings").click()
    call = {"index": 0, "id": "1", "function": {"name": "weather", "arguments": "{}"}}
    stand_in.deltas = [{"reasoning_content": "Hm."}, {"content": ANSWER}, {"tool_calls": [call]}]
    stand_in.finish_reason = None
    ask(page, "Question")
    page.locator(".thought summary").click()
    image = {"name": "cat.png", "mimeType": "image/png", "buffer": file_of(picture(20, 20))}
    page.locator("#image-files").set_input_files(image)
    page.get_by_role("button", name="Remove cat.png").wait_for()
    yield page
    stand_in.context.close()


def show_chat(page: "Page") -> None:
    button = page.get_by_role("button", name="Chat", exact=True)
    if button.is_visible():
        button.click()


def test_focus_is_seen_everywhere(page: "Page") -> None:
    assert without_focus_ring(page) == []


def test_chat_can_be_read(page: "Page") -> None:
    page.evaluate(
        """() => {
          for (const id of ["chat-note", "image-note", "welcome"]) document.getElementById(id).hidden = false;
          for (const note of document.querySelectorAll(".chat-note")) note.textContent = "A note.";
          const mark = document.querySelector(".restart-mark");
          mark.hidden = false;
          mark.textContent = "The engine restarts.";
        }"""
    )
    assert page.locator(".turn .error-text").is_visible()
    assert weak_contrasts(page) == []


def test_readings_can_be_read_in_every_state(page: "Page") -> None:
    button = page.get_by_role("button", name="Engine", exact=True)
    if button.is_visible():
        button.click()
    expect(page.locator("#restarts li")).to_have_count(2)
    expect(page.locator("#cores tbody tr")).to_have_count(2)
    for state in STATES:
        page.evaluate(
            """(state) => {
              document.querySelector("#state").dataset.state = state;
              document.body.classList.toggle("is-stale", state !== "running");
              Object.assign(document.querySelector("#banner"), { hidden: false }).dataset.kind =
                state === "dead" ? "bad" : "warn";
            }""",
            state,
        )
        assert weak_contrasts(page) == [], state


def test_dialog_of_the_key_can_be_read(page: "Page") -> None:
    page.evaluate(
        """() => {
          document.querySelector("#key-dialog").showModal();
          document.querySelector("#key-error").textContent = "The server refused this key.";
        }"""
    )
    assert weak_contrasts(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_list_of_endpoints_can_be_read(browser: "Browser", server: ServedModel, scheme: str) -> None:
    with browser.new_context(color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(f"{server.url}/docs")
        assert weak_contrasts(page) == []
