"""A real `vllm-mp serve` process, and what tests ask of it."""

import asyncio
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
            with urllib.request.urlopen(request, timeout=START_S) as response:
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


class StreamedAnswers:
    """Completions that are streamed over HTTP, greedy and of a fixed number of tokens, all at the same time.

    All connections are open before the first request is sent, so that the streams run side by side.
    """

    def __init__(self, server: ServedModel, prompts: list[str], max_tokens: int) -> None:
        self._port = server.port
        self._prompts = prompts
        self._max_tokens = max_tokens
        self.texts = [""] * len(prompts)
        """What has arrived so far."""
        self.ends: list[str | None] = [None] * len(prompts)
        """The finish reason of each, or the error that ended it."""
        self.all_run = asyncio.Event()
        """Set once each has text."""
        self.is_halfway = asyncio.Event()
        """Set once one of them has half of its tokens."""

    async def run(self) -> list[str]:
        """Return the texts when all have ended."""
        connections = [await asyncio.open_connection("127.0.0.1", self._port) for _ in self._prompts]
        for prompt, (_, writer) in zip(self._prompts, connections, strict=True):
            writer.write(self._request(prompt))
        async with asyncio.TaskGroup() as group:
            for index, (reader, writer) in enumerate(connections):
                group.create_task(self._read(index, reader, writer))
        return self.texts

    def _request(self, prompt: str) -> bytes:
        fields = {"max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({"prompt": prompt} | fields).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close"
        return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body

    async def _read(self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the events of one response. The server sends each line of an event within one chunk."""
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read()
        num_events = 0
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                self.ends[index] = event["error"]["message"]
                continue
            for choice in event["choices"]:
                self.texts[index] += choice["text"]
                self.ends[index] = choice["finish_reason"] or self.ends[index]
            num_events += 1
            if all(self.texts):
                self.all_run.set()
            if num_events > self._max_tokens / 2:
                self.is_halfway.set()
        writer.close()
