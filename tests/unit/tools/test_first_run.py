"""The programs of a first run from a clone: setup.py's choice of builds, and those of `TOOLS`."""

import functools
import http.server
import os
import platform
import pty
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).parents[3]

PYTHON_STUB = """#!/bin/bash
case "$*" in
    "- "*) exec "{python}" "$@" ;;
    *"install"*" -r "*)
        echo "Downloading torch-2.6.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.manylinux_2_28_x86_64.whl (178.7 MB)"
        {wait} ;;
    *"install"*" -e "* | *model_store.fetch) {wait} ;;
esac
"""


TOOLS = [f"tools/{name}" for name in ("setup-venv", "install-cpu-torch", "quickstart")]
ALL_BUILDS = {"portable", "avx2", "avx512_vnni", "avx512", "amx"}


def set_up_with(
    monkeypatch: pytest.MonkeyPatch, choice: str, runnable: list[str], **environment: str
) -> tuple[dict[str, Any], list[setuptools.Extension]]:
    """Return the names in setup.py, and the extensions that it compiles for VLLM_MP_BUILDS=`choice`.

    The processor runs the builds `runnable`, the fastest first.
    """
    found: list[setuptools.Extension] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: found.extend(arguments["ext_modules"]))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(runpy, "run_path", lambda path: {"runnable_builds": lambda: runnable})
    for name, value in {"VLLM_MP_BUILDS": choice, **environment}.items():
        monkeypatch.setenv(name, value)
    return run_path("setup.py"), found


