"""The names that users give to their own model folders and GGUF files: symbolic links in the cache."""

import contextlib
import os
import re
from pathlib import Path

from vllm_mp.model_store.cache import cache_root
from vllm_mp.model_store.package import PACKAGED_MODELS

_FOLDER = "names"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def own_names(root: Path | None = None) -> dict[str, Path]:
    """Return the links by their names, also those whose target is missing.

    `root` is the cache folder; default: `cache_root()`.
    """
    try:
        folder = _folder() if root is None else root / _FOLDER
        return {
            path.name: path for path in sorted(folder.iterdir()) if _NAME.fullmatch(path.name) and path.is_symlink()
        }
    except OSError:
        return {}


def named_path(name: str) -> Path | None:
    """Return what the user's own `name`, in any case, stands for; None if it is not such a name.

    Notes the use. Raises ValueError, with the remedy, if the target is missing.
    """
    name = name.lower()
    if not _NAME.fullmatch(name):
        return None
    try:
        target = Path(os.readlink(link := _folder() / name))
    except OSError:
        return None
    if not target.exists():
        raise ValueError(
            f"the name {name!r} stands for {target}, which does not exist; run `vllm-mp alias {name} PATH` to change "
            f"it, or `vllm-mp rm {name}`"
        )
    with contextlib.suppress(OSError):  # a cache that only others can write
        os.utime(link, follow_symlinks=False)
    return target


def give_name(name: str, path: Path) -> None:
    """Let `name` stand for `path`, an absolute path; a name that exists is changed.

    Raises ValueError for a name that is not allowed, OSError if the cache cannot be written.
    """
    name = name.lower()
    if not _NAME.fullmatch(name) or name.endswith(".gguf"):
        raise ValueError(
            f"the name {name!r:.100} must be 1 to 64 letters, digits or any of ._-, begin with a letter or digit, and "
            "not end with .gguf; choose another name"
        )
    if name in PACKAGED_MODELS:
        raise ValueError(f"the name {name!r} stands for a model of a package; choose another name")
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    # A rename replaces a link in one step, so that no other process misses the name.
    fresh = folder / f".{name}.{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path)
    fresh.rename(folder / name)


def _folder() -> Path:
    return cache_root() / _FOLDER
