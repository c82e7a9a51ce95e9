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
    files = [
        *(ROOT / "vllm_mp").glob("[a-z]*.py"),
        *(file for package in packages for file in (ROOT / "vllm_mp" / package).glob("*.py")),
    ]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert {"vllm_mp.config", *(f"vllm_mp.{package}" for package in packages)} < names
    return sorted(names - ONLY_IN_THE_CORE - {"vllm_mp.cli.__main__"})


def test_import_contracts_hold() -> None:
    found = run(sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 broken" in found.stdout


def test_package_and_ground_floor_load_neither_torch_nor_transformers_nor_the_hub() -> None:
    found = run(
        sys.executable,
        "-c",
        f"import sys, vllm_mp, {', '.join(ground_floor())}\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()))",
    )
    assert found.stdout == "[]\n", found.stderr


def test_core_binds_its_address_before_it_loads_torch() -> None:
    found = run(sys.executable, "-c", "import sys, vllm_mp.core.process\nprint('torch' in sys.modules)")
    assert found.stdout == "False\n", found.stderr


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
