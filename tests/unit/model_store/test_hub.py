"""Hub ids, tested against a small hub server: downloads, the cache, and each reason for a missing model."""

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vllm_mp.model_store import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"\0" * 64,
    "consolidated.safetensors": b"\0" * 65,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickled",
    "training_args.bin": b"pickled",
    "model.pt": b"pickled",
    "onnx/model.onnx": b"repeated",
}


class Hub(BaseHTTPRequestHandler):
    """Serves org/model, org/gated, org/bin, org/pt and org/consolidated, and answers 404 for any other model."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            return self.answer(self.info("org/model"))
        for model in ("org/bin", "org/pt", "org/consolidated"):
            if path in (f"/api/models/{model}", f"/api/models/{model}/revision/main"):
                return self.answer(self.info(model))
        if path.startswith("/api/models/org/gated"):
            return self.refuse(403, "GatedRepo")
        if path.startswith("/api/models/org/model/revision/"):
            return self.refuse(404, "RevisionNotFound")
        if path.startswith("/api/models/org/model/tree/"):
            return self.answer(self.tree([name for name in FILES if name != "model.pt"]))
        if path.startswith("/api/models/org/bin/tree/"):
            return self.answer(self.tree(["config.json", "tokenizer.json", "pytorch_model.bin", "training_args.bin"]))
        if path.startswith("/api/models/org/pt/tree/"):
            return self.answer(self.tree(["config.json", "model.pt"]))
        if path.startswith("/api/models/org/consolidated/tree/"):
            return self.answer(self.tree(["config.json", "tokenizer.json", "consolidated.safetensors"]))
        for prefix in (f"/org/{model}/resolve/{COMMIT}/" for model in ("model", "bin", "pt", "consolidated")):
            if path.startswith(prefix) and path.removeprefix(prefix) in FILES:
                return self.answer(FILES[path.removeprefix(prefix)])
        return self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def info(self, model: str) -> bytes:
        return json.dumps({"_id": "1", "id": model, "sha": COMMIT, "siblings": [], "private": False}).encode()

    def tree(self, names: list[str]) -> bytes:
        entries = [{"type": "file", "path": n, "size": len(FILES[n]), "oid": n.ljust(40, "0")} for n in names]
        return json.dumps(entries).encode()

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(body)}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def resolve(model: str, hub: str, home: Path, stderr: int = subprocess.DEVNULL, **options: str) -> str:
    """Resolve `model` in a process whose only hub is `hub`; return the folder or the error message."""
    script = (
        "import json, sys\n"
        "from vllm_mp.model_store import resolve_model\n"
        "try: print(resolve_model(sys.argv[1], **json.loads(sys.argv[2])))\n"
        "except ValueError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub, "HF_HOME": str(home), "NO_PROXY": "*"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-c", script, model, json.dumps(options)]
    pipe = subprocess.PIPE
    done = subprocess.run(command, env=environment, stdout=pipe, stderr=stderr, text=True, timeout=60, check=True)
    return done.stdout.strip()


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_only_needed_files_are_downloaded_and_later_loads_do_not_ask_the_hub(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/model", hub, tmp_path)
    assert names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert resolve("org/model", "http://127.0.0.1:1", tmp_path) == folder
    assert resolve("org/model", "http://127.0.0.1:1", tmp_path, revision=COMMIT) == folder


@pytest.mark.extended
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_bars_of_a_download_fit_into_the_terminal(hub: str, tmp_path: Path, columns: int) -> None:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, columns))
    folder = resolve("org/model", hub, tmp_path, stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # nothing is left
        while data := os.read(master, 65_536):
            shown += data
    os.close(master)
    assert "model.safetensors" in names(folder)
    lines = [line.rstrip() for line in re.split(r"[\r\n]|\x1b\[A", shown.decode())]
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line.count("[") != line.count("]")] == []  # cut off
    assert any(re.match(r"Fetching 3 files: 100%.* 3/3 \[\d\d:\d\d<\d\d:\d\d", line) for line in lines)


@pytest.mark.extended
def test_pickled_weights_are_downloaded_only_where_there_are_no_safetensors(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/bin", hub, tmp_path)
    assert names(folder) == ["config.json", "pytorch_model.bin", "tokenizer.json"]
    assert resolve("org/bin", "http://127.0.0.1:1", tmp_path) == folder
    assert names(resolve("org/bin", hub, tmp_path / "dummy", load_format="dummy")) == ["config.json", "tokenizer.json"]


@pytest.mark.extended
def test_consolidated_weights_are_downloaded_where_there_are_no_other_safetensors(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/consolidated", hub, tmp_path)
    assert names(folder) == ["config.json", "consolidated.safetensors", "tokenizer.json"]


@pytest.mark.extended
def test_dummy_load_downloads_no_weights_and_a_later_load_adds_them(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/model", hub, tmp_path, load_format="dummy")
    assert names(folder) == ["config.json", "tokenizer.json"]
    assert resolve("org/model", hub, tmp_path) == folder
    assert "model.safetensors" in names(folder)


@pytest.mark.extended
def test_download_dir_replaces_the_hubs_cache(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/model", hub, tmp_path / "home", download_dir=str(tmp_path / "mine"))
    assert Path(folder).is_relative_to(tmp_path / "mine")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("org/nothing", {}, "neither a local folder nor on the hub"),
        ("org/gated", {}, "is gated: ask for access"),
        ("org/model", {"revision": "v9"}, "has no revision 'v9'"),
        ("org/pt", {}, "holds no .safetensors file"),
    ],
)
def test_each_reason_for_a_missing_model_has_its_own_message(
    hub: str, tmp_path: Path, model: str, options: dict[str, str], message: str
) -> None:
    answer = resolve(model, hub, tmp_path, **options)
    assert message in answer
    assert model in answer


@pytest.mark.extended
def test_unreachable_hub_is_reported_within_fifteen_seconds_with_remedies(tmp_path: Path) -> None:
    start = time.monotonic()
    answer = resolve("org/model", "http://127.0.0.1:1", tmp_path)
    assert time.monotonic() - start < 15
    for part in ("'org/model'", "http://127.0.0.1:1", "the hub's cache lacks it", ".gguf", "smollm2-135m-instruct"):
        assert part in answer


@pytest.mark.extended
def test_hub_that_does_not_answer_is_reported_within_fifteen_seconds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        answer = resolve("org/model", f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path)
        assert time.monotonic() - start < 15
    assert "could not deliver it" in answer


def test_offline_hub_id_is_refused_at_once_with_remedies() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set") as error:
        resolve_model("some-org/some-model")
    assert time.monotonic() - start < 5
    for part in ("some-org/some-model", "local model folder", ".gguf", "smollm2-135m-instruct"):
        assert part in str(error.value)
