"""Compiled constraints and their matchers, which wrap those of llguidance.

The library parses the output and computes each mask when it is needed, without tables made in advance.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.int32]
"""[num_words]: bit t % 32 of word t // 32 is set if token t is allowed; num_words covers the model's vocabulary."""

_MAX_ERROR = 1000
"""Maximum length of the library's part of an error, in characters."""
_SCHEMA_ERROR = "failed to compile JSON schema: "
"""What stands before an error in a schema; behind it stands an excerpt of the grammar that was made of the schema."""


class GrammarError(ValueError):
    """A constraint cannot be compiled, or its matcher has reached a limit; the message says where and why."""


class Matcher:
    """Where the output of a request stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", eos_token_ids: frozenset[int], num_words: int) -> None:
        self.library_matcher = matcher
        """The library's object, which `masks` fills several masks of at a time."""
        self._eos_token_ids = eos_token_ids
        self.num_words = num_words

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by `tokens`, the end-of-sequence token included. Raises GrammarError if the grammar forbids one."""
        for position, token in enumerate(tokens):
            if not self.library_matcher.consume_token(token):
                raise GrammarError(
                    f"token {token} at position {position} is not allowed: {library_error(self.library_matcher)}"
                )

    def fill(self, mask: Mask) -> None:
        """Write the tokens that may come next into `mask` [num_words]. Raises GrammarError if a limit is reached."""
        words = mask
        if len(mask) > self.num_words:
            mask[self.num_words :] = 0
            words = mask[: self.num_words]
        self.library_matcher.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)
        self.check()

    def fill_ahead(self, drafts: Sequence[int], masks: npt.NDArray[np.int32]) -> None:
        """Write the tokens that may follow each of `drafts` [n] into `masks` [n, num_words], and stay where it is.

        A mask of zeros stays as it is from the first draft on that the grammar forbids, or with which a limit is
        reached.
        """
        ahead = Matcher(self.library_matcher.deep_copy(), self._eos_token_ids, self.num_words)
        try:
            for token, mask in zip(drafts, masks, strict=True):
                ahead.accept([token])
                ahead.fill(mask)
        except GrammarError:
            mask[:] = 0

    def num_allowed(self, tokens: list[int]) -> int:
        """Return how many of `tokens`, from the first, the grammar allows one after another."""
        count: int = self.library_matcher.validate_tokens(tokens)
        return count

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because the grammar allows a single continuation; often none.

        The end-of-sequence token is never among them.
        """
        tokens = self.library_matcher.compute_ff_tokens()
        for position, token in enumerate(tokens):
            if token in self._eos_token_ids:
                return tokens[:position]
        return tokens

    def forced_bytes(self) -> bytes:
        """Return the text in UTF-8 that must come next, because the grammar allows a single continuation."""
        text: bytes = self.library_matcher.compute_ff_bytes()
        return text

    def check(self) -> None:
        """Raise GrammarError if a mask could not be computed; the library then allows the end of the output."""
        if self.library_matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed further: {library_error(self.library_matcher)}")


class Grammar:
    """A compiled constraint, which requests share, and the states of its lexer, which all its matchers extend."""

    def __init__(
        self,
        matcher: "LLMatcher",
        tokenizer: "LLTokenizer",
        num_bytes: int,
        eos_token_ids: frozenset[int],
        num_words: int,
    ) -> None:
        self.num_bytes = num_bytes
        """Host memory that it takes, estimated."""
        self._first = matcher
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._num_words = num_words

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        return Matcher(self._first.deep_copy(), self._eos_token_ids, self._num_words)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Return the text of `tokens` in UTF-8; a token may have a part of a character."""
        text: bytes = self._tokenizer.decode_bytes(list(tokens))
        return text

    def tokens_of(self, text: bytes) -> list[int]:
        """Return tokens that have the text `text`."""
        tokens: list[int] = self._tokenizer.tokenize_bytes(text)
        return tokens


def library_error(matcher: "LLMatcher") -> str:
    """Return the error of the library in one line."""
    text = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    if (schema_error := text.find(_SCHEMA_ERROR)) >= 0:
        text = re.sub(r"\n *\d+ \| .*", "", text[schema_error + len(_SCHEMA_ERROR) :], flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text).strip()
    return text[:_MAX_ERROR] or matcher.stop_reason()
