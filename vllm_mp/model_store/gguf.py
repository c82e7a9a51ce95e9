"""GGUF files turned, once, into model folders with safetensors."""

import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_mp.model_store.cache import build_once
from vllm_mp.model_store.progress import Progress

DISK_FULL_EXIT = 3
"""Exit status of `vllm_mp.core.weights.gguf_to_safetensors` when the converted model does not fit on the disk."""

_CONVERSION = 2
"""Version of what `gguf_to_safetensors` writes; raise it with every change, so that no older conversion
is used."""

_SPLIT_FILE = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


def convert_gguf(source: Path, root: Path, progress: Progress) -> Path:
    """Return the folder that `source`, a GGUF file, was converted to, under the cache folder `root`.

    The folder is keyed by the file's content, so a file that was replaced is converted anew. Raises
    ValueError naming the file when it cannot be converted, OSError when the cache cannot hold the result,
    RuntimeError when the system ended the conversion.
    """
    if _SPLIT_FILE.search(source.name):
        raise ValueError(f"{source} is one part of a split GGUF: join the parts with `llama-gguf-split --merge` first")
    identity = _identity(source)
    digest = _content_sha256(source, identity, root, progress)

    def build(workspace: Path, lock: int) -> Path:
        target = run_conversion(source, workspace, lock, progress)
        if _identity(source) != identity:
            raise ValueError(f"{source} was changed while it was being converted: try again")
        return target

    return build_once(converted_folder(root, source.name, digest), build, progress)


def converted_folder(root: Path, file_name: str, sha256: str) -> Path:
    """Return where what is made of a file with this name and content is kept under `root`."""
    readable = re.sub(r"[^\w.-]+", "_", file_name.removesuffix(".gguf")).lstrip(".")[:80]
    return root / "models" / f"{readable}-{sha256[:16]}-v{_CONVERSION}"


def run_conversion(source: Path, workspace: Path, lock: int, progress: Progress) -> Path:
    """Convert `source` in a process of its own and return the model folder, inside `workspace`.

    `lock` is handed on to that process. Raises as `convert_gguf` does.
    """
    target = workspace / "model"
    command = [sys.executable, "-P", "-m", "vllm_mp.core.weights.gguf_to_safetensors", str(source), str(target)]
    with progress.task(f"converting {source.name} to safetensors (once)") as show:

        def follow(child: subprocess.Popen[str]) -> None:
            assert child.stdout is not None
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
            f"the conversion of {source} was ended by {signal.Signals(-status).name}; where that is SIGKILL "
            "the system was mostly out of memory: about 10 bytes are needed for each of the model's weights"
        )
    raise ValueError(f"cannot convert {source}: {reason}")


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    lock: int,
    follow: Callable[[subprocess.Popen[str]], None],
) -> tuple[int, str]:
    """Run `command`, watched by `follow`; return its exit status and the last line of its stderr.

    `environment` is added to this process's own. The child inherits `lock`, and is killed when `follow`
    raises, as on Ctrl-C.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | dict(environment),
            pass_fds=(lock,),
        ) as child,
    ):
        try:
            follow(child)
            status = child.wait()
        except BaseException:
            child.kill()
            raise
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    return status, lines[-1] if lines else "it gave no reason"


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex. Raises ValueError naming a file that cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _identity(source: Path) -> str:
    # Nobody can set the inode change time, so it tells of every write and every replacement.
    try:
        stat = source.stat()
    except OSError as error:
        raise ValueError(f"cannot read {source}: {error.strerror}") from error
    parts = (source.resolve(), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return "\n".join(map(str, parts))


def _content_sha256(source: Path, identity: str, root: Path, progress: Progress) -> str:
    # Digests are remembered by identity, because reading some gigabytes takes seconds at every start.
    remembered = root / "digests" / hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
    try:
        known = remembered.read_text()
        if len(known) == 64:
            return known
    except OSError:
        pass  # not hashed yet
    with progress.task(f"reading {source.name}"):
        digest = file_sha256(source)
    try:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        remembered.write_text(digest)
    except OSError:
        pass  # a read-only cache that holds the model still serves; the digest is taken again next time
    return digest
