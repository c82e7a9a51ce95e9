"""Compiled kernels on disk, from which the next process starts them without compiling.

Triton finds a kernel by a hash of its source and constants, of the types and alignments of its arguments, of the target
and the options, and of Triton itself. So an entry never has to be invalidated: another version of this package or of
Triton does not find it.
"""

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from triton.runtime.cache import FileCacheManager

logger = logging.getLogger(__name__)

_GROUP = "__grp__"
"""Begins the name of the file that lists the files of a kernel."""


class KernelCache(FileCacheManager):  # type: ignore[misc]
    """Keeps the files of a kernel in a folder of `TRITON_CACHE_DIR`, as Triton does, and checks them when it reads.

    Files appear whole under their names, so several processes may write the same kernel. A kernel with a damaged or
    missing file counts as not compiled. The folder may be moved, and a folder that cannot be written to, or whose disk
    is full, costs the kernels that are compiled now no more than their place: they go to a temporary folder.
    """

    _aside: str | None = None
    """The temporary folder of this process; None as long as it needs none."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key = key
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as error:
            self._go_aside(error)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file and return its path; raises OSError if not even the temporary folder can be written to."""
        try:
            return str(super().put(data, filename, binary=binary))
        except OSError as error:
            self._go_aside(error)
            return str(super().put(data, filename, binary=binary))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Note which files belong to a kernel, with their digests."""
        digests = {name: _digest(path) for name, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "digests": digests}), _GROUP + filename, binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files of a kernel by name; None if it must be compiled."""
        listed = self.get_file(_GROUP + filename)
        if listed is None:
            return None
        try:
            digests = json.loads(Path(listed).read_bytes())["digests"]
            paths = {name: os.path.join(self.cache_dir, name) for name in digests}
            damaged = [name for name, path in paths.items() if _digest(path) != digests[name]]
        except KeyError:  # written by Triton's own class
            found: dict[str, str] | None = super().get_group(filename)
            return found
        except (OSError, ValueError, TypeError, AttributeError) as error:
            damaged, paths = [f"{_GROUP}{filename} ({error})"], {}
        if damaged:
            where = Path(self.cache_dir)
            logger.warning("compiled kernel in %s is damaged (%s); it is compiled again", where, ", ".join(damaged))
            return None
        return paths

    def _go_aside(self, error: OSError) -> None:
        """Use a temporary folder from now on, unless it is used already; then raise `error`."""
        folder = KernelCache._aside
        if folder is None:
            folder = KernelCache._aside = tempfile.mkdtemp(prefix="vllm_mp-kernels-")
            logger.warning(
                "compiled kernels cannot be kept: %s; the next start compiles them again. Set TRITON_CACHE_DIR or "
                "VLLM_MP_CACHE to a folder that can be written to",
                error,
            )
        elif str(getattr(self, "cache_dir", "")).startswith(folder):
            raise error
        self.cache_dir = os.path.join(folder, self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
