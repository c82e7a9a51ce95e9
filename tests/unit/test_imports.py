"""Imports run one way, and importing the package and its ground floor is cheap."""

import subprocess
import sys
from pathlib import Path

import vllm_mp

ROOT = Path(__file__).parents[2]
ONLY_IN_THE_CORE = {"vllm_mp.fault_injection.device_faults", "vllm_mp.fault_injection.hooks"}
"""Modules that only a core process imports, which load torch."""


def run(*command: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)


def ground_floor() -> list[str]:
    """Return the modules that a client process may import."""
    packages = ("model_config", "model_store", "cli", "fault_injection", "replay_core")
    # These have modules under the names that programs import from vLLM.
    packages += ("engine", "entrypoints", "inputs", "lora", "transformers_utils", "usage", "utils", "v1")
    files = [
        *(ROOT / "vllm_mp").glob("[a-z]*.py"),
        *(file for package in packages for file in (ROOT / "vllm_mp" / package).rglob("*.py")),
    ]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert {"vllm_mp.config", *(f"vllm_mp.{package}" for package in packages)} < names
    return sorted(names - ONLY_IN_THE_CORE - {"vllm_mp.cli.__main__"})


def test_import_contracts_hold() -> None:
    found = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def loaded(*imports: str) -> "list[set[str]]":
    """Return the modules that a process has loaded after each of `imports`."""
    lines = [f"import {names}\nprint(*sys.modules)" for names in imports]
    found = run(sys.executable, "-c", "\n".join(["import sys", *lines]))
    assert found.returncode == 0, found.stderr
    return [set(line.split()) for line in found.stdout.splitlines()]


def test_package_and_ground_floor_load_neither_torch_nor_transformers_nor_the_hub() -> None:
    ground, with_core = loaded(f"vllm_mp, {', '.join(ground_floor())}", "vllm_mp.core.process")
    assert not {"torch", "transformers", "huggingface_hub"} & ground
    assert "torch" not in with_core, "a core binds its address before it loads torch"


def test_operations_and_models_load_neither_triton_nor_transformers() -> None:
    (modules,) = loaded("vllm_mp.kernels.ops, vllm_mp.core.models, vllm_mp.core.weights.loader")
    assert "torch" in modules
    assert not {"triton", "transformers"} & modules


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    assert sorted(vllm_mp._MODULE_OF) == sorted(vllm_mp.__all__)
    for name in vllm_mp.__all__:
        assert getattr(vllm_mp, name) is not None
        assert name in dir(vllm_mp)


def test_linter_refuses_bare_imports_of_core_client_and_kernels() -> None:
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
