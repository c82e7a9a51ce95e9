"""A grammar of token sequences, in place of those that libraries compile from texts."""

from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.requests.structured_outputs import Constraint

CONSTRAINT = Constraint("grammar", "a stand-in")


class SequenceGrammar:
    """Allows each of `sequences` of token ids, then the token `end` for ever."""

    def __init__(self, sequences, end=0):
        self.sequences = [list(sequence) for sequence in sequences]
        self.end = end

    def matcher(self):
        return SequenceMatcher(self)


class SequenceMatcher:
    def __init__(self, grammar):
        self.grammar = grammar
        self.read = []

    def allowed(self, read):
        going_on = {
            sequence[len(read)]
            for sequence in self.grammar.sequences
            if sequence[: len(read)] == read and len(sequence) > len(read)
        }
        complete = any(
            read[: len(s)] == s and set(read[len(s) :]) <= {self.grammar.end} for s in self.grammar.sequences
        )
        return going_on | ({self.grammar.end} if complete else set())

    def accept(self, tokens):
        for token in tokens:
            if token not in self.allowed(self.read):
                raise GrammarError(f"token {token} is forbidden after {self.read}")
            self.read.append(token)

    def fill(self, mask):
        mask[:] = 0
        for token in self.allowed(self.read):
            mask[token // 32] |= 1 << token % 32 if token % 32 < 31 else -(1 << 31)

    def forced(self):
        run = []
        while len(allowed := self.allowed(self.read + run)) == 1 and allowed != {self.grammar.end}:
            run += allowed
        return run


class FailingGrammar(SequenceGrammar):
    """Fails when a mask is asked for after `num_tokens` tokens."""

    def __init__(self, sequences, num_tokens):
        super().__init__(sequences)
        self.num_tokens = num_tokens

    def matcher(self):
        matcher = super().matcher()
        fill = matcher.fill

        def fail_late(mask):
            if len(matcher.read) >= self.num_tokens:
                raise GrammarError("the grammar is too complex")
            fill(mask)

        matcher.fill = fail_late
        return matcher


def constrained(grammar=None, may_force=True, starts_after=(), reasoning_start=-1):
    """Return an output that must match `grammar`; None: which waits for its grammar."""
    constraint = Constraint("grammar", "a stand-in", starts_after=tuple(starts_after), reasoning_start=reasoning_start)
    output = ConstrainedOutput(constraint, may_force)
    if grammar is not None:
        output.begin(grammar)
    return output
