"""The models that the cache holds: what they are, and how they are removed."""

import contextlib
import fcntl
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store.folder import SAFETENSORS, safetensors_header, weight_files
from vllm_mp.model_store.gguf import (
    CONVERTER_VERSION,
    MAPPED_VERSION,
    PLACE_FILE,
    is_of_gguf,
    mapped_gguf,
    mapped_mmproj,
)
from vllm_mp.model_store.own_names import own_names
from vllm_mp.model_store.package import PACKAGED_MODELS, packaged_folder
from vllm_mp.model_store.packed_names import packed_files

_CONVERTED = re.compile(r"(?P<name>.+)-[0-9a-f]{16}-[vm]\d+")
"""The name of the folder of a converted model or of a mapped file."""
_HUB_PREFIX = "models--"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""The usual names of the dtypes of safetensors."""


class CacheEntry(NamedTuple):
    """A model in the cache."""

    name: str
    """The alias or hub id under which an engine finds it, else the name of the file that it was converted from."""
    folder: Path
    size: int
    """Bytes on the disk."""
    format: str
    """Form and dtype of its weights."""
    last_use: float
    """When an engine last found it or read it, in seconds of `time.time()`."""
    packed: tuple[Path, ...] = ()
    """The files of its packed weights, which are not counted in `size`."""
    target: Path | None = None
    """What a name that the user has given stands for; `folder` is then a link, and the model lies outside the cache."""

    @property
    def packed_size(self) -> int:
        """Bytes on the disk of its packed weights."""
        num_bytes = 0
        for path in self.packed:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += 512 * path.stat().st_blocks
        return num_bytes


def cache_entries(root: Path, hub: Path) -> list[CacheEntry]:
    """Return the models of the cache folder `root` and of the hub's cache `hub`, and the user's names, sorted by name.

    Models of the same name have the names of their folders instead.
    """
    own = [(_own_name(folder, root), folder, folder) for folder in _folders(root / "models")]
    names = [name for name, _, _ in own]
    found = [(name if names.count(name) == 1 else folder.name, folder, model) for name, folder, model in own]
    for folder in _folders(hub):
        if folder.name.startswith(_HUB_PREFIX):
            snapshots = sorted(_folders(folder / "snapshots"), key=lambda snapshot: snapshot.stat().st_mtime)
            if snapshots:
                found.append((folder.name.removeprefix(_HUB_PREFIX).replace("--", "/"), folder, snapshots[-1]))
    return sorted(
        [*(_entry(*parts, root) for parts in found), *(_named(name, link) for name, link in own_names(root).items())]
    )


def dead_reason(entry: CacheEntry, root: Path) -> str:
    """Return why no engine can use a model of the cache folder `root`; empty if one can."""
    if entry.target is not None:
        return "" if entry.target.exists() else f"{entry.target} is gone"
    if entry.folder.parent != root / "models":
        return ""
    if (entry.folder / PLACE_FILE).is_file():
        try:
            for mapped_file in (mapped_gguf(entry.folder), mapped_mmproj(entry.folder)):
                if mapped_file is not None:
                    mapped_file.read()
        except (ValueError, OSError) as error:
            return str(error)
        return "" if entry.folder.name.endswith(f"-{MAPPED_VERSION}") else "a later version reads its file again"
    if is_of_gguf(entry.folder) and not entry.folder.name.endswith(f"-v{CONVERTER_VERSION}"):
        return "a later version converts its file again"
    return ""


def remove_entry(entry: CacheEntry) -> None:
    """Remove a model from the cache; of an entry that is a symbolic link only the link.

    The entry vanishes at once: a process that is killed meanwhile leaves a hidden folder, which the next preparation
    of the model clears. Raises ValueError if another process prepares the model, OSError if it cannot be removed.
    """
    folder = entry.folder
    if folder.is_symlink():
        folder.unlink()
        return  # the model stays, and so do its packed weights
    with _lock(folder.with_name(f".{folder.name}.lock"), entry.name):
        hidden = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(hidden, ignore_errors=True)
        folder.rename(hidden)
        shutil.rmtree(hidden)  # does not follow symbolic links
    for path in entry.packed:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Hold the lock under which a model is prepared."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process prepares {name!r}; wait for its end") from error
        yield
    finally:
        os.close(descriptor)


def _folders(parent: Path) -> list[Path]:
    """Return the folders in `parent` that are not hidden."""
    try:
        return [path for path in parent.iterdir() if not path.name.startswith(".") and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _own_name(folder: Path, root: Path) -> str:
    for alias in PACKAGED_MODELS:
        if folder == packaged_folder(alias, root):
            return alias
    converted = _CONVERTED.fullmatch(folder.name)
    return converted["name"] if converted else folder.name


def _entry(name: str, folder: Path, model: Path, root: Path) -> CacheEntry:
    """Return the entry in `folder`, whose model is in the folder `model`; `root` is the cache folder."""
    last_use, is_from_hub = folder.stat().st_mtime, model != folder
    if is_from_hub:
        last_use = max([last_use, *(info.st_atime for info in _files(folder))])
    size = 0 if folder.is_symlink() else folder_size(folder)
    models = _folders(folder / "snapshots") if is_from_hub else [model]
    packed = [] if folder.is_symlink() else [path for each in models for path in packed_files(root, each)]
    return CacheEntry(name, folder, size, _format(model), last_use, tuple(packed))


def _named(name: str, link: Path) -> CacheEntry:
    """Return the entry of a name that the user has given."""
    target, last_use = Path(os.readlink(link)), link.lstat().st_mtime
    if target.is_dir():
        return CacheEntry(name, link, folder_size(target), _format(target), last_use, target=target)
    if not target.is_file():
        return CacheEntry(name, link, 0, "missing", last_use, target=target)
    return CacheEntry(name, link, 512 * target.stat().st_blocks, "GGUF", last_use, target=target)


def folder_size(folder: Path) -> int:
    """Return the bytes on the disk of all files in `folder`, without following symbolic links; 0 without a folder."""
    return sum({(info.st_dev, info.st_ino): 512 * info.st_blocks for info in _files(folder)}.values())


def _files(folder: Path) -> Iterator[os.stat_result]:
    """Yield the status of each file in `folder`; files that vanish meanwhile are left out."""
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(path, name))


def _format(model: Path) -> str:
    """Return the form of the weights in the folder `model`, and how they are quantized, or their dtype."""
    if (model / PLACE_FILE).is_file():
        return _mapped_format(model)
    files = weight_files(model)
    if files is None:
        return "no weights"
    try:
        config: dict[str, Any] = read_json(model / "config.json", dict) or {}
    except ValueError:
        config = {}
    quantization = config.get("quantization_config")
    kind = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if files != SAFETENSORS:
        return ", ".join(filter(None, ("PyTorch", str(kind or config.get("dtype") or config.get("torch_dtype") or ""))))
    return ", ".join(filter(None, ("safetensors", str(kind or _stored_dtype(model)))))


def _mapped_format(model: Path) -> str:
    """Return the type of most bytes of the GGUF file that the folder `model` names."""
    num_bytes: Counter[str] = Counter()
    try:
        mapped_file = mapped_gguf(model)
        for tensor in mapped_file.read().tensors.values() if mapped_file else ():
            num_bytes[tensor.type.name] += tensor.num_bytes
    except ValueError:
        return "GGUF, missing or changed"
    return ", ".join(("GGUF", *(kind for kind, _ in num_bytes.most_common(1))))


def _stored_dtype(model: Path) -> str:
    """Return the dtype of most bytes of a safetensors file of the folder `model`; empty if the file cannot be read."""
    num_bytes: Counter[str] = Counter()
    try:
        with sorted(model.glob(SAFETENSORS.pattern))[0].open("rb") as file:
            tensors, _ = safetensors_header(file)
        for tensor in tensors.values():
            begin, end = tensor["data_offsets"]
            num_bytes[tensor["dtype"]] += end - begin
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""
    most = num_bytes.most_common(1)
    return _DTYPES.get(most[0][0], most[0][0]) if most else ""
