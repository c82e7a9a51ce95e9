"""The page at `/` in Chromium without a server behind it: its real files, and answers that a test writes."""

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.testclient import TestClient

from vllm_mp.server.http.live_feed import Percentiles, Point, ShownCore, ShownRestart, Snapshot
from vllm_mp.server.watching import static_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

URL = "http://page.test/"
_TIME = 1_700_000_000.0
_PERCENTILES = Percentiles(0.01, 0.02, 0.03)
_POINT: dict[str, Any] = {
    "time": _TIME,
    "num_running": 2,
    "num_waiting": 1,
    "kv_cache_usage": 0.25,
    "output_tokens_per_s": 120.0,
    "time_to_first_token": _PERCENTILES,
}
_SNAPSHOT = Snapshot(
    **_POINT,
    state="running",
    cause=None,
    incarnation=2,
    uptime_s=60.0,
    num_live=2,
    prompt_tokens_per_s=10.0,
    inter_token_latency=_PERCENTILES,
    accepted_drafts=0.75,
    restarts=[ShownRestart(_TIME - 60, "killed by SIGKILL", 1.5, 2), ShownRestart(_TIME - 30, "it hung", None, None)],
    cores=[ShownCore(0, "running", 2, 1, 0.25, ""), ShownCore(1, "dead", 0, 0, 0.0, "other")],
)


class PageStandIn:
    """Serves the page to the tabs of one browser profile, whose storage they share.

    Each question is answered with `deltas`, one event each; `bodies` are the requests that the page sent. `problems`
    has the errors that a page logged, and the requests that it sent elsewhere.
    """

    def __init__(self, browser: "Browser", **options: Any) -> None:
        self.deltas: list[dict[str, Any]] = [{"content": "Hello."}]
        self.finish_reason: str | None = "stop"
        self.api_key: str | None = None
        self.images: dict[str, int] | None = None
        """The limits of images that the server tells; None: the model takes none."""
        self.bodies: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.context: BrowserContext = browser.new_context(**options)
        self.context.set_default_timeout(20_000)
        self._files = TestClient(Starlette(routes=static_page.ROUTES), base_url=URL)
        self.context.route(re.compile(".*"), self._answer)

    def open(self) -> "Page":
        """Open the page in a new tab."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        page.goto(URL)
        return page

    def _answer(self, route: "Route") -> None:
        request = route.request
        path = request.url.removeprefix(URL)
        if path == request.url:
            self.problems.append(request.url)
            route.abort()
        elif self.api_key is not None and path == "v1/chat/completions" and not self._has_key(route):
            error = {"error": {"message": "this server needs a key", "code": "invalid_api_key"}}
            route.fulfill(status=401, json=error)
        elif path == "v1/models":
            route.fulfill(json={"data": [{"id": "a-model"}]})
        elif path == "live":
            hello = {
                "model": "a-model",
                "max_model_len": 512,
                "version": "1",
                "history": [msgspec.to_builtins(Point(**_POINT))],
                "images": self.images,
            }
            snapshot = msgspec.to_builtins(_SNAPSHOT)
            body = f"event: hello\ndata: {json.dumps(hello)}\n\ndata: {json.dumps(snapshot)}\n\n"
            route.fulfill(content_type="text/event-stream", body=body)
        elif path == "v1/chat/completions":
            self.bodies.append(request.post_data_json)
            events = [{"choices": [{"index": 0, "delta": delta}]} for delta in self.deltas]
            if self.finish_reason is not None:
                events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}]})
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
            route.fulfill(content_type="text/event-stream", body=body + "data: [DONE]\n\n")
        else:
            response = self._files.get(f"/{path}")
            headers = {name: value for name, value in response.headers.items() if name != "etag"}
            route.fulfill(status=response.status_code, headers=headers, body=response.content)

    def _has_key(self, route: "Route") -> bool:
        return route.request.headers.get("authorization") == f"Bearer {self.api_key}"


def ask(page: "Page", message: str) -> None:
    """Send `message` in the chat and wait for the end of the answer."""
    number = page.locator(".turn").count()
    page.get_by_label("Message", exact=True).fill(message)
    page.keyboard.press("Enter")
    page.locator(".turn[data-state=done]").nth(number).wait_for()
