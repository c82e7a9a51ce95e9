"""Imports run one way, and importing the package and its ground floor is cheap."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import vllm_mp

ROOT = Path(__file__).parents[2]
MAX_LOOSE_MODULES = 16
"""In one folder; more of them have subjects that deserve packages."""


def run(*command: str, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=False)


def ground_floor() -> list[str]:
    """Return the modules that a client process may import."""
    halves = {"client", "core", "kernels", "server", "testing"}
    folder = ROOT / "vllm_mp"
    files = [
        file.relative_to(folder).with_suffix("")
        for top in folder.iterdir()
        if top.name not in halves
        for file in (top.rglob("*.py") if top.is_dir() else [top])
        if file.suffix == ".py"
    ]
    names = {".".join(("vllm_mp", *file.parts)).removesuffix(".__init__") for file in files}
    assert {"vllm_mp.config.engine_args", "vllm_mp.vllm_names.v1.engine.async_llm"} < names
    # Modules under vLLM's names are imported without the name of their folder.
    return sorted({name.replace(".vllm_names", "") for name in names} - {"vllm_mp.cli.__main__"})


def test_no_folder_has_more_than_sixteen_loose_modules() -> None:
    tops = [ROOT / name for name in ("vllm_mp", "client", "core", "kernels")]
    loose = loose_files(tops, lambda file: file.suffix == ".py" and file.name != "__init__.py")
    assert len(loose) > 50
    assert {name: number for name, number in loose.items() if number > MAX_LOOSE_MODULES} == {}


def test_no_folder_of_tools_has_more_than_sixteen_files() -> None:
    loose = loose_files([ROOT / "tools"], Path.is_file)
    assert {"tools", "tools/speed"} < set(loose)
    assert {name: number for name, number in loose.items() if number > MAX_LOOSE_MODULES} == {}


def loose_files(tops: Iterable[Path], is_counted: Callable[[Path], bool]) -> dict[str, int]:
    """Return the number of files that are counted in each folder of `tops`, not those in the folders below it."""
    folders = {folder for top in tops for folder in (top, *top.rglob("*"))}
    return {
        str(folder.relative_to(ROOT)): sum(map(is_counted, folder.iterdir()))
        for folder in folders
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__"
    }


def test_folders_of_unit_tests_are_those_of_the_product() -> None:
    tests = ROOT / "tests" / "unit"
    own = {tests / "support", tests / "tools"}
    folders = {file.parent for file in tests.rglob("test_*.py")} - own - {tests}
    assert len(folders) > 30
    # The links in vllm_mp lead to client and core.
    assert [
        str(path)
        for path in (folder.relative_to(tests) for folder in folders)
        if not (ROOT / "vllm_mp" / path).is_dir()
    ] == []


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
    (modules,) = loaded("vllm_mp.kernels.ops, vllm_mp.core.models, vllm_mp.core.models.loader")
    assert "torch" in modules
    assert not {"triton", "transformers"} & modules


def test_a_model_on_the_meta_device_imports_no_compiler_of_torch() -> None:
    """Each of several ranks makes such a model, and the import would take longer than the rest of its start."""
    code = """
import json, sys
import torch
from vllm_mp.core.models import build_model
from vllm_mp.model_config.families.registry import read_architecture
arch = read_architecture(json.load(sys.stdin))
build_model(arch, torch.float32, "cpu")
before = set(sys.modules)
build_model(arch, torch.float32, "meta")
print(sorted(set(sys.modules) - before))
"""
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 6, **sizes}
    done = run(sys.executable, "-c", code, text=json.dumps(config | {"max_position_embeddings": 128}))
    assert done.stdout == "[]\n", done.stderr


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
