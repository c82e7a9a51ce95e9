"""A digest of the code that decides what keys and values are, and how they are laid out."""

import functools
import hashlib
from pathlib import Path

from vllm_mp import version
from vllm_mp.kernels.cpu.library import library

_FOLDERS = ("core/models", "core/weights", "kernels")
"""Folders of this package with such code, below its own folder."""


@functools.cache
def code_digest() -> str:
    """Return the digest of the models, of what reads their weights, and of the kernels with their loaded build.

    The version of the package alone does not tell two states of a working copy from each other.
    """
    digest = hashlib.sha256()
    for path in code_files():
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def code_files() -> list[Path]:
    """Return the files of this code."""
    package, build = Path(version.__file__).parent, library()
    files = [path for folder in _FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    return files if build is None else [*files, build.path]
