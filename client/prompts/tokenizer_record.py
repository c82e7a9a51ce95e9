"""What transformers makes of a tokenizer's files, recorded in the cache, so that the next start need not import it.

The import of transformers takes longer than anything else in the start of a client. A record is what the library's
tokenizer says of itself after it was loaded, named by the content of all files that it was loaded from and by the
versions of the libraries. So a tokenizer that is made from a record equals that tokenizer, whatever the library does.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vllm_mp.client.prompts.token_length import TokenLength, token_length
from vllm_mp.model_store.fast_tokenizer import FAST_FILE, source_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FORM: Final = 1
"""Version of the records; another one for each change of what they hold."""
_FOLDER: Final = "tokenizer-records"
_TEMPLATE_FOLDER: Final = "additional_chat_templates"
_VERSION: Final = re.compile(r"^__version__ = [\"']([^\"']+)[\"']", re.MULTILINE)


class TokenizerRecord(msgspec.Struct, frozen=True):
    """The state of a tokenizer of transformers that does what the tokenizers library does, without code of its own."""

    tokenizer_json: str | None
    """The library's tokenizer as transformers has changed it; None if it is as the file says."""
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]
    all_special_ids: list[int]
    split_special_tokens: bool
    truncation_side: str
    model_max_length: int
    cleans_up: bool
    """Decoding removes spaces before punctuation unless the caller says otherwise."""
    template_arguments: list[str]
    """The names of the parameters of `apply_chat_template`."""
    token_length: TokenLength | None

    def backend(self, folder: Path) -> Tokenizer:
        """Return the library's tokenizer, without truncation and padding. `folder` has the file."""
        from tokenizers import Tokenizer

        made = self.tokenizer_json
        backend = Tokenizer.from_file(str(folder / FAST_FILE)) if made is None else Tokenizer.from_str(made)
        return _without_limits(backend, self.split_special_tokens)


def record_path(folder: Path, fast_folder: Path, cache_dir: Path) -> Path:
    """Return the path of the record of the tokenizer in `folder`, whose tokenizer.json is in `fast_folder`.

    Raises OSError if a file cannot be read.
    """
    from tokenizers import __version__ as library_version

    digest = hashlib.sha256(f"{_FORM} {transformers_version()} {library_version}".encode())
    for place in dict.fromkeys((folder, fast_folder)):
        for path in [*source_files(place), *sorted((place / _TEMPLATE_FOLDER).glob("*"))]:
            content = path.read_bytes()
            digest.update(f"\0{path.name}\0{len(content)}\0".encode())
            digest.update(content)
    return cache_dir / _FOLDER / f"{digest.hexdigest()[:32]}.json"


def read_record(path: Path) -> TokenizerRecord | None:
    """Return the record in the file `path`; None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def make_record(tokenizer: Any, folder: Path) -> TokenizerRecord | None:
    """Return the record of `tokenizer`, loaded from the tokenizer.json of `folder`; None if it cannot be recorded.

    `tokenizer` has no code of its own.
    """
    from tokenizers import Tokenizer

    if not isinstance(tokenizer.model_max_length, int):
        return None
    splits = bool(tokenizer.split_special_tokens)
    try:
        made = _without_limits(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), splits).to_str()
    except Exception:  # a part that is written in Python cannot be written
        return None
    is_as_in_file = _without_limits(Tokenizer.from_file(str(folder / FAST_FILE)), splits).to_str() == made
    never_cleans_up = type(tokenizer.backend_tokenizer.model).__name__ == "BPE" and not getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True
    )
    return TokenizerRecord(
        tokenizer_json=None if is_as_in_file else made,
        chat_template=tokenizer.chat_template,
        special_tokens_map=dict(tokenizer.special_tokens_map),
        all_special_tokens=list(tokenizer.all_special_tokens),
        all_special_ids=list(tokenizer.all_special_ids),
        split_special_tokens=splits,
        truncation_side=tokenizer.truncation_side,
        model_max_length=tokenizer.model_max_length,
        cleans_up=bool(tokenizer.clean_up_tokenization_spaces) and not never_cleans_up,
        template_arguments=list(inspect.signature(tokenizer.apply_chat_template).parameters),
        token_length=token_length(made),
    )


def write_record(record: TokenizerRecord, path: Path) -> None:
    """Write `record` to the file `path`, unless it cannot be read again as it is.

    Raises OSError if the cache cannot be written, and what the encoding raises.
    """
    content = msgspec.json.encode(record)
    if msgspec.json.decode(content, type=TokenizerRecord) != record:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix=".unfinished-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


@contextlib.contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Collect the warnings that transformers logs: a start from a record would not repeat them."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear, source = Ear(logging.WARNING), logging.getLogger("transformers")
    source.addHandler(ear)
    try:
        yield heard
    finally:
        source.removeHandler(ear)


def transformers_version() -> str:
    """Return the version of transformers, without importing it."""
    spec = importlib.util.find_spec("transformers")
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError), open(spec.origin, encoding="utf-8") as file:
            if found := _VERSION.search(file.read()):
                return found[1]
    from importlib.metadata import version  # which takes a while

    return version("transformers")


def _without_limits(backend: Tokenizer, splits_special_tokens: bool) -> Tokenizer:
    """Return `backend`, changed, with neither truncation nor padding."""
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = splits_special_tokens
    return backend
