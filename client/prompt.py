"""The forms of a prompt that callers may pass, and their validation."""

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import numpy as np


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""
    multi_modal_data: Any
    """Not served yet."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text is only repeated in the outputs."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""
    multi_modal_data: Any
    """Not served yet."""


_MAX_SALT = 1024
"""Maximum number of characters of a `cache_salt`."""

PromptType = str | Sequence[int] | TextPrompt | TokensPrompt


class ParsedPrompt(NamedTuple):
    """Text to tokenize, or token ids. If both are given, the text is only repeated in the outputs."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""


def parse_prompt(prompt: Any, prompt_token_ids: Any = None) -> ParsedPrompt:
    """Parse any form of prompt; `prompt_token_ids` are its token ids unless `prompt` has its own.

    Raises TypeError or ValueError, naming the fault, for other types, missing or unknown parts and text that is not
    valid Unicode, and NotImplementedError for parts that are not served.
    """
    text: Any = None
    ids: Any = prompt_token_ids
    salt: Any = ""
    if isinstance(prompt, dict):
        unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}
        if unknown:
            raise ValueError(f"a prompt has no field {sorted(unknown)[0]!r}; give 'prompt' or 'prompt_token_ids'")
        if prompt.get("multi_modal_data"):
            raise NotImplementedError("multi_modal_data is not served yet; leave it out")
        text = prompt.get("prompt")
        salt = prompt.get("cache_salt") or ""
        ids = prompt.get("prompt_token_ids", ids)
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, bytes | bytearray):
        raise TypeError("the prompt is bytes; decode it to str first")
    elif prompt is not None:
        ids = prompt
    if text is None and ids is None:
        raise ValueError("the prompt has neither text nor token ids; give one of them")
    if not isinstance(salt, str) or len(salt) > _MAX_SALT:
        raise ValueError(f"cache_salt must be a str of at most {_MAX_SALT} characters, got {salt!r:.100}")
    return ParsedPrompt(
        None if text is None else _check_text("the prompt", text),
        None if ids is None else check_token_ids(ids),
        _check_text("cache_salt", salt),
    )


def _check_text(name: str, text: Any) -> str:
    """Return `text` if it is valid Unicode. Raises TypeError or ValueError with `name`."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} is not valid Unicode: {text[error.start]!r} at character {error.start} is half of a "
            "surrogate pair; decode the bytes that it came from as UTF-8"
        ) from error
    return text


def check_token_ids(ids: Any) -> list[int]:
    """Return `ids` as a list; raises TypeError or ValueError unless they are token ids."""
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths; the next check refuses the text
        array = np.asarray(["lists of different lengths"])
    if array.size == 0 and array.ndim == 1:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"prompt_token_ids must be one list of integers, got {reprlib.repr(ids)}")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"prompt_token_ids must be in the model's vocabulary, got {array.min()} to {array.max()}")
    result: list[int] = array.tolist()
    return result
