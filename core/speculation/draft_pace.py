"""How many drafts pay: their chance of being accepted against what they cost, both as measured.

A step of few rows waits for the weights, so that drafts cost hardly anything; a step of many rows computes for as long
as it has tokens. And a request that repeats its prompt accepts nearly all drafts, where others accept none. So a draft
is computed only if its chance is above what it costs, as a share of what a token of the step costs without drafts.

The chance is measured also while nothing is drafted, as each step shows whether the first proposed token came.
"""

from typing import Final

_FIRST_RATIO: Final = 0.25
"""The cost of a draft, as a share of a token's, before it is measured."""
_MAX_RATIO: Final = 2.0
_MARGIN: Final = 0.05
_CAUTION: Final = 1.3
"""The chance of a draft must exceed `_CAUTION` times its cost by `_MARGIN`: both are uncertain, and where the cost is
high there is little to gain."""
_MEMORY: Final = 0.8
"""Weight of what is known of the steps of a size beside the next such step."""
_MAX_SURPRISE: Final = 1.5
"""Factor beyond what was expected from which the time of a step counts no further: the machine held it up."""
_FIRST_STEPS: Final = 3
"""Number of steps without drafts whose least time is the first that is known; the first of all may be cold."""
_STEPS_TO_LOOK: Final = 128
"""Number of steps with drafts after which a step without drafts is measured again."""
_CHANGE: Final = 1.15
"""Factor by which steps with drafts become slower or faster if the machine, or what it shares with others, does."""
_STEPS_OF_CHANGE: Final = 3
"""Number of such steps in a row after which steps without drafts are measured again."""
_ROWS_OF_CHANGE: Final = 4
"""Most rows of such steps. Hardly two steps of more rows have equally many drafts, so that their times say nothing."""
_FORGETS: Final = 0.995
"""Factor of the cost in each step in which it forbids all drafts, so that it is measured again some time."""
_MAX_MATCH: Final = 16
"""Matches of so many tokens or more are one kind."""
_FEW: Final = 4.0
"""Number of drafts from which the share of a request says something."""
WEIGHT_OF_ALL: Final = 4.0
"""Weight, in drafts, of what all requests accept beside what one request accepts, if the texts are what matters."""
WEIGHT_OF_MODEL: Final = 32.0
"""The same for a draft model, whose probabilities say how sure each draft is."""
_REST: Final = 3
"""Number of steps for which nothing is proposed after a proposal that was worth nothing, if most were not accepted, or
if drafts are dear."""
_LEAST_SHARE: Final = 0.25
_DEAR: Final = 0.5
"""Least chance of a draft above which there is little to gain: then a request rests after a proposal worth nothing."""
_LOOK_REST: Final = 16
"""The same after a token of a draft model that became no draft, because each of them takes a run of that model."""
_ENGINE_MEMORY: Final = 0.995
_REQUEST_MEMORY: Final = 0.9
"""Weight of what was accepted so far beside the next draft."""


class Share:
    """Which share of some drafts is accepted; the latest count most."""

    __slots__ = ("_memory", "accepted", "total")

    def __init__(self, memory: float, accepted: float = 0.0, total: float = 0.0) -> None:
        self._memory = memory
        self.accepted = accepted
        self.total = total

    def note(self, is_accepted: bool) -> None:
        """Count a draft."""
        self.accepted = self._memory * self.accepted + is_accepted
        self.total = self._memory * self.total + 1


class RequestPace:
    """What is known of the drafts of one request."""

    __slots__ = ("expected", "kinds", "match", "position", "rest", "share")

    def __init__(self) -> None:
        self.share = Share(_REQUEST_MEMORY)
        self.expected = -1
        """The token that was proposed and not drafted for `position`; -1: none."""
        self.position = 0
        self.match = 0
        """Length of the match by which it was proposed; of a draft model, the kind of the token (`kind_of`)."""
        self.kinds: list[int] = []
        """The kinds of the drafts that a draft model has proposed for the latest step."""
        self.rest = 0
        """Number of steps for which nothing is proposed."""


