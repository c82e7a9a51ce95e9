"""Loading a model's tokenizer from its folder: without torch, and without transformers if a record of it is there."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_mp.client.prompts.microbatch_tokenizer import is_plain
from vllm_mp.client.prompts.model_tokenizer import ModelTokenizer
from vllm_mp.client.prompts.tokenizer_record import (
    heard_warnings,
    make_record,
    read_record,
    record_path,
    write_record,
)
from vllm_mp.config import ModelConfig
from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store import NO_TOKENIZER_FILE, cache_root, resolve_model
from vllm_mp.model_store.fast_tokenizer import FAST_FILE, fast_tokenizer_folder, known_fast_folder
from vllm_mp.model_store.tokenizer_files import PROCESSOR_TEMPLATE_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_import_lock = threading.Lock()
"""transformers loads its parts when they are first imported, which fails in two threads at a time."""
_CONFIG_FILE = "tokenizer_config.json"


def load_model_tokenizer(config: ModelConfig) -> Any:
    """Return the tokenizer that a client works with, or None with skip_tokenizer_init.

    It is a `ModelTokenizer` if the cache has a record of the tokenizer, and else what `load_awaitable_tokenizer`
    returns, which is then recorded if it can be. Raises what `load_tokenizer` raises.
    """
    if config.skip_tokenizer_init:
        return None
    folder = Path(config.tokenizer)
    if config.tokenizer_mode == "auto" and not config.trust_remote_code:
        _check_folder(folder)
        tokenizer = _recorded_tokenizer(folder, cache_root(), functools.partial(load_awaitable_tokenizer, config))
        if tokenizer is not None:
            if config.chat_template is not None:
                tokenizer.chat_template = config.chat_template
            return tokenizer
    return load_awaitable_tokenizer(config)


def load_awaitable_tokenizer(config: ModelConfig) -> Any:
    """Return the model's tokenizer of transformers, or None with skip_tokenizer_init; raise as `load_tokenizer` does.

    `await` on the tokenizer returns the tokenizer, because callers of vLLM's older `get_tokenizer` await its result.
    """
    if config.skip_tokenizer_init:
        return None
    tokenizer = load_tokenizer(
        Path(config.tokenizer),
        mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        cache_dir=cache_root(),
    )
    return make_awaitable(tokenizer)


def make_awaitable(tokenizer: Any) -> Any:
    """Return `tokenizer`, on which `await` returns the tokenizer itself."""
    kind = type(tokenizer)

    def wait(self: Any) -> Generator[Any, None, Any]:
        yield from ()
        return self

    tokenizer.__class__ = type(kind.__name__, (kind,), {"__await__": wait, "__module__": kind.__module__})
    return tokenizer


def load_tokenizer(
    folder: Path,
    *,
    mode: str = "auto",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    cache_dir: Path,
) -> PreTrainedTokenizerBase:
    """Load the `transformers` tokenizer of a local folder.

    A folder without tokenizer.json is converted once, in a process of its own. This process loads torch only for a
    tokenizer that exists in Python alone, for a tokenizer with its own code, and with mode "slow".

    Args:
        folder: the folder of the tokenizer's files.
        mode: "auto" prefers the fast tokenizer, "slow" asks `AutoTokenizer` for the Python tokenizer.
        trust_remote_code: run the code in the folder, if its tokenizer has any.
        chat_template: a Jinja template that replaces the folder's own.
        cache_dir: the folder of converted tokenizers, which are named by the content of their source files.

    Raises:
        ValueError: `mode` is unknown, the folder holds no tokenizer that can be loaded, or the working folder was
            removed. The message names the folder, the cause and the remedy.
    """
    if mode not in ("auto", "slow"):
        raise ValueError(f"tokenizer_mode must be 'auto' or 'slow', got {mode!r}")
    _check_folder(folder)
    try:
        with heard_warnings() as warnings:
            tokenizer = _load(folder, mode, trust_remote_code, cache_dir)
            use_processor_template(tokenizer, folder)
        if mode == "auto" and not trust_remote_code and not warnings:
            _record(tokenizer, folder, cache_dir)
    except Exception as error:
        raise ValueError(
            f"cannot load a tokenizer from {folder}: {str(error) or repr(error)}. "
            "Download the model's tokenizer files again, set `tokenizer` to a folder or hub id that has them, or set "
            "`skip_tokenizer_init=True` and give prompts as token ids"
        ) from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _check_folder(folder: Path) -> None:
    """Raise ValueError, with the remedy, if `folder` or the working folder does not exist."""
    # Our worker thread is fast enough. If the library had threads too, it would warn whenever the user's app forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not folder.is_dir():
        raise ValueError(
            f"tokenizer folder {folder} does not exist: set `tokenizer` to an existing folder, or to a hub id"
        )
    try:
        os.getcwd()  # libraries that load files ask for it
    except FileNotFoundError as error:
        raise ValueError("the working folder of this process was removed: change to a folder that exists") from error


def _recorded_tokenizer(folder: Path, cache_dir: Path, load: Callable[[], Any]) -> ModelTokenizer | None:
    """Return the tokenizer of `folder` as it was recorded; None if there is no record that fits the files.

    `load` returns the tokenizer of transformers.
    """
    if (folder / NO_TOKENIZER_FILE).is_file():
        return None
    try:
        fast_folder = known_fast_folder(folder, cache_dir)
        if fast_folder is None:
            return None
        record = read_record(record_path(folder, fast_folder, cache_dir))
        return None if record is None else ModelTokenizer(record, record.backend(fast_folder), load)
    except Exception:  # the loading by transformers says what is wrong with the files
        logger.debug("the tokenizer cannot be made from its record", exc_info=True)
        return None


def _record(tokenizer: Any, folder: Path, cache_dir: Path) -> None:
    """Record `tokenizer`, loaded from `folder`, unless it runs code of its own; the next start then takes less time."""
    try:
        fast_folder = known_fast_folder(folder, cache_dir)
        if fast_folder is None or not is_plain(tokenizer):
            return
        path = record_path(folder, fast_folder, cache_dir)
        if read_record(path) is None and (record := make_record(tokenizer, fast_folder)) is not None:
            write_record(record, path)
    except Exception:  # such as a cache that cannot be written
        logger.debug("the tokenizer cannot be recorded", exc_info=True)


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model that is named as `AsyncEngineArgs.model` names it, fetching its files if need be.

    Raises what `resolve_model` and `load_tokenizer` raise.
    """
    folder = resolve_model(tokenizer_name, revision=revision, download_dir=download_dir, load_format="tokenizer")
    return load_tokenizer(folder, mode=tokenizer_mode, trust_remote_code=trust_remote_code, cache_dir=cache_root())


