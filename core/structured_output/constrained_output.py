"""The output of a request that must match a constraint."""

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError, Matcher
from vllm_mp.requests.structured_outputs import Constraint

OutputIds = npt.NDArray[np.int32]
"""[num_output_tokens]: the output tokens of a request so far."""


class ConstrainedOutput:
    """Where the output of a request stands in its grammar.

    The state follows from the output tokens alone, so preemption and recovery save nothing of it. A grammar that fails
    sets `error`; then no token may follow, and the request ends with this error.
    """

    def __init__(self, constraint: Constraint, may_force: bool) -> None:
        """`may_force`: tokens that the grammar forces may be taken without being sampled."""
        self.constraint = constraint
        self.error: str | None = None
        self._may_force = may_force
        self._matcher: Matcher | None = None
        self._num_seen = 0
        """Number of output tokens that were read."""
        self._end: _ReasoningEnd | None = None
        self._has_begun = not constraint.starts_after

    @property
    def is_compiled(self) -> bool:
        return self._matcher is not None

    @property
    def also_allowed(self) -> int | None:
        """The token that may come next although the matcher may forbid it: it begins the reasoning. None: no token."""
        return self.constraint.reasoning_start if self._may_begin_reasoning else None

    def begin(self, grammar: Grammar) -> None:
        """Use `grammar`, which the constraint was compiled to. It must be called before the request first runs."""
        self._matcher = grammar.matcher()
        self._end = _ReasoningEnd(self.constraint.starts_after, grammar)

    def matcher_after(self, output: OutputIds) -> Matcher | None:
        """Return the matcher that says which tokens may follow `output`.

        None if every token may follow, or after an error.
        """
        self._catch_up(output)
        if self.error is not None or not (self._has_begun or self._may_begin_reasoning):
            return None
        return self._running_matcher()

    def forced(self, output: OutputIds) -> list[int]:
        """Return the tokens that must follow `output`, if they may be taken without being sampled."""
        if not self._may_force:
            return []
        self._catch_up(output)
        if self.error is not None or not self._has_begun:
            return []
        return self._running_matcher().forced()

    def num_allowed(self, output: OutputIds, drafts: list[int]) -> int:
        """Return how many of `drafts`, from the first, may follow `output` one after another.

        None follows the first token that may decide whether there is reasoning, or that may end the reasoning.
        """
        self._catch_up(output)
        if self.error is not None or self._may_begin_reasoning:
            return 0
        if not self._has_begun:
            return self._reasoning_end().num_before(drafts)
        return self._running_matcher().num_allowed(drafts)

    @property
    def _may_begin_reasoning(self) -> bool:
        """Whether the first token decides if there is reasoning."""
        return not self._has_begun and self._num_seen == 0 and self.constraint.reasoning_start >= 0

    def _catch_up(self, output: OutputIds) -> None:
        """Read the tokens of `output` that were not read yet."""
        new: list[int] = output[self._num_seen :].tolist()
        if new and self._may_begin_reasoning:
            self._has_begun = new[0] != self.constraint.reasoning_start
        self._num_seen += len(new)
        if not self._has_begun:
            after = self._reasoning_end().tokens_after(new)
            self._has_begun = after is not None
            new = after or []
        if new and self.error is None:
            try:
                self._running_matcher().accept(new)
            except GrammarError as error:
                self.error = str(error)

    def _running_matcher(self) -> Matcher:
        assert self._matcher is not None, "a request waits until its grammar is compiled"
        return self._matcher

    def _reasoning_end(self) -> "_ReasoningEnd":
        assert self._end is not None, "a request waits until its grammar is compiled"
        return self._end


class _ReasoningEnd:
    """Finds the end of the reasoning among the output tokens as they come.

    An end of a single token is that token. One of several tokens is found by its text, because its last characters may
    be in one token with what follows them.
    """

    def __init__(self, end: Sequence[int], grammar: Grammar) -> None:
        text = grammar.bytes_of(end) if len(end) > 1 else b""
        self._grammar = grammar
        self._end = end
        self._text = text.strip() or text
        """Empty if the last token of the end is searched for."""
        self._tail = b""
        """The end of the text so far, in which `_text` may have begun."""

    def tokens_after(self, new: Sequence[int]) -> list[int] | None:
        """Read `new`; return the tokens that follow the end of the reasoning, None if it does not end in `new`.

        They begin with tokens for the text that follows the end in the same token, without whitespace before it.
        """
        for count, token in enumerate(new, 1):
            rest = self._read(token)
            if rest is not None:
                return [*(self._grammar.tokens_of(rest) if rest else ()), *new[count:]]
        return None

    def num_before(self, drafts: Sequence[int]) -> int:
        """Return how many of `drafts` come before the one that ends the reasoning; all if none does."""
        ahead = copy.copy(self)
        return next((i for i, draft in enumerate(drafts) if ahead._read(draft) is not None), len(drafts))

    def _read(self, token: int) -> bytes | None:
        """Read `token`; return the text that follows the end of the reasoning in it, None if the reasoning goes on."""
        if not self._text:
            return b"" if token == self._end[-1] else None
        text = self._tail + self._grammar.bytes_of([token])
        _, end, rest = text.partition(self._text)
        self._tail = text[max(len(text) - len(self._text) + 1, 0) :]
        return rest.lstrip() if end else None