class DraftPace:
    """Decides how many of the proposed tokens of a row become drafts."""

    def __init__(self, weight_of_all: float = WEIGHT_OF_ALL) -> None:
        """`weight_of_all`: weight, in drafts, of what all requests accept beside what one request accepts."""
        self._weight_of_all = weight_of_all
        self._seconds: dict[int, float] = {}
        """Seconds of a step without drafts, by the size of the step."""
        self._num_timed: dict[int, int] = {}
        """Number of steps without drafts that were timed, up to `_FIRST_STEPS`, by the size of the step."""
        self._ratios: dict[int, float] = {}
        """The cost of a draft as a share of that of a token, by the size of the step."""
        self._shares = [Share(_ENGINE_MEMORY, 0.5, 1.0) for _ in range(_MAX_MATCH + 1)]
        """Of the drafts of all requests, by the length of the match before each, or by their kinds (`kind_of`)."""
        self._num_to_look = 0
        self._drafted: dict[tuple[int, int], float] = {}
        """Seconds of a step with drafts, by the numbers of its rows and of its drafts."""
        self._num_changed = 0
        """Number of latest steps that were all slower, or if below 0 all faster, than such steps were."""
        self._is_refused = False
        """In the step that is being scheduled, the cost has forbidden a draft."""

    def least_chance(self, num_rows: int) -> float:
        """Return the least chance of a draft in a step of `num_rows` rows that decode; above 1 if none may be drafted.

        Called once for each step.
        """
        size = _size(num_rows)
        if self._is_refused and size in self._ratios:
            self._ratios[size] *= _FORGETS
        self._is_refused = False
        if self._num_timed.get(size, 0) < _FIRST_STEPS or self._num_to_look >= _STEPS_TO_LOOK:
            return 2.0  # the step shows what steps without drafts take
        return _CAUTION * self._ratios.get(size, _FIRST_RATIO) + _MARGIN

    def num_worthwhile(self, request: RequestPace, match: int, most: int, least_chance: float) -> int:
        """Return how many tokens that follow a match of `match` tokens are worth a draft, at most `most`."""
        chance = 1.0
        for count in range(most):
            chance *= self.chance_of(request, match + count)
            if chance < least_chance:
                self._is_refused |= count == 0 and chance > _MARGIN
                return count
        return most

    def chance_of(self, request: RequestPace, kind: int) -> float:
        """Return the chance of a draft whose predecessors are accepted.

        `kind` is the length of the match before it, or of a draft model `kind_of`.
        """
        of_all, share = self._shares[min(kind, _MAX_MATCH)], request.share
        weight = self._weight_of_all
        return (weight * of_all.accepted / of_all.total + share.accepted) / (weight + share.total)

    def note_too_dear(self) -> None:
        """Note that a draft model was not asked, because no draft has a chance above the cost of one."""
        self._is_refused = True

    def is_resting(self, request: RequestPace) -> bool:
        """Return whether nothing need be proposed for a request in this step. Called once for each step."""
        if request.rest:
            request.rest -= 1
            return True
        return False

    def note_refusal(self, request: RequestPace, least_chance: float) -> None:
        """Note that nothing was proposed, or that nothing of the proposal became a draft."""
        share = request.share
        if least_chance > _DEAR or (share.total >= _FEW and share.accepted < _LEAST_SHARE * share.total):
            request.rest = _REST

    def note_unused(self, request: RequestPace, chance: float, least_chance: float) -> None:
        """Note that the first token of a draft model became no draft, because its `chance` is below the least one."""
        share = request.share
        self._is_refused |= chance > _MARGIN
        if share.total >= _FEW and share.accepted < least_chance * share.total:
            request.rest = _LOOK_REST

    def note_draft(self, request: RequestPace, kind: int, is_accepted: bool) -> None:
        """Note whether a draft of this `kind` was accepted; its predecessors in the step were."""
        request.share.note(is_accepted)
        self._shares[min(kind, _MAX_MATCH)].note(is_accepted)

    def note_drafts(self, request: RequestPace, match: int, num_drafts: int, num_accepted: int) -> None:
        """Note that a row has accepted `num_accepted` of `num_drafts` drafts, which followed a match of `match`."""
        for index in range(min(num_drafts, num_accepted + 1)):
            self.note_draft(request, match + index, index < num_accepted)

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Note how long a step without tokens of prompts has taken, of `num_rows` rows with `num_drafts` drafts."""
        size = _size(num_rows)
        alone = self._seconds.get(size)
        if not num_drafts:
            self._num_to_look = 0
            known = seconds if alone is None else alone
            if (num_timed := self._num_timed.get(size, 0)) < _FIRST_STEPS:
                self._num_timed[size] = num_timed + 1
                self._seconds[size] = min(known, seconds)
            else:
                self._seconds[size] = _MEMORY * known + (1 - _MEMORY) * min(seconds, _MAX_SURPRISE * known)
            return
        self._num_to_look += 1
        if num_rows <= _ROWS_OF_CHANGE:
            self._note_change((num_rows, num_drafts), seconds)
        if alone:
            known = self._ratios.get(size, _FIRST_RATIO)
            most = _MAX_SURPRISE * (alone + known * alone / num_rows * num_drafts)
            ratio = (min(seconds, most) - alone) / num_drafts * num_rows / alone
            ratio = max(0.0, min(_MAX_RATIO, ratio))
            self._ratios[size] = _MEMORY * known + (1 - _MEMORY) * ratio

    def _note_change(self, numbers: tuple[int, int], seconds: float) -> None:
        """Have steps without drafts measured again if the latest steps took longer, or less long, than such steps did.

        The cost of drafts is what steps with them take beyond those without, so both must be of the same time.
        `numbers` are those of the rows and the drafts of a step.
        """
        known = self._drafted.get(numbers, seconds)
        self._drafted[numbers] = _MEMORY * known + (1 - _MEMORY) * seconds
        sign = (seconds > _CHANGE * known) - (seconds < known / _CHANGE)
        self._num_changed = self._num_changed + sign if sign * self._num_changed > 0 else sign
        if abs(self._num_changed) >= _STEPS_OF_CHANGE:
            self._num_changed = 0
            self._drafted.clear()
            self._num_timed.clear()
            self._seconds.clear()


def kind_of(probability: float) -> int:
    """Return the kind of a draft to which the draft model gives this probability, as a number of sixteenths."""
    return int(probability * _MAX_MATCH)


def _size(num_rows: int) -> int:
    """Return a number that is the same for about as many rows."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift
