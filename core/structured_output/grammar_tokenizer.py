"""The model's vocabulary, in the form that llguidance needs."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_mp.config import ModelConfig
from vllm_mp.core.structured_output.exact_tokenizer import SpecialTokens, exact_tokenizer
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store import cache_root
from vllm_mp.model_store.fast_tokenizer import FAST_FILE, fast_tokenizer_folder

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_CONFIG_FILE = "tokenizer_config.json"
_STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
"""A character of a JSON string that is written as it is."""
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{length}}}" for length in (1, 2, 3, 4, 6, 8, 11, 15, 30)),
    f"{_STRING_CHARACTER}+",
]
"""Kinds of tokens that llguidance allows or forbids together, without looking at each.

Its own slices have only the lengths 10 and 30, so it looks at most tokens where a string's `maxLength` is near.
"""


class TokenizerSource(msgspec.Struct, frozen=True):
    """What a process needs to load the vocabulary of a model."""

    folder: str
    vocab_size: int
    """The model's, which may be more than the tokenizer has; no grammar allows the ids beyond those."""
    eos_token_ids: list[int]
    """The ids that may follow the end of a grammar."""

    @classmethod
    def of(cls, config: ModelConfig) -> "TokenizerSource":
        vocab_size = config.get_vocab_size()
        return cls(config.tokenizer, vocab_size, [token for token in config.eos_token_ids if token < vocab_size])


class GrammarTokenizer:
    """Loads the tokenizer of a model when it is first needed, and shares it. Any thread may call it.

    Loading takes 0.3 s for a vocabulary of 49,000 tokens, in which llguidance holds the interpreter lock.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self.source = source
        self._lock = threading.Lock()
        self._loaded: tuple[LLTokenizer, SpecialTokens] | None = None

    def llguidance(self) -> "LLTokenizer":
        """Return the tokenizer for llguidance. Raises GrammarError if the model has none that it can use."""
        return self._load()[0]

    def special_tokens(self) -> SpecialTokens:
        """Return the special tokens. Raises GrammarError as `llguidance` does."""
        return self._load()[1]

    def _load(self) -> "tuple[LLTokenizer, SpecialTokens]":
        with self._lock:
            if self._loaded is None:
                self._loaded = self._read()
            return self._loaded

    def _read(self) -> "tuple[LLTokenizer, SpecialTokens]":
        from llguidance import LLTokenizer

        source = self.source
        if not source.eos_token_ids:
            raise GrammarError(
                "the model has no end-of-sequence token, without which no structured output ends; set eos_token_id in "
                "its generation_config.json"
            )
        content = self._content()
        eos_token_ids = list(source.eos_token_ids)
        try:
            text, special_tokens = exact_tokenizer(content, eos_token_ids)
            tokenizer = LLTokenizer(text, n_vocab=source.vocab_size, eos_token=eos_token_ids, slices=_SLICES)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._unusable(str(error)) from error
        return tokenizer, special_tokens

    def _content(self) -> dict[str, Any]:
        """Return the tokenizer.json of the model, with all added tokens. Raises GrammarError if it has none."""
        folder = Path(self.source.folder)
        try:
            fast_folder = fast_tokenizer_folder(folder, cache_root())
            if fast_folder is None:
                raise self._unusable("it exists in Python only")
            content = msgspec.json.decode((fast_folder / FAST_FILE).read_bytes(), type=dict[str, Any])
            _add_tokens(content, folder)
            return content
        except GrammarError:
            raise
        except (OSError, ValueError) as error:
            raise self._unusable(str(error)) from error

    def _unusable(self, reason: str) -> GrammarError:
        return GrammarError(
            f"structured output is not possible with the tokenizer in {self.source.folder}: {reason}; set `tokenizer` "
            "to a folder or hub id that has a tokenizer.json"
        )


def _add_tokens(tokenizer: dict[str, Any], folder: Path) -> None:
    """Add the tokens that only tokenizer_config.json lists, as in older folders, to the content of tokenizer.json."""
    config = read_json(folder / _CONFIG_FILE, dict) or {}
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        return
    tokens = tokenizer.get("added_tokens") or []
    known = {token.get("id") for token in tokens}
    missing = [
        {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, **token, "id": int(number)}
        for number, token in added.items()
        if int(number) not in known
    ]
    tokenizer["added_tokens"] = sorted([*tokens, *missing], key=lambda token: token["id"])
