"""Build the wheel of the client alone, `vllm-mp-client`: it connects to running cores and needs no torch.

    python tools/build_client_wheel.py FOLDER       # pip install FOLDER/vllm_mp_client-*.whl

It holds the package `vllm_mp` without the core and the kernels, so it is installed in place of the whole package.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINE_FOLDERS = ("core", "kernels", "testing")
"""The folders of `vllm_mp` that only an engine needs."""
ENGINE_PACKAGES = ("gguf", "llguidance", "torch")
"""The dependencies that only an engine needs."""


def main() -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the wheel")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as source:
        write_source(Path(source))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", args.folder, source]
        return subprocess.run(command, check=False).returncode


def write_source(folder: Path) -> None:
    """Write the source tree of the client to `folder`, which exists."""
    engine = {str(ROOT / "vllm_mp" / name) for name in ENGINE_FOLDERS}
    skipped = shutil.ignore_patterns("__pycache__", "*.so")

    def ignored(parent: str, names: list[str]) -> set[str]:
        return skipped(parent, names) | {name for name in names if str(Path(parent, name)) in engine}

    shutil.copytree(ROOT / "vllm_mp", folder / "vllm_mp", ignore=ignored)
    # setup.py compiles what has sources here: the client's output path.
    shutil.copytree(ROOT / "client/outputs/csrc", folder / "client/outputs/csrc")
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "pyproject.toml").write_text(client_project((ROOT / "pyproject.toml").read_text()))


def client_project(project: str) -> str:
    """Return pyproject.toml of the client, made of that of the whole package."""
    table: dict[str, Any] = tomllib.loads(project)["project"]
    begin = project.index("dependencies = [")
    end = project.index("[project.scripts]")
    needed = [name for name in table["dependencies"] if not name.startswith(ENGINE_PACKAGES)]
    lines = "".join(f"    {name!r},\n" for name in needed)
    otel = table["optional-dependencies"]["otel"]
    dependencies = f"dependencies = [\n{lines}]\n\n[project.optional-dependencies]\notel = {otel!r}\n\n"
    return project[:begin].replace('name = "vllm-mp"', 'name = "vllm-mp-client"') + dependencies + project[end:]


if __name__ == "__main__":
    sys.exit(main())
