"""A campaign that sends generated schemas through a server, whose first core must be alive at the end."""

import concurrent.futures
import contextlib
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Final

import psutil

from vllm_mp.testing.engines import free_tcp_address
from vllm_mp.testing.fuzzing.random_schemas import random_schema_text
from vllm_mp.testing.fuzzing.report import CampaignReport

_NUM_CONNECTIONS: Final = 8
_START_S: Final = 180.0
_ANSWER_S: Final = 300.0
_MAX_TOKENS: Final = 8
_REFUSALS: Final = {(400, "invalid_constraint"), (400, None), (429, "too_many_constraints"), (429, "too_many_requests")}
"""(status, code) with which a schema may be refused."""


@contextlib.contextmanager
def server_under_attack(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Run `vllm-mp serve` with its defaults and `flags`; yield its URL and its process id. End it afterwards."""
    port = free_tcp_address().rpartition(":")[2]
    command = [sys.executable, "-m", "vllm_mp.cli", "serve", model, "--port", port, *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + _START_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def attack_server(url: str, pid: int, num_schemas: int, seed: int, say: Callable[[str], None]) -> CampaignReport:
    """Send `num_schemas` schemas to the server at `url`, and a plain request now and then; return what happened."""
    report, began = CampaignReport(), time.monotonic()
    core = _core_of(pid)

    def attempt(number: int) -> None:
        text = random_schema_text(seed + number)
        status, code = _ask(url, json.loads(text))
        report.sent["schema"] += 1
        report.answers[f"{status} {code or ''}".strip()] += 1
        if status != 200 and (status, code) not in _REFUSALS:
            report.breaches.append(f"the schema {text} was answered with {status} {code}")
        if number % 50 == 0:
            calm, code = _ask(url, None)
            report.calm_answers += calm == 200
            if calm != 200:
                report.breaches.append(f"a plain request was answered with {calm} {code}")
            say(f"{number} schemas, {time.monotonic() - began:.0f} s")

    with concurrent.futures.ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        list(pool.map(attempt, range(num_schemas)))
    if (now := _core_of(pid)) != core:
        report.breaches.append(f"the first core, process {core}, is not alive at the end: {now}")
    report.seconds = time.monotonic() - began
    return report


def _ask(url: str, schema: Any) -> tuple[int, str | None]:
    """Return the status and the error's code of a short completion; `schema` None: without a constraint."""
    body: dict[str, Any] = {"prompt": "As JSON:", "max_tokens": _MAX_TOKENS, "temperature": 1.0}
    if schema is not None:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        body["response_format"] = form
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
            answer.read()
            return answer.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["code"]
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)


def _core_of(pid: int) -> int | None:
    """Return the process id of the core of a server."""
    children = psutil.Process(pid).children() if psutil.pid_exists(pid) else []
    return next((child.pid for child in children if "vllm_mp.core" in child.cmdline()), None)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
        return bool(answer.status == 200)
    return False
