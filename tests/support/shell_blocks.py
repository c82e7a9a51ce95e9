"""How the commands in shell blocks of the pages run: with addresses, folders and small models of the test's own."""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support.code_blocks import ROOT, CodeBlock
from support.server_process import ServedModel
from vllm_mp import cli
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.model_store.cache import CACHE_VARIABLE, cache_root
from vllm_mp.server.http.options import ServerOptions

NOT_RUN = {
    "pip install": "installs from a package registry",
    "tools/quickstart": "installs from a package registry; tests/engine/test_cli.py runs its `vllm-mp generate`",
    "python tools/build_client_wheel.py": "takes half a minute; tests/engine/test_wheel.py installs what it builds",
    "tools/setup-venv": "installs from a package registry",
    "tools/test": "runs this test",
    ". .venv/bin/activate": "changes the shell of a developer",
    "tools/faults": "takes minutes; tests/faults/test_scenarios.py runs its scenarios",
    "tools/mutations": "takes hours; tests/unit/tools/test_mutations.py runs it on a small repository",
    "python tools/gpu_check.py": "takes minutes and a GPU; tests/unit/tools/test_gpu_check.py runs its parts",
    "python tools/gpu/pack.py": "fetches from a package registry",
    "python tools/gpu/gpu_page.py": "needs results of a GPU; tests/unit/tools/test_gpu_check.py makes a page",
    "vllm-mp bench": "measures for minutes; tests/engine/test_cli.py and tests/unit run short benchmarks",
    "python tools/quality/structured_output_suite.py": "needs a suite of schemas; its test runs it",
    "python tools/speed/kernels/block_speed.py": "takes minutes",
    "python tools/speculation/speculation_speed.py": "takes minutes",
    "python tools/quality/perplexity.py": "takes minutes",
    "python tools/speed/constrained_speed.py": "takes minutes",
    "python tools/quality/structured_answers.py": "needs a suite of schemas, and takes minutes",
    "python tools/quality/clients.py": "installs from package registries",
    "vllm-mp serve MODEL --data-parallel-size 4 --data-parallel-backend ray": "needs Ray, which is an extra; "
    "tests/engine/test_ray.py starts such engines",
    "lm_eval": "another program, which is not installed",
    "python -m vllm_mp.as_vllm": "needs a program; tests/unit/vllm_names/test_as_vllm.py runs two",
    "vllm bench": "another program, which is not installed",
}
"""The commands of the pages that no test runs, by their beginning, and why."""
_FILES = {"keys.txt": "a-key-of-a-test\n", "app.py": "from vllm import SamplingParams\n"}
"""Files that commands of the pages take for granted, by their names."""
_MODEL = "smollm2-135m-instruct"
_OWN_MODEL = "/models/mine"
_SERVER = "http://127.0.0.1:8000"
_SMALL = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**27), "--num-threads", "1")
_TIMEOUT_S = 120.0


def commands(block: CodeBlock) -> list[str]:
    """Return the commands of a shell block, one line each."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def not_run(command: str) -> str | None:
    """Return the key in `NOT_RUN` with which `command` begins, or None if a test runs it."""
    return next((begin for begin in NOT_RUN if f"{command} ".startswith(f"{begin} ")), None)


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def check_arguments(words: list[str]) -> None:
    """Raise ValueError or SystemExit unless `words`, after `vllm-mp`, are arguments that the command accepts."""
    args = cli.parser().parse_args(words)
    if words[0] == "serve":
        ServerOptions.from_cli_args(args)
    if hasattr(args, "model"):
        AsyncEngineArgs.from_cli_args(args)


class Shell:
    """Runs the commands of one page in `folder`. `close` ends what they have left running."""

    def __init__(self, folder: Path, small_model: Path, server: Callable[[], ServedModel]) -> None:
        """`server` returns a server of `small_model` that is ready, and starts it if no page has used it before."""
        self._folder, self._small_model, self._server = folder, small_model, server
        self._processes = contextlib.ExitStack()
        self._tcp = f"tcp://127.0.0.1:{_free_port()}"
        for name, text in _FILES.items():
            (folder / name).write_text(text)
        programs = folder / "bin"
        programs.mkdir()
        for name, line in (
            ("vllm-mp", f'exec {shlex.quote(sys.executable)} -m vllm_mp.cli "$@"'),
            ("python", f'exec {shlex.quote(sys.executable)} "$@"'),
            ("curl", f'exec {shutil.which("curl")} --fail-with-body --max-time {_TIMEOUT_S:g} "$@"'),
        ):
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o755)
        path = os.pathsep.join((str(programs), os.environ["PATH"]))
        # The cache of the user, but for the names that commands give to models.
        (folder / "cache").mkdir()
        (folder / "cache" / "models").symlink_to(cache_root() / "models")
        cache = {CACHE_VARIABLE: str(folder / "cache")}
        self._environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | cache

    def close(self) -> None:
        self._processes.close()

    def replaced(self, text: str) -> str:
        """Return `text` with the addresses, tools and programs of this test in place of the page's."""
        text = text.replace("ipc:///run/user/1000/", f"ipc://{self._folder}/").replace("tcp://HOST:PORT", self._tcp)
        text = text.replace(".venv/bin/vllm-mp", "vllm-mp").replace(_OWN_MODEL, shlex.quote(str(self._small_model)))
        for folder in ("tools", "tests"):
            text = text.replace(f" {folder}/", f" {shlex.quote(str(ROOT))}/{folder}/")
        return text.replace(_SERVER, self._server().url) if _SERVER in text else text

    def run(self, block: CodeBlock) -> None:
        """Run the commands of a shell block, except those in `NOT_RUN`. Servers and engines run until `close`.

        Raises AssertionError with the output of a command that fails.
        """
        for command in commands(block):
            if not_run(command) is not None:
                continue
            restarts = self._restarts() if command.startswith("kill") else None
            self._run_command(command)
            if restarts is not None:
                self._server().wait_for(lambda before=restarts: self._restarts() > before)
                self._server().wait_until_ready()

    def _restarts(self) -> int:
        restarts: int = self._server().get("/core_status")[1]["restarts"]
        return restarts

    def _run_command(self, command: str) -> None:
        command = self.replaced(command)
        words = words_of(command)
        if words[:2] in (["vllm-mp", "serve"], ["vllm-mp", "engine"]):
            self._start(words[1:])
            return
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder,
            env=self._environment,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        # A stream that fails has begun with status 200.
        assert '"error":' not in done.stdout, f"{command}\n{done.stdout}"

    def _start(self, words: list[str]) -> None:
        """Start a server or an engine of a small model, and return when it listens.

        A server without options of its own is the one that all pages share.
        """
        command, *options = (word for word in words if word != _MODEL)
        if command == "serve":
            if options in ([], ["--port", "8000"]):
                self._server()
                return
            options = [*options, "--port", "0"]
        if "--connect" not in options:
            options += ["--model", str(self._small_model), *_SMALL]
        log = self._folder / f"{command}.log"
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_mp.cli", command, *options],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._processes.enter_context(_ended(process))
        if command == "serve":
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"{words}: {line!r}; {log.read_text()}"
        else:
            address = options[options.index("--listen") + 1]
            deadline = time.monotonic() + _TIMEOUT_S
            while not _is_served(address):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)


@contextlib.contextmanager
def _ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def _is_served(address: str) -> bool:
    """Return whether a process listens at `address`."""
    if address.startswith("ipc://"):
        return Path(address.removeprefix("ipc://")).exists()
    host, port = address.removeprefix("tcp://").split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
