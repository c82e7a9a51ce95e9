"""The choice of the request to blame when cores die.

Any request in the step during which a core died may have caused the death. Each of them runs isolated on the next core
until it gets past that step. If another core dies during such an isolated step, the request was alone and is to blame.

A request cannot cause a kill or stop from outside. Such a death makes a request a suspect only if it was in the step of
an earlier death and has made no progress since. The request is to blame only if it was alone in its last two deaths, or
alone in this death and in the step of at least two before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from vllm_mp.client.engine.supervisor import Death
from vllm_mp.client.outputs.stream import Awaited, RequestStream


@dataclass(slots=True)
class _Deaths:
    """The deaths of cores with this request in their step, since it last got past such a step."""

    num_tokens: int
    """Number of output tokens that the request had in the core, which may not have sent all of them."""
    num_deaths: int = 0
    num_alone: int = 0
    """Number of the latest deaths in a row in whose step no other request was."""
    is_suspect: bool = False


class Suspects:
    """The deaths recorded against each live completion or vector."""

    def __init__(self) -> None:
        self._deaths: WeakKeyDictionary[Awaited, _Deaths] = WeakKeyDictionary()

    def isolate_until(self, awaited: Awaited) -> int:
        """Return the number of output tokens up to which `awaited` must run isolated; 0 if it is no suspect."""
        deaths = self._deaths.get(awaited)
        if deaths is None or not deaths.is_suspect or awaited.num_tokens > deaths.num_tokens:
            return 0
        return deaths.num_tokens + 1

    def record(self, death: Death, live: Iterable[tuple[RequestStream, Awaited]]) -> RequestStream | None:
        """Record a death for each `live` request in its step; return the stream to blame, if there is one.

        If there is one, all other requests are cleared of suspicion.
        """
        in_step = [(stream, awaited) for stream, awaited in live if awaited.slot in death.in_step]
        was_alone = len(in_step) == death.num_in_step and len({id(stream) for stream, _ in in_step}) == 1
        for stream, awaited in in_step:
            num_tokens = death.in_step[awaited.slot]
            deaths = self._deaths.get(awaited)
            if deaths is None or num_tokens > deaths.num_tokens:
                deaths = self._deaths[awaited] = _Deaths(num_tokens)
            deaths.num_deaths += 1
            deaths.num_alone = deaths.num_alone + 1 if was_alone else 0
            if death.is_from_outside:
                deaths.is_suspect |= deaths.num_deaths >= 2
                is_culprit = deaths.num_alone >= 2 or (was_alone and deaths.num_deaths >= 3)
            else:
                deaths.is_suspect = True
                is_culprit = was_alone and deaths.num_deaths >= 2
            if is_culprit:
                self._deaths.clear()
                return stream
        return None
