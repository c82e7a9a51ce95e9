"""Following a compiled grammar along a text."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError, Matcher
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import LLGuidanceLibrary
from vllm_mp.requests.structured_outputs import Constraint


@dataclass
class Library:
    """The library that compiles constraints, with the tokenizer of a model."""

    source: TokenizerSource
    library: LLGuidanceLibrary
    grammar_tokenizer: GrammarTokenizer

    @classmethod
    def load(cls, source: TokenizerSource) -> "Library":
        return cls(source, LLGuidanceLibrary(source), GrammarTokenizer(source))

    @property
    def tokenizer(self) -> Any:
        return self.grammar_tokenizer.llguidance()

    @property
    def eos(self) -> int:
        return self.source.eos_token_ids[0]

    def compile(self, constraint: Constraint) -> Grammar:
        return self.library.compile_constraint(constraint)[1]

    def refusal(self, constraint: Constraint) -> str:
        """Return the error of a constraint that must be refused."""
        try:
            self.compile(constraint)
        except GrammarError as error:
            return str(error)
        raise AssertionError(f"{constraint} is accepted")

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of `text`, the special tokens in it included."""
        pieces = self.grammar_tokenizer.special_tokens().split(text)
        tokens = [[piece] if isinstance(piece, int) else self.tokenizer.tokenize_str(piece) for piece in pieces]
        return list(itertools.chain.from_iterable(tokens))

    def spelled(self, constraint: Constraint) -> str:
        """Return the text that a constraint with a single text forces, as the model's tokenizer decodes it."""
        matcher = self.compile(constraint).matcher()
        backend = Tokenizer.from_file(f"{self.source.folder}/tokenizer.json")
        tokens: list[int] = []
        while allowed := self.allowed(matcher) - {*self.source.eos_token_ids}:
            tokens.append(min(allowed))
            matcher.accept(tokens[-1:])
        return backend.decode(tokens, skip_special_tokens=True)

    def allowed(self, matcher: Matcher) -> set[int]:
        """Return the tokens that a matcher's mask allows."""
        mask = np.full((self.source.vocab_size + 31) // 32, -1, np.int32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def allows(self, constraint: Constraint, text: str) -> bool:
        """Whether a grammar allows `text` and its end. What a mask allows must be accepted.

        A mask may forbid what is accepted: a forced text has one form in tokens only, which may not be that of `text`.
        """
        matcher = self.compile(constraint).matcher()
        for token in [*self.tokens(text), self.eos]:
            is_allowed = token in self.allowed(matcher)
            try:
                matcher.accept([token])
            except GrammarError:
                assert not is_allowed, f"the mask allows {token} in {text!r}, and accept refuses it"
                return False
        return True
