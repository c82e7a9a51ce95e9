"""How many tokens of prompts a step computes beside requests in decode, so that their streams hardly slow down."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

MIN_TOKENS: Final = 8
"""Tokens of prompts that a step may always have, so that each prompt gets on."""
_GROWTH: Final = 1.5
"""Factor by which a step may have more tokens of prompts than those whose times were measured."""
_MEMORY: Final = 0.7
"""Weight of what is known of a kind of steps beside the next such step."""
_MAX_SURPRISE: Final = 1.5
"""Factor beyond what was expected from which the time of a step counts no further: the machine held it up."""
_STEPS_TO_LEAST: Final = 16
"""Of so many steps with prompts and decodes, one has the least tokens of prompts, to tell the two costs apart."""
_STEPS_TO_LOOK: Final = 64
"""Number of steps with prompts and decodes after which a step of decodes alone is measured again."""
_FIXED_SHARE: Final = 0.5
"""A step adds at least this share of the fixed cost of prompts for their tokens, or it would be a waste."""


class StepTimes(NamedTuple):
    """The mean size and time of some steps; the latest count most."""

    num_tokens: float
    """Tokens of prompts."""
    seconds: float

    def followed_by(self, num_tokens: float, seconds: float) -> "StepTimes":
        """Return the mean with one more step."""
        new = 1 - _MEMORY
        return StepTimes(_MEMORY * self.num_tokens + new * num_tokens, _MEMORY * self.seconds + new * seconds)


class PrefillPace:
    """Limits the tokens of prompts in steps with decodes, by the measured times of such steps.

    One prompt may lengthen a step of decodes to `slowdown` times its time. What any prompt costs, however few tokens of
    it are computed (on a GPU, steps with prompts run without a CUDA graph; a long context must be read), may exceed
    that. With more prompts the limit grows with the square of their number: the more requests wait for their first
    token, the less the running ones count, and with a queue of prompts all steps are full. So a long prompt among
    streams takes longer, and the device is no less busy.

    Results do not depend on the limits, because all kernels are batch-invariant.
    """

    def __init__(self, slowdown: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """`slowdown` 0: no limit. `clock` returns seconds."""
        self.clock = clock
        self._slowdown = slowdown
        self._decodes: dict[int, float] = {}
        """Seconds of a step of decodes alone, by the bit length of their number."""
        self._prompts: StepTimes | None = None
        """Steps of prompts alone."""
        self._mixed: StepTimes | None = None
        """Steps with both: what the prompts added to the time of the decodes."""
        self._least: StepTimes | None = None
        """The same of steps with at most `MIN_TOKENS` tokens of prompts."""
        self._num_to_look = 0
        """Number of steps with both since the last step of decodes alone."""
        self._num_to_least = _STEPS_TO_LEAST
        """Number of steps with both since the last of the least ones."""

    def limit(self, num_decodes: int, num_prompts: int, budget: int) -> int:
        """Return how many tokens of prompts the next step may have, at most `budget`; 0 for a step to measure.

        The step has `num_decodes` tokens of requests in decode, and `num_prompts` prompts wait to be read or read on.
        """
        if not (self._slowdown and num_decodes and num_prompts):
            return budget
        wanted = self._tokens_within(num_decodes, num_prompts)
        if wanted >= budget:
            return budget
        if self._num_to_look >= _STEPS_TO_LOOK:
            return 0
        is_least = self._num_to_least >= _STEPS_TO_LEAST
        return min(budget, MIN_TOKENS if is_least else max(MIN_TOKENS, int(wanted)))

    def observe(self, num_prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Note how long a step has taken, of `num_prompt_tokens` tokens of prompts and `num_decodes` of decodes."""
        if not num_decodes:
            if num_prompt_tokens:
                self._prompts = _mean(self._prompts, num_prompt_tokens, seconds)
            return
        size = num_decodes.bit_length()
        if not num_prompt_tokens:
            known = self._decodes.get(size, seconds)
            is_old = self._num_to_look >= _STEPS_TO_LOOK
            most, memory = (2 * _MAX_SURPRISE, 1 - _MEMORY) if is_old else (_MAX_SURPRISE, _MEMORY)
            self._decodes[size] = memory * known + (1 - memory) * min(seconds, most * known)
            self._num_to_look = 0
        elif (alone := self._seconds_of_decodes(num_decodes)) is None:
            self._decodes[size] = seconds
        else:
            self._observe_both(num_prompt_tokens, alone, seconds)

    def _observe_both(self, num_prompt_tokens: int, alone: float, seconds: float) -> None:
        """Note how long a step with prompts and decodes has taken; the decodes `alone` take that many seconds."""
        if self._mixed is not None:
            fixed, per_token = self._costs(self._mixed)
            seconds = min(seconds, _MAX_SURPRISE * (alone + fixed + per_token * num_prompt_tokens))
        self._mixed = _mean(self._mixed, num_prompt_tokens, seconds - alone)
        self._num_to_look += 1
        self._num_to_least += 1
        if num_prompt_tokens <= MIN_TOKENS:
            self._least = _mean(self._least, num_prompt_tokens, seconds - alone)
            self._num_to_least = 0

    def _tokens_within(self, num_decodes: int, num_prompts: int) -> float:
        """Return the tokens of prompts with which a step takes as long as it may."""
        alone, measured = self._seconds_of_decodes(num_decodes), self._mixed or self._prompts
        if alone is None or measured is None:
            return MIN_TOKENS
        fixed, per_token = self._costs(measured)
        seconds = max((self._slowdown - 1) * num_prompts**2 * alone - fixed, _FIXED_SHARE * fixed)
        most = _GROWTH * measured.num_tokens
        if per_token * most > seconds:
            return seconds / per_token
        # Beyond what was measured beside decodes, a token costs no less than in a step of prompts alone.
        sure = max(per_token, self._seconds_per_token_alone)
        return max(most, seconds / sure) if sure > 0 else most

    def _costs(self, measured: StepTimes) -> tuple[float, float]:
        """Return the seconds that any prompt adds to a step of decodes, and those that each of its tokens adds."""
        fixed, least, slope = 0.0, self._least, self._seconds_per_token_alone
        if self._mixed is not None and least is not None and slope:
            if measured.num_tokens >= 2 * least.num_tokens:
                more = measured.num_tokens - least.num_tokens
                slope = max(0.0, min(slope, (measured.seconds - least.seconds) / more))
            fixed = max(0.0, min(least.seconds - slope * least.num_tokens, measured.seconds))
        return fixed, max(0.0, measured.seconds - fixed) / measured.num_tokens

    @property
    def _seconds_per_token_alone(self) -> float:
        """Seconds for each token in steps of prompts alone; 0 if it is not known."""
        return 0.0 if self._prompts is None else self._prompts.seconds / self._prompts.num_tokens

    def _seconds_of_decodes(self, num_decodes: int) -> float | None:
        """Return how long a step of so many decodes takes, or of the nearest number that is known; None if none is."""
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda known: (abs(known - size), known), default=None)
        return None if nearest is None else self._decodes[nearest]


def _mean(known: StepTimes | None, num_tokens: int, seconds: float) -> StepTimes:
    return StepTimes(num_tokens, seconds) if known is None else known.followed_by(num_tokens, seconds)
