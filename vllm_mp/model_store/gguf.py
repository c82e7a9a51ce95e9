"""The model folders of GGUF files: found in the cache, or made once.

Files of the families in `gguf_file.config.FAMILIES` are mapped: their folder holds configuration, tokenizer and the
path of the file. Other files are converted to safetensors. The converter is a program of the core, which runs in a
process of its own because it loads torch.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from vllm_mp.machine.file_owner import open_own_file
from vllm_mp.machine.installation import require_engine
from vllm_mp.model_store.cache import build_once, run_child
from vllm_mp.model_store.gguf_file.config import GgufFamily, family_of, read_gguf_config
from vllm_mp.model_store.gguf_file.mmproj import ARCHITECTURE, TEXT_TYPES, read_mmproj
from vllm_mp.model_store.gguf_file.parts import read_gguf_model
from vllm_mp.model_store.gguf_file.reader import FileIdentity, GgufFile
from vllm_mp.model_store.image_parts import image_token_ids, processor_files_beside, write_image_files
from vllm_mp.model_store.progress import Progress

PLACE_FILE: Final = "gguf_file.json"
"""The file of a model folder that holds a `MappedGguf`."""

MMPROJ_FILE: Final = "mmproj_file.json"
"""The same for the file with the image parts, in the folder of a model with images."""

NO_TOKENIZER_FILE: Final = "no_tokenizer.txt"
"""The file of a model folder that says why the folder has no tokenizer."""

CONVERTED_FILE: Final = "converted_gguf.txt"
"""The file of a model folder that names the GGUF file from which its weights were made."""

TOKENIZER_ONLY: Final = "--tokenizer-only"
"""The option of the converter that leaves out the weights."""

_CONVERTER = "vllm_mp.core.weights.gguf_to_safetensors"
"""The program that converts a file: `python -m ... SOURCE.gguf FOLDER`."""

DISK_FULL_EXIT = 3
"""Exit status of the converter if the converted model does not fit on the disk."""

CONVERTER_VERSION = 7
"""Version of the files that the converter writes. Raise it with every change, so that no older conversion is used."""

MAPPED_VERSION: Final = "m3"
"""Version of the folders of mapped files. Change it with every change of configurations or tokenizers."""

_KEPT_SECONDS = 24 * 3600
"""Time for which an older folder is kept after an engine found it, which `build_once` notes."""


class MappedGguf(msgspec.Struct, frozen=True):
    """A GGUF file whose weights are mapped, and what it was when its folder was made."""

    path: str
    """That of the first part, if the file is split."""
    digest: str
    """SHA-256 of its header, in hex."""
    identity: FileIdentity
    other_parts: tuple[FileIdentity, ...] = ()

    @classmethod
    def of(cls, file: GgufFile) -> "MappedGguf":
        others = tuple(part.identity for part in file.parts[1:])
        # The target of a link may have another name, but a part is found by its name.
        path = file.path.absolute() if file.parts else file.path.resolve()
        return cls(str(path), file.digest, file.identity, others)

    def read(self) -> GgufFile:
        """Return the checked header of the file. Raises ValueError if it is not the same, or as `read_gguf_model`."""
        file = read_gguf_model(Path(self.path))
        others = tuple(part.identity for part in file.parts[1:])
        if (file.identity, file.digest, others) != (self.identity, self.digest, self.other_parts):
            raise ValueError(f"{self.path} was changed or replaced after the engine found it; start the engine again")
        return file


def mapped_gguf(folder: Path) -> MappedGguf | None:
    """Return the GGUF file that has the weights of the model folder `folder`; None if the folder names none.

    Raises ValueError, with the remedy, if the folder's file about it cannot be read.
    """
    return _mapped(folder / PLACE_FILE)


def mapped_mmproj(folder: Path) -> MappedGguf | None:
    """Return the GGUF file that has the image parts of the model folder `folder`; None if the folder names none.

    Raises ValueError as `mapped_gguf` does.
    """
    return _mapped(folder / MMPROJ_FILE)


def _mapped(path: Path) -> MappedGguf | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MappedGguf) if path.is_file() else None
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"cannot read {path} ({error}); remove the folder {path.parent}") from error


def is_of_gguf(folder: Path) -> bool:
    """Tell whether the model folder `folder` is that of a GGUF file, mapped or converted."""
    return any((folder / name).is_file() for name in (PLACE_FILE, CONVERTED_FILE))


def hold_folder(folder: Path) -> int | None:
    """Return a descriptor that keeps the model folder of a GGUF file from being removed as unused until it is closed.

    None if `folder` is of no GGUF file, or its file system has no locks.
    """
    try:
        return _lock_folder(folder, fcntl.LOCK_SH) if is_of_gguf(folder) else None
    except OSError:
        return None


def _lock_folder(folder: Path, kind: int) -> int:
    """Return a descriptor of `folder` that holds a lock of this kind. Raises OSError if it cannot be had at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def gguf_model(source: Path, root: Path, progress: Progress, mmproj: Path | None = None) -> Path:
    """Return the model folder of the GGUF file `source`, or of the split file whose part it is, under the cache `root`.

    With `mmproj`, the GGUF file of its image parts, the model takes images. A file that was written or replaced gets
    another folder. Raises ValueError naming the file if it is damaged or cannot be converted, or if the two do not
    belong together, OSError if the cache cannot hold the result, RuntimeError if the system ended the converter.
    """
    file = read_gguf_model(source)
    if file.metadata.get("general.architecture") == ARCHITECTURE:
        raise ValueError(
            f"{source} has only the image parts of a model (general.architecture is {ARCHITECTURE!r}): name the folder "
            "that also holds its text part, or the file of the text part as the model and this file as mmproj"
        )
    family = family_of(file)
    if mmproj is not None and family is None:
        raise ValueError(
            f"{source}: general.architecture is {file.metadata.get('general.architecture')!r:.80}: a text part with "
            f"images ({mmproj.name}) must be one of {', '.join(TEXT_TYPES)}; name its file alone, without mmproj, to "
            "serve texts without images"
        )
    if family:
        return _mapped_model(file, family, root, progress, None if mmproj is None else read_gguf_model(mmproj))
    paths = [part.path for part in file.files]
    identities = list(map(_identity, paths))
    digests = [_content_sha256(*known, root, progress) for known in zip(paths, identities, strict=True)]
    digest = digests[0] if len(paths) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def build(workspace: Path, lock: int) -> Path:
        target = run_converter(paths[0], workspace, lock, progress)
        if list(map(_identity, paths)) != identities:
            raise ValueError(f"{source} was changed while it was being converted: try again")
        return target

    folder = build_once(converted_folder(root, paths[0].name, digest), build, progress)
    remove_older(folder)
    return folder


