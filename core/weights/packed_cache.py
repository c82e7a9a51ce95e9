"""The packed weights of models in the model cache: which file is a model's, and what is removed for it.

A core that finds the file maps it, so that loading takes no time and cores of the same model share the memory. The
template process of a core that does not find it has it written in the background. No start fails because of it.
"""

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch

from vllm_mp.config import ModelConfig
from vllm_mp.core.weights.code_digest import code_digest
from vllm_mp.core.weights.packed_file import (
    PARTIAL,
    PackedWeights,
    is_locked_by_this_process,
    read_packed_file,
    write_packed_file,
)
from vllm_mp.machine.file_owner import check_private
from vllm_mp.model_store.cache import cache_root
from vllm_mp.model_store.folder import checkpoint_files
from vllm_mp.model_store.gguf import mapped_gguf
from vllm_mp.model_store.packed_names import PACKED_SUFFIX, packed_folder, packed_prefix

logger = logging.getLogger(__name__)

LIMIT_VARIABLE: Final = "VLLM_MP_PACKED_CACHE_GIB"
"""Environment variable: the most GiB that all files of packed weights may take; 0: none is read or written."""
_LIMIT_GIB: Final = 8.0
_MIN_BYTES: Final = 64 * 2**20
"""Smaller models are packed at once."""
_NICE: Final = 19
_PR_SET_PDEATHSIG: Final = 1


def packed_path(config: ModelConfig, dtype: torch.dtype) -> Path | None:
    """Return the path of the file for the model of `config`, packed in `dtype`; None if there can be none.

    Its name begins as `packed_prefix` says, and covers the files of the weights with their sizes and times, the
    architecture, dtype, quantization, kernels and the code that loads and packs.
    """
    if config.load_format == "dummy" or _limit_bytes() == 0:
        return None
    try:
        mapped_file = mapped_gguf(config.folder)
        if mapped_file is None:
            files = list(checkpoint_files(config.folder))
        else:
            files = [part.path for part in mapped_file.read().files]
        infos = [(path, path.stat()) for path in files]
        identity = [
            code_digest(),
            str(dtype),
            config.quantization,
            repr(config.architecture),
            [(str(path.resolve()), info.st_size, info.st_mtime_ns, info.st_ino, info.st_dev) for path, info in infos],
        ]
        digest = hashlib.sha256(msgspec.json.encode(identity)).hexdigest()[:32]
        return packed_folder(cache_root()) / f"{packed_prefix(config.folder)}{digest}{PACKED_SUFFIX}"
    except (OSError, ValueError) as error:  # the load will say so, if it is the model
        logger.info("the weights of %s are not looked for in packed form: %s", config.model, error)
        return None


def find_packed(path: Path | None) -> PackedWeights | None:
    """Return the weights in the file `path`; None if there is none that can be used. A damaged file is removed."""
    if path is None:
        return None
    try:
        check_private(path.parent, path.parent.lstat())
        weights = read_packed_file(path)
        os.utime(path)  # the time of the last use
        return weights
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
        logger.warning("the packed weights in %s cannot be used: %s; the model's own files are read", path, error)
        remove_packed(path)
        return None


def remove_packed(path: Path) -> None:
    """Remove a file that cannot be used; cores that map it keep it."""
    with contextlib.suppress(OSError):
        path.unlink()


def store_packed(path: Path, weights: PackedWeights) -> None:
    """Write the file `path`, and remove those that were not used for the longest time if there is no room for all.

    No-op for small models and without room; a failure is logged.
    """
    if not _is_kept(weights):
        return
    size, folder = weights.num_bytes, path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(folder, folder.lstat())
        _make_room(folder, _limit_bytes() - size)
        if shutil.disk_usage(folder).free < 2 * size:
            logger.info("the packed weights are not kept: %s has too little space", folder)
        elif write_packed_file(path, weights):
            logger.info("the packed weights are kept in %s, %.1f GiB", path, size / 2**30)
    except (OSError, ValueError) as error:
        logger.info("the packed weights are not kept: %s", error)


def fork_writer(files: list[tuple[Path, PackedWeights]]) -> None:
    """Fork a process, a child, that writes `files` while nothing else needs the processor, and ends with this one.

    Call this in a process with one thread. Raises OSError if the system cannot make a process.
    """
    files = [(path, weights) for path, weights in files if _is_kept(weights) and not path.exists()]
    if not files:
        return
    parent = os.getpid()
    if os.fork() != 0:
        return
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.nice(_NICE)
            for path, weights in files:
                store_packed(path, weights)
            code = 0
    finally:
        os._exit(code)


def _is_kept(weights: PackedWeights) -> bool:
    return _MIN_BYTES <= weights.num_bytes <= _limit_bytes()


def _make_room(folder: Path, num_bytes: int) -> None:
    """Remove what killed processes left, and the files that were not used for the longest time beyond `num_bytes`."""
    for partial in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError), partial.open("rb") as file:
            if is_locked_by_this_process(file.fileno(), partial):
                partial.unlink()
    left = sum(info.st_size for _, info in _files(folder))
    for path, info in sorted(_files(folder), key=lambda pair: pair[1].st_mtime):
        if left > num_bytes:
            path.unlink(missing_ok=True)
            left -= info.st_size


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(f"*{PACKED_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.stat()


def _limit_bytes() -> int:
    """Return the most bytes that all files may take."""
    value = os.environ.get(LIMIT_VARIABLE, "")
    try:
        gib = float(value) if value else _LIMIT_GIB
    except ValueError:
        gib = -1.0
    if not 0 <= gib < 2**20:
        logger.warning("%s=%r is not a number of GiB of at least 0; no packed weights are kept", LIMIT_VARIABLE, value)
        gib = 0.0
    return int(gib * 2**30)
