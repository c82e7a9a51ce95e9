"""The interface between the scheduler and the libraries that hold output to a grammar."""

import logging
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.requests.structured_outputs import Constraint

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.int32]
"""[num_words]: bit t % 32 of word t // 32 is set if token t is allowed; num_words covers the model's vocabulary."""


class GrammarError(ValueError):
    """A constraint cannot be compiled, or its matcher has reached a limit; the message says where and why."""


class Matcher(Protocol):
    """Where the output of a request stands in its grammar."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by `tokens`, the end-of-sequence token included. Raises GrammarError if the grammar forbids one."""
        ...

    def fill(self, mask: Mask) -> None:
        """Write the tokens that may come next into `mask` [num_words]. Raises GrammarError if a limit is reached."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must come next, because the grammar allows a single continuation; often none.

        The end-of-sequence token is never among them.
        """
        ...


class Grammar(Protocol):
    """A compiled constraint, which is never changed and which requests share."""

    num_bytes: int
    """Host memory that it takes, estimated."""

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of the output."""
        ...


class PreparedConstraint(msgspec.Struct, frozen=True):
    """A constraint in the form in which a library takes it, so that compiling needs no Python."""

    backend: Literal["llguidance", "xgrammar"]
    text: str
    form: Literal["lark", "json", "regex", "ebnf", "structural_tag"]
    any_whitespace: bool = True
    additional_properties: bool = True
    notes: tuple[str, ...] = ()
    """Lines for the log about what is not enforced."""

    def log_notes(self) -> None:
        """Write the notes to the log. The process in which constraints are tried has no log."""
        for note in self.notes:
            logger.warning("%s", note)


class Backend(Protocol):
    """A library that compiles constraints. Any thread may call it."""

    def load(self) -> None:
        """Import the library and load the tokenizer, which `compile` does otherwise.

        Raises GrammarError if the library cannot use the tokenizer.
        """
        ...

    def prepare(self, constraint: Constraint) -> PreparedConstraint:
        """Return what `compile` takes. Raises GrammarError if the library does not have what the constraint needs."""
        ...

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        """Return the grammar of a constraint. Raises GrammarError if it cannot be compiled."""
        ...
