"""The model folders that GGUF files were converted to: found in the cache, or made once.

This module only keeps the conversions. The converter is a program of the core, which runs in a process of its own
because it loads torch.
"""

import errno
import hashlib
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from vllm_mp.model_store.cache import build_once, run_child
from vllm_mp.model_store.progress import Progress

_CONVERTER = "vllm_mp.core.weights.gguf_to_safetensors"
"""The program that converts a file: `python -m ... SOURCE.gguf FOLDER`."""

DISK_FULL_EXIT = 3
"""Exit status of the converter if the converted model does not fit on the disk."""

_CONVERTER_VERSION = 3
"""Version of the files that the converter writes. Raise it with every change, so that no older conversion is used."""

_KEPT_SECONDS = 24 * 3600
"""Time for which an older conversion is kept after its last use, which `build_once` notes."""

_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def gguf_model(source: Path, root: Path, progress: Progress) -> Path:
    """Return the model folder that the GGUF file `source` was converted to, under the cache folder `root`.

    The folder is keyed by the file's content, so a replaced file is converted again. Raises ValueError naming the file
    if it cannot be converted, OSError if the cache cannot hold the result, RuntimeError if the system ended the
    converter.
    """
    if _SPLIT_FILE.search(source.name):
        raise ValueError(f"{source} is one part of a split GGUF: join the parts with `llama-gguf-split --merge` first")
    identity = _identity(source)
    digest = _content_sha256(source, identity, root, progress)

    def build(workspace: Path, lock: int) -> Path:
        target = run_converter(source, workspace, lock, progress)
        if _identity(source) != identity:
            raise ValueError(f"{source} was changed while it was being converted: try again")
        return target

    folder = build_once(converted_folder(root, source.name, digest), build, progress)
    remove_older(folder)
    return folder


def converted_folder(root: Path, file_name: str, sha256: str) -> Path:
    """Return the folder under `root` that keeps the model made from a file with this name and content."""
    readable = re.sub(r"[^\w.-]+", "_", file_name.removesuffix(".gguf")).lstrip(".")[:80]
    return root / "models" / f"{readable}-{sha256[:16]}-v{_CONVERTER_VERSION}"


def remove_older(folder: Path) -> None:
    """Remove the conversions of the same file beside `folder` that older versions of the converter made.

    A conversion that an engine found in the last day is kept: an engine of an older release may load it again.
    """
    stem = folder.name.rpartition("-v")[0]
    for older in folder.parent.glob(f"{stem}-v*"):
        version = older.name.removeprefix(f"{stem}-v")
        is_older = version.isdecimal() and int(version) < _CONVERTER_VERSION
        if is_older and time.time() - older.stat().st_mtime > _KEPT_SECONDS:
            shutil.rmtree(older, ignore_errors=True)  # a cache that is read-only keeps it


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

    status, reason = run_child(command, {"HF_HUB_OFFLINE": "1"}, lock, follow)
    if status == 0:
        return target
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
        known_digest.write_text(digest)
    except OSError:
        pass  # a read-only cache can still hold the model; the digest is computed again next time
    return digest