def _mapped_model(file: GgufFile, family: GgufFamily, root: Path, progress: Progress, mmproj: GgufFile | None) -> Path:
    """Return the folder with configuration, tokenizer and path of `file`, which keeps the weights, and of `mmproj`."""
    mapped_file = MappedGguf.of(file)
    mapped_parts = None if mmproj is None else MappedGguf.of(mmproj)
    beside = {} if mmproj is None else processor_files_beside(mmproj.path)
    content = mapped_file if mapped_parts is None else (mapped_file, mapped_parts, beside)
    folder = _cache_folder(
        root, file.path.name, hashlib.sha256(msgspec.json.encode(content)).hexdigest(), MAPPED_VERSION
    )

    def build(workspace: Path, lock: int) -> Path:
        config = read_gguf_config(file, family)
        parts = None if mmproj is None else read_mmproj(mmproj, config, file.path)
        target = workspace / "model"
        # The tokenizer depends on the header alone, so a file that was moved keeps its tokenizer. With image parts,
        # tokens may have other names.
        found_folders = _mapped_folders(folder.parent, MAPPED_VERSION)
        same = [
            other
            for other, found in found_folders
            if found.digest == mapped_file.digest and not (other / MMPROJ_FILE).exists()
        ]
        if same:
            shutil.copytree(same[0], target)
        else:
            _convert_tokenizer(file.path, target, lock, progress)
        if parts is not None and mapped_parts is not None:
            config = parts.config | image_token_ids(target, parts, file.path)
            write_image_files(target, parts, beside)
            (target / MMPROJ_FILE).write_bytes(msgspec.json.encode(mapped_parts))
        (target / "config.json").write_text(json.dumps(config, indent=2))
        (target / PLACE_FILE).write_bytes(msgspec.json.encode(mapped_file))
        return target

    build_once(folder, build, progress)
    for other, found in _mapped_folders(folder.parent):
        if other != folder and found.path == mapped_file.path:
            _remove_unused(other)
    return folder


def _mapped_folders(models: Path, version: str = "*") -> Iterator[tuple[Path, MappedGguf]]:
    """Yield each model folder of a mapped file in the folder `models`, of one version or all, and its file."""
    for path in models.glob(f"[!.]*-{version}/{PLACE_FILE}"):
        with contextlib.suppress(ValueError):
            if mapped_file := mapped_gguf(path.parent):
                yield path.parent, mapped_file


