"""Loading a model's tokenizer from its folder, without torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_mp.client.convert_tokenizer import NO_FAST_TOKENIZER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FAST_FILE = "tokenizer.json"
_VOCABULARY_FILES = ("vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
# Conversion may read any of these; weights are told apart by their suffix.
_SOURCE_SUFFIXES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})
_CONVERSION_TIMEOUT_S = 600


def load_tokenizer(
    folder: Path,
    *,
    mode: str = "auto",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    cache_dir: Path,
) -> PreTrainedTokenizerBase:
    """Loads the `transformers` tokenizer of a local folder.

    A folder without tokenizer.json is converted to one once, in a process of its own. torch is loaded
    into this process only for a tokenizer that exists in Python alone, for one with its own code, and by mode "slow".

    Args:
        folder: where the tokenizer's files are.
        mode: "auto" takes the fast tokenizer where there is one, "slow" asks `AutoTokenizer` for the Python one.
        trust_remote_code: run the code that comes with the folder, where its tokenizer has any.
        chat_template: a Jinja template, or the path of one, in place of the folder's own.
        cache_dir: where converted tokenizers are kept, by the content of the files they come from.

    Raises:
        ValueError: `mode` is unknown, the chat template's file cannot be read, or the folder holds no tokenizer
            that can be loaded. The message names the folder, the cause and the remedy.
    """
    if mode not in ("auto", "slow"):
        raise ValueError(f"tokenizer_mode={mode!r} is not one of 'auto', 'slow'")
    template = None if chat_template is None else _read_chat_template(chat_template)
    # The worker thread keeps up alone, and with threads of its own the library warns whenever the user's app forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not folder.is_dir():
        raise ValueError(
            f"tokenizer folder {folder} does not exist: set `tokenizer` to a folder that does, or a hub id"
        )
    try:
        tokenizer = _load(folder, mode, trust_remote_code, cache_dir)
    except Exception as error:
        raise ValueError(
            f"cannot load a tokenizer from {folder}: {str(error) or repr(error)}. "
            "Download the model's tokenizer files again, set `tokenizer` to a folder or hub id that has them, or set "
            "`skip_tokenizer_init=True` and give prompts as token ids"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _load(folder: Path, mode: str, trust_remote_code: bool, cache_dir: Path) -> Any:
    config = _read_object(folder / "tokenizer_config.json")
    if mode == "slow" or (trust_remote_code and "auto_map" in config):
        return _load_auto(folder, use_fast=mode != "slow", trust_remote_code=trust_remote_code)
    if (folder / _FAST_FILE).is_file():
        return _load_fast(folder, config)
    if not any(path.is_file() for pattern in _VOCABULARY_FILES for path in folder.glob(pattern)):
        raise ValueError(f"it has no tokenizer files (none of {_FAST_FILE}, {', '.join(_VOCABULARY_FILES)})")
    converted = _convert(folder, cache_dir)
    if converted is None:
        return _load_auto(folder, use_fast=True, trust_remote_code=trust_remote_code)
    return _load_fast(converted, _read_object(converted / "tokenizer_config.json"))


class _FastFile(msgspec.Struct):
    added_tokens: list[dict[str, Any]] = []


def _load_fast(folder: Path, config: dict[str, Any]) -> Any:
    from transformers import PreTrainedTokenizerFast

    options: dict[str, Any] = {}
    if "added_tokens_decoder" not in config and not any(
        (folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json")
    ):
        # What the library would find out by reading all of tokenizer.json into Python objects: tens of megabytes
        # and, for a large vocabulary, seconds.
        file = msgspec.json.decode((folder / _FAST_FILE).read_bytes(), type=_FastFile)
        options["added_tokens_decoder"] = {token.pop("id"): token for token in file.added_tokens}
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **options)


def _load_auto(folder: Path, *, use_fast: bool, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, use_fast=use_fast, trust_remote_code=trust_remote_code, local_files_only=True
    )


def _convert(folder: Path, cache_dir: Path) -> Path | None:
    """The folder of the converted tokenizer, from the cache or made now; None if it has no fast form."""
    target = cache_dir / "tokenizers" / _identity(folder)
    if (target / _FAST_FILE).is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    try:
        child = subprocess.run(
            [sys.executable, "-m", "vllm_mp.client.convert_tokenizer", str(folder), str(unfinished)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=_CONVERSION_TIMEOUT_S,
            check=False,
        )
        if child.returncode == NO_FAST_TOKENIZER:
            return None
        if child.returncode != 0 or not (unfinished / _FAST_FILE).is_file():
            lines = child.stderr.strip().splitlines() or ["it said nothing"]
            raise ValueError(f"converting it to {_FAST_FILE} failed with exit code {child.returncode}: {lines[-1]}")
        try:
            unfinished.rename(target)
        except OSError:
            # Another process was faster: what it made is the same.
            if not (target / _FAST_FILE).is_file():
                raise
        return target
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _identity(folder: Path) -> str:
    """A name for the content of the files that a conversion may read, and for the library that does it."""
    digest = hashlib.sha256(importlib.metadata.version("transformers").encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in _SOURCE_SUFFIXES and path.is_file():
            content = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:32]


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty without the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds a {type(value).__name__}, not an object")
    return value


def _read_chat_template(chat_template: str) -> str:
    """The template that is given as text or as a path."""
    if any(mark in chat_template for mark in ("{{", "{%", "{#", "\n")):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template={chat_template!r} is neither a Jinja template nor a file that can be read ({error}): "
            "give the text of a template, or the path of one"
        ) from error
