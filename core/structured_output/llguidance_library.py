"""Compiling of constraints with llguidance."""

import logging
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError, library_error
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.lark import Additions, lark_grammar
from vllm_mp.core.structured_output.schema.completed_error import completed_error
from vllm_mp.core.structured_output.structural_tag import structural_tag_grammar
from vllm_mp.requests.structured_outputs import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

logger = logging.getLogger(__name__)

_MAX_LEXER_STATES = 50_000
"""Bounds the memory that a compiled grammar may take while it is used: a state takes 1 to 2 kB."""
_MAX_TEXT = 2**22
"""Maximum length of a grammar, in characters. The rules for large numbers are longer than their schema."""
_MIN_BYTES = 2**16
_BYTES_PER_CHARACTER = 160
"""Memory of a grammar per character of its text: measured at up to 155 for thousands of alternatives."""

_NO_CONTINUATION = "NoExtension"
"""What the library says if no token may come next."""


class PreparedConstraint(msgspec.Struct, frozen=True):
    """A constraint as a grammar in Lark's notation, so that compiling it needs no Python."""

    text: str
    notes: tuple[str, ...] = ()
    """Lines for the log about what is not enforced. The process in which constraints are tried has no log."""


class LLGuidanceLibrary:
    """Compiles constraints for the tokenizer of a model. Any thread may call it.

    The library releases the interpreter lock while it compiles.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._tokenizer = GrammarTokenizer(source)

    def load(self) -> None:
        """Import the library and load the tokenizer, which the first compilation does otherwise.

        Raises GrammarError if the library cannot use the tokenizer.
        """
        self._tokenizer.llguidance()

    def compile_constraint(self, constraint: Constraint) -> tuple[PreparedConstraint, Grammar]:
        """Prepare and compile a constraint.

        Raises GrammarError if that fails, with the path in a JSON schema if it is known.
        """
        try:
            prepared = self.prepare(constraint)
            return prepared, self.compile(prepared)
        except GrammarError as error:
            raise GrammarError(completed_error(str(error), constraint)) from error

    def prepare(self, constraint: Constraint) -> PreparedConstraint:
        """Return what `compile` takes. Raises GrammarError if the library cannot hold output to the constraint."""
        added = Additions()
        if constraint.kind == "structural_tag":
            text = structural_tag_grammar(constraint, self._tokenizer.special_tokens(), added)
        else:
            text = lark_grammar(constraint, self._tokenizer.special_tokens(), added)
        if len(text) > _MAX_TEXT:
            raise GrammarError(f"the constraint is too large: its grammar has {len(text)} characters; simplify it")
        return PreparedConstraint(text, tuple(added.notes))

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        """Return the grammar of what `prepare` returned, and log its notes. Raises GrammarError if that fails."""
        from llguidance import LLMatcher

        source, tokenizer = self._tokenizer.source, self._tokenizer.llguidance()
        matcher = LLMatcher(tokenizer, prepared.text, log_level=0, limits=_limits())
        num_words = (source.vocab_size + 31) // 32
        num_bytes = _MIN_BYTES + _BYTES_PER_CHARACTER * len(prepared.text)
        compiled = Grammar(matcher, tokenizer, num_bytes, frozenset(source.eos_token_ids), num_words)
        if matcher.is_error():
            raise GrammarError(library_error(matcher))
        # The first mask finds grammars that match nothing, and makes states that every matcher needs.
        mask = np.zeros(num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], mask.nbytes)
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(_no_text(matcher))
        for note in prepared.notes:
            logger.warning("%s", note)
        return compiled


def _limits() -> "LLParserLimits":
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _no_text(matcher: "LLMatcher") -> str:
    """Return the error of a grammar that matches nothing; the library's reason for it is none."""
    reason = library_error(matcher)
    text = "the constraint matches no text that ends: a part of it may need itself again and again"
    return text if _NO_CONTINUATION in reason else f"the constraint matches no text: {reason}"
