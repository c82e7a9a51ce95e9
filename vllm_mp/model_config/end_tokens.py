"""The tokens that end a completion: those that any file of the model or its tokenizer names."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.model_config.json_file import read_json

logger = logging.getLogger(__name__)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerJson(msgspec.Struct):
    """The part of a tokenizer.json that lists the tokens beside its vocabulary, special tokens among them."""

    added_tokens: list[_AddedToken] = []


def end_token_ids(
    folder: Path,
    tokenizer: Path | None,
    generation: dict[str, Any],
    hf_config: dict[str, Any],
    override: int | list[int] | None,
    vocab_size: int,
) -> list[int]:
    """Return the ids of the tokens that end a completion.

    These are the end-of-sequence tokens of generation_config.json (`generation`), of config.json (`hf_config`), of its
    text_config, and of the folder `tokenizer`: chat models often name the end of a turn in only one of them. `override`
    replaces them all. Ids outside the vocabulary are ignored with a warning, which names `folder`.
    """
    if override is not None:
        named: list[Any] = [override]
    else:
        text_config = hf_config.get("text_config")
        configs = (generation, hf_config, text_config if isinstance(text_config, dict) else {})
        named = [config.get("eos_token_id") for config in configs]
        if tokenizer is not None:
            named.append(_tokenizer_end(tokenizer))
    ids = [
        token_id for value in named if value is not None for token_id in (value if isinstance(value, list) else [value])
    ]
    known = [token_id for token_id in ids if type(token_id) is int and 0 <= token_id < vocab_size]
    if len(known) < len(ids):
        logger.warning(
            "%s: eos_token_id %s has ids outside the vocabulary of %d, which are ignored", folder, ids, vocab_size
        )
    return list(dict.fromkeys(known))


def unnamed_end_token_id(tokenizer: Path | None, end_token_ids: list[int]) -> int | None:
    """Return the end token that the `stop_reason` of a completion does not name, as in vLLM; None if it names each.

    It is the end-of-sequence token of the folder `tokenizer`. If its files do not tell, it is the first of
    `end_token_ids`.
    """
    if tokenizer is None:
        return None
    own = _tokenizer_end(tokenizer)
    return next(iter(end_token_ids), None) if own is None else own


def _tokenizer_end(folder: Path) -> int | None:
    """Return the id of the tokenizer's own end-of-sequence token; None if its files do not tell."""
    settings = read_json(folder / "tokenizer_config.json", dict) or {}
    token = settings.get("eos_token") or (read_json(folder / "special_tokens_map.json", dict) or {}).get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    for token_id, added in (settings.get("added_tokens_decoder") or {}).items():
        if isinstance(added, dict) and added.get("content") == text and str(token_id).isdecimal():
            return int(token_id)
    try:
        added_tokens = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerJson).added_tokens
    except (OSError, msgspec.DecodeError):
        return None
    return next((added.id for added in added_tokens if added.content == text), None)
