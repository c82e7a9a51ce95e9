"""Drafts that a test chooses, in place of those that a method proposes."""

from vllm_mp.core.speculation.proposer import NOTHING, Proposal


class EagerPace:
    """Drafts all that is proposed, whatever it costs."""

    def least_chance(self, num_rows):
        return 0.0

    def num_worthwhile(self, request, match, most, least_chance):
        return most

    def chance_of(self, request, kind):
        return 1.0

    def is_resting(self, request):
        return False

    def note_refusal(self, request, least_chance):
        """Do nothing."""

    def note_draft(self, request, kind, is_accepted):
        """Do nothing."""

    def note_drafts(self, request, match, num_drafts, num_accepted):
        """Do nothing."""

    def observe(self, num_rows, num_drafts, seconds):
        """Do nothing."""


class KnownAnswers:
    """Proposes what requests are known to answer, with every `wrong_every`-th token replaced by another."""

    def __init__(self, answers, wrong_every):
        """`answers` are (prompt, output) of each request; the longest prompt that tokens begin with is theirs."""
        answers = [(list(prompt), list(output)) for prompt, output in answers]
        self._answers = sorted(answers, key=lambda pair: -len(pair[0]))
        self._wrong_every = wrong_every

    def source(self, pool):
        return self

    def note_answer(self, pool, tokens):
        """Do nothing."""

    def propose(self, tokens, most):
        tokens = tokens.tolist()
        for prompt, output in self._answers:
            if tokens[: len(prompt)] == prompt:
                begin = len(tokens) - len(prompt)
                drafts = output[begin : begin + most]
                for i, token in enumerate(drafts):
                    if (begin + i) % self._wrong_every == self._wrong_every - 1:
                        drafts[i] = abs(token - 1)
                return Proposal(drafts, len(prompt))
        return NOTHING


def draft_known_answers(scheduler, answers, wrong_every=3):
    """Let `scheduler` draft known answers, as much as fits."""
    scheduler.drafting._proposer = KnownAnswers(answers, wrong_every)
    scheduler.drafting._pace = EagerPace()