def _load(folder: Path, mode: str, trust_remote_code: bool, cache_dir: Path) -> Any:
    """Load the tokenizer of `folder` in the way that needs the least. Raises any error for a damaged folder."""
    if (reason := folder / NO_TOKENIZER_FILE).is_file():
        raise ValueError(reason.read_text())
    config = read_json(folder / _CONFIG_FILE, dict) or {}
    if mode == "slow" or (trust_remote_code and "auto_map" in config):
        return _load_auto(folder, use_fast=mode != "slow", trust_remote_code=trust_remote_code)
    fast_folder = fast_tokenizer_folder(folder, cache_dir)
    if fast_folder is None:
        return _load_auto(folder, use_fast=True, trust_remote_code=trust_remote_code)
    return load_fast_tokenizer(fast_folder)


class _FastFile(msgspec.Struct):
    """The part of a tokenizer.json that is read here."""

    added_tokens: list[dict[str, Any]] = []


def load_fast_tokenizer(folder: Path) -> Any:
    """Load the tokenizer.json of `folder`; no code in the folder runs. Raises any error for a damaged folder."""
    # Without torch, transformers advises to install it, which a client need not.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    with _import_lock:
        from transformers import PreTrainedTokenizerFast

    config = read_json(folder / _CONFIG_FILE, dict) or {}
    options: dict[str, Any] = {}
    if "added_tokens_decoder" not in config and not any(
        (folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json")
    ):
        # Without this option the library reads all of tokenizer.json into Python objects: tens of megabytes and, for a
        # large vocabulary, seconds.
        file = msgspec.json.decode((folder / FAST_FILE).read_bytes(), type=_FastFile)
        options["added_tokens_decoder"] = {token.pop("id"): token for token in file.added_tokens}
    return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **options)


def use_processor_template(tokenizer: Any, folder: Path) -> None:
    """Give a `tokenizer` without a chat template that of the processor in `folder`.

    Older folders of models with images have their template there alone. Raises ValueError for a file that is not JSON.
    """
    for name in PROCESSOR_TEMPLATE_FILES:
        if tokenizer.chat_template:
            return
        template = (read_json(folder / name, dict) or {}).get("chat_template")
        if isinstance(template, str):
            tokenizer.chat_template = template


def _load_auto(folder: Path, *, use_fast: bool, trust_remote_code: bool) -> Any:
    """Load the tokenizer as transformers chooses it, which loads torch."""
    with _import_lock:
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, use_fast=use_fast, trust_remote_code=trust_remote_code, local_files_only=True
    )