def kernel_builds(monkeypatch: pytest.MonkeyPatch, choice: str, runnable: list[str], **environment: str) -> set[str]:
    """Return the names of the builds that setup.py compiles."""
    names, extensions = set_up_with(monkeypatch, choice, runnable, **environment)
    return {name for extension in extensions if (name := names["build_of"](extension))}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the files that tools/setup-venv reads, whose path has a space."""
    folder = tmp_path / "a b"
    for name in ("pyproject.toml", "setup.py", "constraints.txt", *TOOLS):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for name in ("kernels/cpu", "client/outputs", "core"):
        shutil.copytree(ROOT / name / "csrc", folder / name / "csrc")
    return folder


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def quickstart(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([clone / "tools/quickstart", *arguments], capture_output=True, text=True)


def test_a_native_build_is_the_fastest_that_the_processor_runs_and_the_compiler_knows(monkeypatch):
    accepts_all, accepts_none = "true", "false"
    builds = ["amx", "avx512", "avx512_vnni", "avx2", "portable"]
    assert kernel_builds(monkeypatch, "native", builds, CXX=accepts_all) == {"amx"}
    assert kernel_builds(monkeypatch, "native", builds[2:], CXX=accepts_all) == {"avx512_vnni"}
    assert kernel_builds(monkeypatch, "native", builds[3:], CXX=accepts_all) == {"avx2"}
    assert kernel_builds(monkeypatch, "native", builds, CXX=accepts_none) == {"portable"}


def test_tests_run_the_other_builds_of_the_processor_and_those_with_tiles_that_are_not_real(monkeypatch):
    builds = ["amx", "avx512", "avx512_vnni", "avx2", "portable"]
    others = {"avx512_vnni", "avx2", "portable", "amx_model"}
    assert kernel_builds(monkeypatch, "tests", builds, CXX="true") == {"avx512", *others}
    assert kernel_builds(monkeypatch, "tests", builds[1:], CXX="true") == {"amx", *others}
    assert kernel_builds(monkeypatch, "tests", builds[2:], CXX="true") == {"avx2", "portable", "amx_model"}


def test_a_wheel_has_all_builds_whatever_processor_compiles_it(monkeypatch):
    assert kernel_builds(monkeypatch, "", ["portable"]) == ALL_BUILDS


def test_builds_are_chosen_by_name_and_an_unknown_name_is_refused(monkeypatch):
    assert kernel_builds(monkeypatch, "avx2,portable", ["portable"]) == {"avx2", "portable"}
    assert kernel_builds(monkeypatch, "all,amx_model", ["portable"]) == {*ALL_BUILDS, "amx_model"}
    with pytest.raises(SystemExit) as refused:
        kernel_builds(monkeypatch, "avx2,sse", ["portable"])
    assert str(refused.value) == (
        "VLLM_MP_BUILDS='avx2,sse': unknown build 'sse'; "
        "give some of native, all, tests, portable, avx2, avx512_vnni, avx512, amx, amx_model"
    )


def test_quickstart_passes_the_question_on_even_if_it_looks_like_an_option(clone):
    program(clone / "tools/setup-venv", "#!/bin/bash\n")
    program(clone / ".venv/bin/vllm-mp", "#!/bin/bash\nprintf '%s|' \"$@\"\n")
    assert quickstart(clone, "--why so").stdout == "generate|--chat|--|--why so|"
    answer = quickstart(clone)
    assert answer.stdout == "generate|--chat|--|Why is the sky blue?|"
    assert "asking: Why is the sky blue?" in answer.stderr


def test_quickstart_refuses_several_questions_and_stops_when_the_installation_fails(clone):
    program(clone / "tools/setup-venv", "#!/bin/bash\necho 'setup-venv: no network' >&2\nexit 1\n")
    program(clone / ".venv/bin/vllm-mp", "#!/bin/bash\necho started\n")
    for arguments, message in ((("why", "so"), 'usage: tools/quickstart ["question"]'), (("why",), "no network")):
        result = quickstart(clone, *arguments)
        assert result.returncode == 1
        assert message in result.stderr
        assert not result.stdout


def test_setup_venv_says_on_one_line_of_80_columns_what_it_does(clone, tmp_path):
    done = tmp_path / "done"
    wait = f'for ((i = 0; i < 200; i++)); do [[ ! -e "{done}" ]] || exit 0; sleep 0.05; done'
    program(clone / ".venv/bin/python", PYTHON_STUB.format(python=sys.executable, wait=wait))
    terminal, other_end = pty.openpty()
    command = [clone / "tools/setup-venv", "--with-model"]
    with subprocess.Popen(command, stderr=other_end, env={**os.environ, "TERM": "dumb", "COLUMNS": "80"}) as process:
        os.close(other_end)
        shown = b""
        try:
            while b"\r" not in shown.partition(b"torch")[2]:
                shown += os.read(terminal, 4096)
        finally:
            done.touch()
            assert process.wait(timeout=30) == 0
            os.close(terminal)
    line = next(line for line in shown.decode().split("\r\033[K") if "torch" in line)
    assert line.endswith("s · downloading torch (178.7 MB) · compiling C++ · fetching the model")
    assert len(line) < 80
    assert (clone / ".venv/.installed").exists()


@pytest.mark.parametrize("choice", ["native", "avx2,portable"])
def test_compilation_says_what_it_compiles_and_how_to_choose(monkeypatch, capsys, choice):
    names, extensions = set_up_with(monkeypatch, choice, ["avx2", "portable"], CXX="true")
    monkeypatch.setattr(names["build_ext"], "build_extension", lambda *_: None)
    # Without the constructor: other tests may have loaded the distutils of Python beside those of setuptools.
    command = object.__new__(names["ParallelBuild"])
    command.extensions, command.parallel, command.force = extensions, 2, True
    command.slots, command.started = threading.Semaphore(2), time.monotonic()
    command.compiler, command.build_temp = types.SimpleNamespace(compile=None), ""
    build_each = lambda self: [self.build_extension(extension) for extension in self.extensions]  # noqa: E731
    monkeypatch.setattr(names["build_ext"], "build_extensions", build_each)
    command.build_extensions()
    announced, *compiled = capsys.readouterr().out.splitlines()
    assert "avx2 (AVX2)" in announced
    assert re.search(r"about \d+0 s on 2 processors", announced)
    assert ("VLLM_MP_BUILDS=native compiles only avx2" in announced) == (choice != "native")
    builds = {"native": ["avx2"], "avx2,portable": ["avx2", "portable"]}[choice]
    assert sorted(re.findall(r"vllm-mp: (\w+) is compiled, after \d+ s", "\n".join(compiled))) == builds


@pytest.fixture
def set_up(clone, tmp_path):
    """A function that runs tools/setup-venv and returns what it did: "packages", and the builds that it compiled."""
    calls = tmp_path / "calls"
    log_packages = f'[[ "$*" != *" -r "* ]] || echo packages >>"{calls}"'
    log_builds = f'[[ "$*" != *" -e "* ]] || echo "$VLLM_MP_BUILDS" >>"{calls}"'
    stub = f'#!/bin/bash\n{log_packages}\n{log_builds}\n[[ $1 != - ]] || exec "{sys.executable}" "$@"\n'
    program(clone / ".venv/bin/python", stub)

    def run(*extra: str) -> list[str]:
        calls.write_text("")
        subprocess.run([clone / "tools/setup-venv", *extra], check=True, stderr=subprocess.DEVNULL)
        return sorted(calls.read_text().splitlines())

    return run


@pytest.mark.extended
def test_setup_venv_compiles_only_what_is_not_compiled_from_these_sources(clone, set_up):
    assert set_up() == ["native", "packages"]
    assert set_up("docs") == ["packages"]
    assert set_up("test-all") == ["packages", "tests"]
    sources = clone / "core/csrc/signal_sender.c"
    original = sources.read_text()
    sources.write_text(original + "\n")
    assert set_up("test") == ["native"]
    assert [set_up(), set_up("docs"), set_up("test")] == [[], [], []]
    sources.write_text(original)
    assert set_up("test-all") == ["native,tests"]
    assert [set_up("test"), set_up("test-all")] == [[], []]


def test_setup_venv_installs_no_packages_that_another_extra_brought(clone, set_up):
    set_up("test-all")
    assert [set_up(), set_up("test"), set_up("otel")] == [[], [], []]
    project = clone / "pyproject.toml"
    original = project.read_text()
    project.write_text(original + "\n")
    assert set_up("docs") == ["native", "packages"]
    assert [set_up(), set_up("docs")] == [[], []]
    project.write_text(original)
    assert set_up("test") == ["native", "packages"], "the packages of the other file may have other versions"


def test_setup_venv_removes_builds_of_older_sources(clone, set_up):
    folder = clone / "kernels/cpu"
    (folder / "_avx2.cpython-311-x86_64-linux-gnu.so").touch()
    set_up()
    assert [path.name for path in folder.iterdir()] == ["csrc"]


def test_setup_venv_installs_the_packages_of_extras_within_extras(clone, tmp_path):
    installed = tmp_path / "installed"
    keep_requirements = f'[[ "$*" != *" -r "* ]] || cat "${{!#}}" >"{installed}"'
    stub = f'#!/bin/bash\n{keep_requirements}\n[[ $1 != - ]] || exec "{sys.executable}" "$@"\n'
    program(clone / ".venv/bin/python", stub)
    subprocess.run([clone / "tools/setup-venv", "test-all"], check=True, stderr=subprocess.DEVNULL)
    names = {re.split(r"[\[><=; ]", line)[0] for line in installed.read_text().splitlines()}
    assert names >= {"torch", "pytest", "opentelemetry-sdk", "mypy", "ray", "playwright"}
    assert "vllm-mp" not in names


@pytest.fixture
def torch_index(tmp_path):
    """The URL of a package index that answers."""
    (tmp_path / "index/torch").mkdir(parents=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def torch_installs(clone, tmp_path):
    """A function that runs tools/install-cpu-torch, without torch; it returns the installing commands and messages."""
    calls = tmp_path / "installs"
    pip = f'[[ $1 != -m ]] || echo "pip ${{*:4}}" >>"{calls}"'
    program(
        clone / "bin/python",
        f'#!/bin/bash\n{pip}\n[[ $1 != -c ]] || exit 1\n[[ $1 != - ]] || "{sys.executable}" "$@"\n',
    )

    def run(*, uv: str = "", **environment: str) -> tuple[list[str], str]:
        calls.write_text("")
        program(clone / "bin/uv", f'#!/bin/bash\necho "uv $*" >>"{calls}"\n{uv}\n')
        environment = {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}", **environment}
        command = [clone / "tools/install-cpu-torch", clone / "bin/python"]
        result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return calls.read_text().splitlines(), result.stderr

    return run


def test_torch_for_cpus_comes_from_the_index_that_is_given_if_it_answers(torch_installs, torch_index):
    (installed,), errors = torch_installs(VLLM_MP_TORCH_INDEX=torch_index)
    assert re.search(rf"install .* --index-url {torch_index} torch==[\d.]+$", installed)
    assert not errors
    installed, errors = torch_installs(VLLM_MP_TORCH_INDEX="http://127.0.0.1:1/")
    assert not installed
    assert "http://127.0.0.1:1/ does not answer: pip's own indexes are used" in errors
    assert torch_installs(VLLM_MP_TORCH_INDEX="") == ([], "")


def test_torch_for_cpus_comes_from_the_index_that_uv_knows_if_it_answers(torch_installs):
    (tried, installed), errors = torch_installs()
    assert tried == f"{installed} --dry-run"
    assert re.search(r"pip install .* --torch-backend cpu torch==[\d.]+$", installed)
    assert not errors
    (tried,), errors = torch_installs(uv="exit 1")
    assert "no index with builds for CPUs answers: pip's own indexes are used" in errors
