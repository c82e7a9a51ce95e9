"""Which request is to blame where cores die.

Whoever was in the step that a core died of may have brought it about. So these run alone on the next core, one after
the other, until each has got beyond that step, and what kills that core then was alone and is to blame. Where somebody
outside has killed the core or stopped it, for which a request has no means, it takes a second time at the same place to
rouse suspicion, and a request is to blame only if it was alone twice running, or in the step three times.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from vllm_mp.client.engine.supervisor import Death
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import RequestStream


@dataclass(slots=True)
class _Crashes:
    """The deaths of cores that found an answer in the step, since the answer got beyond it."""

    num_tokens: int
    """That the answer had in the core, which the core may not have sent yet."""
    num_deaths: int = 0
    num_alone: int = 0
    """Of the last ones, those in whose step no other request was."""
    is_suspect: bool = False


class Suspects:
    """What speaks against each live answer."""

    def __init__(self) -> None:
        self._crashes: WeakKeyDictionary[Completion, _Crashes] = WeakKeyDictionary()

    def suspect_until(self, answer: Completion) -> int:
        """The tokens that the answer has to get to alone; 0 if nothing speaks against it."""
        crashes = self._crashes.get(answer)
        if crashes is None or not crashes.is_suspect or len(answer.token_ids) > crashes.num_tokens:
            return 0
        return crashes.num_tokens + 1

    def note(self, death: Death, live: Iterable[tuple[RequestStream, Completion]]) -> RequestStream | None:
        """Book a death against those of the `live` answers that were in its step; the stream that is to blame, if any.

        Once one is found the others are free of suspicion.
        """
        in_step = [(stream, answer) for stream, answer in live if answer.slot in death.in_step]
        was_alone = len(in_step) == death.num_in_step and len({id(stream) for stream, _ in in_step}) == 1
        for stream, answer in in_step:
            num_tokens = death.in_step[answer.slot]
            crashes = self._crashes.get(answer)
            if crashes is None or num_tokens > crashes.num_tokens:
                crashes = self._crashes[answer] = _Crashes(num_tokens)
            crashes.num_deaths += 1
            crashes.num_alone = crashes.num_alone + 1 if was_alone else 0
            if death.is_from_outside:
                crashes.is_suspect |= crashes.num_deaths >= 2
                is_culprit = crashes.num_alone >= 2 or (was_alone and crashes.num_deaths >= 3)
            else:
                crashes.is_suspect = True
                is_culprit = was_alone and crashes.num_deaths >= 2
            if is_culprit:
                self._crashes.clear()
                return stream
        return None
