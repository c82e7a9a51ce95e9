"""A real `vllm-mp serve` process, and what tests ask of it."""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_mp.testing.engines import STANDALONE_CORE

START_S = 120.0
"""Time that a server gets to start on a busy machine."""


class ServedModel:
    """A server process; `url` is known as soon as it listens, which is before the model has loaded."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process = process
        self.log = log
        """What the server wrote to standard error."""
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), f"{line!r}; {log.read_text()}"
        self.url = line.removeprefix("listening on ").strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def core_pid(self) -> int:
        """Return the process id of the core that serves now."""
        pid = self.get("/core_status")[1]["pid"]
        assert isinstance(pid, int)
        return pid

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of a GET."""
        return self.send(urllib.request.Request(self.url + path, headers=headers))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Return status and JSON of a POST of `body` as JSON."""
        headers = {"Content-Type": "application/json"} | headers
        return self.send(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def send(self, request: urllib.request.Request) -> tuple[int, Any]:
        """Return status and JSON of the response to `request`."""
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_until_ready(self) -> None:
        """Return once requests are served; raise AssertionError if the process ends or takes too long."""
        self.wait_for(lambda: self.get("/ready")[0] == 200)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` is true; raise AssertionError if the process ends or takes too long."""
        deadline = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, (
                f"the server ended with {self.process.returncode}; {self.log.read_text()}"
            )
            assert time.monotonic() < deadline, f"the server has not become so in time; {self.log.read_text()}"
            time.sleep(0.02)


@contextlib.contextmanager
def served(
    model: str | Path, folder: Path, *flags: str, core_flags: tuple[str, ...] = STANDALONE_CORE, **env: str
) -> Iterator[ServedModel]:
    """Run `vllm-mp serve` on a free port, with files in `folder`. Kill it at the end of the block if it still runs."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "vllm_mp.cli", "serve", str(model), "--port", "0", *core_flags, *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | env)
    try:
        yield ServedModel(process, log)
    finally:
        process.kill()
        process.communicate()
