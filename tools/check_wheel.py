"""Build the wheel, install it in an empty environment outside the repository, and serve from there.

    python tools/check_wheel.py                     # in a temporary folder
    python tools/check_wheel.py --wheel FILE        # a wheel that is built already

The server must answer a completion, the page at / with its files, and /metrics. The wheel must have the C++ kernels,
the output path in C and the recorded answers of the replay core. The exit code is 1 if anything is missing. The size of
the wheel and the time that its build took are printed.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-135m-instruct"
_PROBE = """
import importlib.util, vllm_mp
from vllm_mp.machine.cpu_info import KERNEL_BUILDS
from vllm_mp.replay_core.answers import Answers
print(vllm_mp.__file__)
builds = [spec for name in KERNEL_BUILDS if (spec := importlib.util.find_spec("vllm_mp.kernels.cpu._" + name))]
names = ("vllm_mp.client.outputs._output_path", "vllm_mp.core._signal_sender")
for spec in (builds[0] if builds else None, *map(importlib.util.find_spec, names)):
    print(spec and spec.origin)
print(Answers().tokens.shape)
"""


def main() -> int:
    """Run the check and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="wheel to check; by default it is built from this repository")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(args.wheel, Path(folder))
        except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
            print(f"tools/check_wheel.py: {error}", file=sys.stderr)
            return 1
    print("the wheel serves")
    return 0


def check(wheel: Path | None, folder: Path) -> None:
    """Install `wheel`, or a new one, in `folder`, and serve. Raises an exception that says what is wrong."""
    if wheel is None:
        print("building the wheel …", flush=True)
        begun = time.monotonic()
        _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        print(f"built in {time.monotonic() - begun:.0f} s")
        [wheel] = folder.glob("*.whl")
    print(f"the wheel has {wheel.stat().st_size / 1e6:.1f} MB")
    print(f"installing {wheel.name} in an empty environment …", flush=True)
    _run(sys.executable, "-m", "venv", folder / "venv")
    programs = folder / "venv/bin"
    _run(programs / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    printed = _run(programs / "python", "-c", _PROBE, folder=folder)
    print(printed, end="", flush=True)
    outside = [line for line in printed.splitlines()[:3] if not line.startswith(str(folder.resolve()))]
    if outside:
        raise RuntimeError(f"not installed by the wheel: {outside}; add it to package-data or ext_modules")
    print("serving …", flush=True)
    with _server(programs / "vllm-mp", folder) as url:
        body = json.dumps({"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0})
        completion = json.loads(_get(f"{url}/v1/completions", body.encode()))
        print(completion["choices"][0]["text"])
        if completion["usage"]["completion_tokens"] != 4:
            raise RuntimeError(f"the completion has not 4 tokens: {completion}")
        if b"vllm:" not in _get(f"{url}/metrics"):
            raise RuntimeError("/metrics has no metric of the engine")
        page = _get(f"{url}/").decode()
        files = re.findall(r'(?:src|href)="([^":#]+\.(?:js|css|svg))"', page)
        if not files:
            raise RuntimeError("the page at / names no static file")
        for name in files:
            _get(f"{url}/{name.lstrip('/')}")


@contextlib.contextmanager
def _server(program: Path, folder: Path) -> Iterator[str]:
    """Serve on a free port until the block ends; yield the URL once the server is ready."""
    log = folder / "server.log"
    with log.open("w") as errors:
        command = [program, "serve", MODEL, "--port", "0"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder, env=_environment()
        )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.match(r"ready: (http://\S+) ", line):
                yield found[1]
                break
        else:
            raise RuntimeError(f"the server ended with {server.wait()} before it was ready:\n{log.read_text()[-2000:]}")
    finally:
        server.terminate()
        server.wait(60)
    if server.returncode:
        raise RuntimeError(f"the server ended with {server.returncode} after SIGTERM:\n{log.read_text()[-2000:]}")


def _get(url: str, body: bytes | None = None) -> bytes:
    """Return the body of the response to a GET, or to a POST of JSON. Raises OSError for a status of 400 or more."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        content: bytes = response.read()
        return content


def _run(*command: str | Path, folder: Path | None = None) -> str:
    """Return what a command prints. Its errors go to standard error."""
    arguments = [str(part) for part in command]
    return subprocess.run(
        arguments, stdout=subprocess.PIPE, text=True, check=True, cwd=folder, env=_environment()
    ).stdout


def _environment() -> dict[str, str]:
    """Return the environment without what would let Python find the repository."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