def converted_folder(root: Path, file_name: str, sha256: str) -> Path:
    """Return the folder under `root` that keeps the model made from a file with this name and content."""
    return _cache_folder(root, file_name, sha256, f"v{CONVERTER_VERSION}")


def _cache_folder(root: Path, file_name: str, key: str, version: str) -> Path:
    readable = re.sub(r"[^\w.-]+", "_", file_name.removesuffix(".gguf")).lstrip(".")[:80]
    return root / "models" / f"{readable}-{key[:16]}-{version}"


def remove_older(folder: Path) -> None:
    """Remove the conversions of the same file beside `folder` that older versions of the converter made.

    A conversion that an engine found in the last day, or that a running engine holds, is kept: an engine of an older
    release may load it again.
    """
    stem = folder.name.rpartition("-v")[0]
    for older in folder.parent.glob(f"{stem}-v*"):
        version = older.name.removeprefix(f"{stem}-v")
        if version.isdecimal() and int(version) < CONVERTER_VERSION:
            _remove_unused(older)


def _remove_unused(folder: Path) -> None:
    """Remove a folder that no engine found in the last day, and that none holds by `hold_folder`."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > _KEPT_SECONDS:
            lock = _lock_folder(folder, fcntl.LOCK_EX)
            shutil.rmtree(folder, ignore_errors=True)  # a cache that is read-only keeps it
            os.close(lock)


def run_converter(source: Path, workspace: Path, lock: int, progress: Progress) -> Path:
    """Run the converter on `source` and return the model folder that it writes inside `workspace`.

    The converter's process inherits `lock`. Raises the same errors as `gguf_model`.
    """
    target = workspace / "model"
    command = [sys.executable, "-P", "-m", _CONVERTER, str(source), str(target)]

    def follow(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        word, *plan = child.stdout.readline().split() or [""]
        if word != "plan":
            return  # the file cannot be converted
        num_bytes, seconds = map(int, plan)
        progress.line(
            f"{source.name}: its conversion takes {num_bytes / 1e6:.1f} MB in {workspace.parent} and about {seconds} s"
        )
        with progress.task(f"converting {source.name} to safetensors (once)") as show:
            for line in child.stdout:
                word, _, fraction = line.partition(" ")
                if word == "progress":
                    show(float(fraction))

    _run(command, source, lock, follow)
    return target


def _convert_tokenizer(source: Path, target: Path, lock: int, progress: Progress) -> None:
    """Run the converter to write the tokenizer of `source` to `target`, or why it has none.

    Raises the same errors as `gguf_model`.
    """

    def follow(child: subprocess.Popen[str]) -> None:
        with progress.task(f"converting the tokenizer of {source.name} (once)"):
            child.wait()

    _run([sys.executable, "-P", "-m", _CONVERTER, str(source), str(target), TOKENIZER_ONLY], source, lock, follow)


def _run(command: list[str], source: Path, lock: int, follow: Callable[[subprocess.Popen[str]], None]) -> None:
    """Run the converter on `source`; raise the errors of `gguf_model` if it fails."""
    require_engine(f"converting {source}")
    status, reason = run_child(command, {"HF_HUB_OFFLINE": "1"}, lock, follow)
    if status == 0:
        return
    if status == DISK_FULL_EXIT:
        raise OSError(errno.ENOSPC, reason)
    if status < 0:
        raise RuntimeError(
            f"the conversion of {source} was ended by {signal.Signals(-status).name}; SIGKILL mostly means that the "
            "system was out of memory: free about 10 bytes of memory for each weight of the model"
        )
    raise ValueError(f"cannot convert {source}: {reason}")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex. Raises ValueError naming a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the file and its rights") from error


def _identity(source: Path) -> str:
    """Return a text that changes with every write to the file and with every replacement of the file."""
    # No program can set the inode change time, so it reveals a write whose modification time was reset.
    try:
        stat = source.stat()
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}; check the file and its rights") from error
    parts = (source.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return "\n".join(map(str, parts))


def _content_sha256(source: Path, identity: str, root: Path, progress: Progress) -> str:
    """Return the SHA-256 of the content of `source`, from a file under `root` if it is known for this `identity`.

    Known digests are kept because reading some gigabytes takes seconds at every start.
    """
    known_digest = root / "digests" / hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
    try:
        known = known_digest.read_text()
        if len(known) == 64:
            return known
    except OSError:
        pass  # not hashed yet
    with progress.task(f"reading {source.name}"):
        digest = file_sha256(source)
    try:
        known_digest.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own_file(known_digest), "w") as file:
            file.write(digest)
    except (OSError, ValueError):  # ValueError: the cache is shared, and the file is another user's or a link
        pass  # a read-only cache can still hold the model; the digest is computed again next time
    return digest
