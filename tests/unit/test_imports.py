"""Imports run one way, and importing the package is cheap."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)


def test_import_contracts_hold() -> None:
    found = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    found = run(
        sys.executable, "-c", "import sys, vllm_mp; print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert found.stdout == "[]\n", found.stderr


def test_ground_floor_loads_neither_torch_nor_transformers_nor_the_hub() -> None:
    modules = [f"vllm_mp.{file.stem}" for file in (ROOT / "vllm_mp").glob("[a-z]*.py")]
    found = run(
        sys.executable,
        "-c",
        f"import sys, {', '.join(modules)}\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))",
    )
    assert found.stdout == "[]\n", found.stderr


def test_bare_names_of_the_halves_are_refused_by_the_linter() -> None:
    snippet = "import core\nfrom client import tokenizer\nimport kernels.ops\n"
    found = run(
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--select",
        "TID251",
        "--stdin-filename",
        "vllm_mp/x.py",
        "-",
        text=snippet,
    )
    assert found.returncode == 1
    for name in ("core", "client", "kernels"):
        assert f"import vllm_mp.{name}" in found.stdout
