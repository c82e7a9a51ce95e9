"""Grammars of llguidance, which parses the output and computes the masks without tables made in advance."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_mp.core.structured_output.grammar import GrammarError, Mask, PreparedConstraint
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer
from vllm_mp.core.structured_output.libraries.lark import Additions, lark_grammar
from vllm_mp.core.structured_output.libraries.structural_tag import structural_tag_grammar
from vllm_mp.requests.structured_outputs import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_MAX_LEXER_STATES = 50_000
"""Bounds the memory that a compiled grammar may take while it is used: a state takes 1 to 2 kB."""
_MAX_TEXT = 2**22
"""Maximum length of a grammar, in characters. The rules for large numbers are longer than their schema."""
_MIN_BYTES = 2**16
_BYTES_PER_CHARACTER = 160
"""Memory of a grammar per character of its text: measured at up to 155 for thousands of alternatives."""
_MAX_ERROR = 1000
"""Maximum length of the library's part of an error, in characters."""
_SCHEMA_ERROR = "failed to compile JSON schema: "
"""What stands before an error in a schema; behind it stands an excerpt of the grammar that was made of the schema."""

_NO_CONTINUATION = "NoExtension"
"""What the library says if no token may come next."""


class LLGuidanceMatcher:
    """Where the output of a request stands in its grammar."""

    def __init__(self, matcher: "LLMatcher", eos_token_ids: frozenset[int], num_words: int) -> None:
        self.library_matcher = matcher
        """The library's object, which `masks` fills several masks of at a time."""
        self._eos_token_ids = eos_token_ids
        self.num_words = num_words

    def accept(self, tokens: Sequence[int]) -> None:
        matcher = self.library_matcher
        for position, token in enumerate(tokens):
            if not matcher.consume_token(token):
                raise GrammarError(f"token {token} at position {position} is not allowed: {_error_of(matcher)}")

    def fill(self, mask: Mask) -> None:
        words = mask
        if len(mask) > self.num_words:
            mask[self.num_words :] = 0
            words = mask[: self.num_words]
        self.library_matcher.unsafe_compute_mask_ptr(words.__array_interface__["data"][0], words.nbytes)
        self.check()

    def forced(self) -> list[int]:
        tokens = self.library_matcher.compute_ff_tokens()
        for position, token in enumerate(tokens):
            if token in self._eos_token_ids:
                return tokens[:position]
        return tokens

    def check(self) -> None:
        """Raise GrammarError if a mask could not be computed; the library then allows the end of the output."""
        if self.library_matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed further: {_error_of(self.library_matcher)}")


class LLGuidanceGrammar:
    """A grammar, and the states of its lexer, which all its matchers share and extend."""

    def __init__(self, matcher: "LLMatcher", num_bytes: int, eos_token_ids: frozenset[int], num_words: int) -> None:
        self.num_bytes = num_bytes
        self._first = matcher
        self._eos_token_ids = eos_token_ids
        self.num_words = num_words

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._first.deep_copy(), self._eos_token_ids, self.num_words)


class LLGuidanceBackend:
    """Compiles constraints with llguidance, which releases the interpreter lock meanwhile."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer

    def load(self) -> None:
        self._tokenizer.llguidance()

    def prepare(self, constraint: Constraint) -> PreparedConstraint:
        """Return the constraint as a grammar in Lark's notation. Raises GrammarError if it has none."""
        added = Additions()
        if constraint.kind == "structural_tag":
            text = structural_tag_grammar(constraint, self._split, added)
        else:
            text = lark_grammar(constraint, added)
        if len(text) > _MAX_TEXT:
            raise GrammarError(f"the constraint is too large: its grammar has {len(text)} characters; simplify it")
        return PreparedConstraint("llguidance", text, "lark", notes=tuple(added.notes))

    def compile(self, prepared: PreparedConstraint) -> LLGuidanceGrammar:
        """Return the grammar of a constraint. Raises GrammarError if it cannot be compiled."""
        from llguidance import LLMatcher

        source = self._tokenizer.source
        matcher = LLMatcher(self._tokenizer.llguidance(), prepared.text, log_level=0, limits=_limits())
        num_words = (source.vocab_size + 31) // 32
        compiled = LLGuidanceGrammar(
            matcher, _MIN_BYTES + _BYTES_PER_CHARACTER * len(prepared.text), frozenset(source.eos_token_ids), num_words
        )
        if matcher.is_error():
            raise GrammarError(_error_of(matcher))
        # The first mask finds grammars that match nothing, and makes states that every matcher needs.
        mask = np.zeros(num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if matcher.is_error():
            raise GrammarError(_no_text(matcher))
        if matcher.is_stopped() and not matcher.is_accepting():
            raise GrammarError(_no_text(matcher))
        prepared.log_notes()
        return compiled

    def _split(self, text: str) -> list[str | int]:
        """Split a text at the model's special tokens, which are returned by id."""
        tokenizer = self._tokenizer.llguidance()
        pieces: list[str | int] = []
        plain: list[int] = []
        for token in [*tokenizer.tokenize_str(text, parse_special=True), -1]:
            if token >= 0 and not tokenizer.is_special_token(token):
                plain.append(token)
                continue
            if plain:
                pieces.append(tokenizer.decode_bytes(plain).decode())
                plain = []
            if token >= 0:
                pieces.append(token)
        return pieces if any(isinstance(piece, int) for piece in pieces) else [text] if text else []


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _no_text(matcher: "LLMatcher") -> str:
    """Return the error of a grammar that matches nothing; the library's reason for it is none."""
    reason = _error_of(matcher)
    text = "the constraint matches no text that ends: a part of it may need itself again and again"
    return text if _NO_CONTINUATION in reason else f"the constraint matches no text: {reason}"


def _error_of(matcher: "LLMatcher") -> str:
    """Return the library's error in one line."""
    text = matcher.get_error().split("<state>")[0].replace("<non-verbose/>", "")
    if (schema_error := text.find(_SCHEMA_ERROR)) >= 0:
        text = re.sub(r"\n *\d+ \| .*", "", text[schema_error + len(_SCHEMA_ERROR) :], flags=re.DOTALL)
    text = re.sub(r"\s+", " ", text).strip()
    return text[:_MAX_ERROR] or matcher.stop_reason()
