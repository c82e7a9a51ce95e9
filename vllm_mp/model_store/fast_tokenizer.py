"""The tokenizer of a folder as a tokenizer.json: the folder's own, or a conversion in the cache.

`python -m vllm_mp.model_store.fast_tokenizer SOURCE TARGET` is a program too: it writes a folder's tokenizer as a
tokenizer.json. Only `AutoTokenizer`, which loads torch, knows what tokenizer a folder without that file holds, so this
conversion runs in a process of its own.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vllm_mp.model_store.folder import TOKENIZER_FILES, has_tokenizer

FAST_FILE = "tokenizer.json"
_CONVERTED = "tokenizers"
"""The folder of conversions in the cache."""
_SOURCE_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})
"""Suffixes of the files that a conversion may read; files of weights have other suffixes."""
_CONVERSION_TIMEOUT_S = 600
"""Longest time for a conversion."""
_NO_FAST_TOKENIZER = 3
"""Exit code of the conversion: the tokenizer exists in Python only, and nothing was written."""


def fast_tokenizer_folder(folder: Path, cache_dir: Path) -> Path | None:
    """Return the folder that holds the tokenizer of `folder` as a tokenizer.json: itself or its conversion.

    Return None if the tokenizer has no fast form. Raises ValueError if there is no tokenizer or it cannot be converted.
    """
    if (folder / FAST_FILE).is_file():
        return folder
    if not has_tokenizer(folder):
        raise ValueError(f"it has no tokenizer files (none of {', '.join(TOKENIZER_FILES)})")
    return _convert(folder, cache_dir)


def known_fast_folder(folder: Path, cache_dir: Path) -> Path | None:
    """Return what `fast_tokenizer_folder` returns, without a conversion; None also if that is still to be made."""
    if (folder / FAST_FILE).is_file():
        return folder
    if not (cache_dir / _CONVERTED).is_dir():
        return None
    target = cache_dir / _CONVERTED / _identity(folder)
    return target if (target / FAST_FILE).is_file() else None


def source_files(folder: Path) -> list[Path]:
    """Return the files of `folder` that the loading of a tokenizer may read, sorted by name."""
    return [path for path in sorted(folder.iterdir()) if path.suffix in _SOURCE_SUFFIXES and path.is_file()]


def _convert(folder: Path, cache_dir: Path) -> Path | None:
    """Return the folder of the converted tokenizer, from the cache or made now; None if it has no fast form.

    Raises ValueError, with the converter's last line, if the conversion fails.
    """
    target = cache_dir / _CONVERTED / _identity(folder)
    if (target / FAST_FILE).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        child = subprocess.run(
            [sys.executable, "-m", "vllm_mp.model_store.fast_tokenizer", str(folder), str(unfinished)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_CONVERSION_TIMEOUT_S,
            check=False,
        )
        if child.returncode == _NO_FAST_TOKENIZER:
            return None
        if child.returncode != 0 or not (unfinished / FAST_FILE).is_file():
            lines = child.stderr.strip().splitlines() or ["no message"]
            raise ValueError(f"converting it to {FAST_FILE} failed with exit code {child.returncode}: {lines[-1]}")
        try:
            unfinished.rename(target)
        except OSError:
            # If another process was faster, its result is the same.
            if not (target / FAST_FILE).is_file():
                raise
        return target
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _identity(folder: Path) -> str:
    """Return a hash of the files that a conversion may read, and of the version of the library that converts."""
    import importlib.metadata  # which takes a while, and most tokenizers are not converted

    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for path in source_files(folder):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def _convert_to_fast(source: str, target: str) -> int:
    """Write the tokenizer in `source` as a tokenizer.json in `target`; return the process's exit code."""
    from transformers import AutoTokenizer

    # With trust_remote_code None the library would ask on the terminal.
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        return _NO_FAST_TOKENIZER
    tokenizer.save_pretrained(target)
    return 0


if __name__ == "__main__":
    sys.exit(_convert_to_fast(*sys.argv[1:]))
