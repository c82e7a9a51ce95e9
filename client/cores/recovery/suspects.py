"""The choice of the request to blame when cores die.

Any request in the step during which a core died may have caused the death. Most deaths have no culprit, so all requests
continue together on the next core. If that core too dies in a step, the requests of this step that were in the step of
the first death, and have made no progress since, are suspects. The search for the culprit is a group test by halves
(Dorfman 1943; Hwang 1972): the suspects are divided into two groups, and each group runs isolated until its requests
are past the step of the death. A group in whose step a core dies is divided again. A request that is alone in such a
death is to blame; the others stay suspects.

A request that has survived many steps is unlikely to end a core now. So the first division weighs each suspect with
1 / (1 + its tokens)^2, and the first group has half of the weight: a new request among old ones is found at the third
death. The other divisions are by number. So one culprit among n requests costs at most 3 + log2(n) deaths, with the
logarithm rounded up, and one less if all have as many tokens. If a core may not die as often as that
(`max_core_restarts`), each suspect runs alone, at the cost of time, so that the culprit is found at the next death.

A signal from outside, such as SIGTERM or SIGKILL, blames no request. But a request can bring about such signals, for
example through the memory that it takes. So such deaths count if a request was in three of them without progress, and
it is to blame only after five. Reading a prompt is progress here.

If it is unknown which requests were in the step, all requests without a new token are suspects after three deaths. No
core isolates them then, so the client sends one group, and holds back all other requests until each request of the
group has a new token. A request that was alone in its group is to blame after five deaths.

What the core does outside of steps counts as a step does: the requests for which it compiles a constraint, loads an
adapter, encodes an image or reads a message are in the step as well, as the calls that it carries out. A suspect has
these to itself too.

An engine of several cores counts the deaths of all of them together. A request that may have caused one death is
exposed: `CoreGroup` moves all exposed requests of a core to one other core, so that a further death costs that core
alone, and leaves suspects with the core that died, whose successor tests them while other cores serve all others. If no
successor follows, all requests in the step are suspects after this first death, and another core tests them.
"""

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.outputs.stream import Awaited, Isolation, RequestStream

MIN_DEATHS = 2
"""Number of deaths without progress that make a request a suspect, or a suspect that was alone the culprit."""
_MIN_OUTSIDE_DEATHS = 3
"""The same for deaths that came from outside, or whose step or cause is unknown."""
MIN_OUTSIDE_DEATHS_ALONE = 5
"""Number of such deaths after which a suspect that was alone is the culprit."""
MAX_DEATHS = 16
"""Number of deaths without progress after which a request fails in any company: more than a search by halves takes."""

Entry = tuple[RequestStream, Awaited]


@dataclass(slots=True)
class _Deaths:
    """The deaths of cores with this request in their step, since it last got past such a step."""

    num_tokens: int
    """Number of output tokens that the request had in the core, which may not have sent all of them."""
    progress: int
    """The same, or minus the number of prompt tokens that were left: the furthest at any of these deaths."""
    num_inside: int = 0
    """Number of deaths that a request may have caused directly."""
    num_outside: int = 0
    """Number of other deaths since `progress` last grew."""
    group: int = 0
    """The group in which a suspect is tested; 0: it is no suspect."""
    deaths: list[Death] = field(default_factory=list)

    def is_suspect(self, is_inside: bool, is_final: bool) -> bool:
        min_inside = 1 if is_final else MIN_DEATHS
        return self.num_inside >= min_inside if is_inside else self.num_outside >= _MIN_OUTSIDE_DEATHS

    def is_culprit(self, is_inside: bool, was_alone: bool) -> bool:
        enough = self.num_inside >= MIN_DEATHS if is_inside else self.num_outside >= MIN_OUTSIDE_DEATHS_ALONE
        return (was_alone and enough) or self.num_inside + self.num_outside >= MAX_DEATHS


class Conviction(NamedTuple):
    """A request that is to blame for deaths of cores."""

    stream: RequestStream
    deaths: list[Death]
    was_alone: bool
    """No other request can have caused the latest of `deaths`."""

    def why(self) -> str:
        """Return the number and the causes of the deaths, as the rest of a sentence about the request."""
        *earlier, last = self.deaths
        is_known = all(death.is_step_known for death in self.deaths)
        causes = "; ".join(death.cause.partition(";")[0] for death in earlier)
        return (
            f"it was {'in the step of' if is_known else 'live in'} each of {len(self.deaths)} cores that died, "
            f"{'alone in the last' if self.was_alone else 'without a new token in between'} ({causes}): {last.cause}"
        )


class DeathLedger:
    """The deaths recorded against each live completion or vector, over all cores of an engine."""

    def __init__(self) -> None:
        self.deaths: WeakKeyDictionary[Awaited, _Deaths] = WeakKeyDictionary()
        self.suspects: WeakSet[Awaited] = WeakSet()
        """Those that were put into a group at their latest death; they may have got past it since."""
        self.num_groups = 0
        """Number of groups so far, which are numbered from 1."""


class Suspects:
    """The suspects among the requests of a core."""

    def __init__(self, ledger: DeathLedger | None = None) -> None:
        """`ledger` is what the suspects of all cores of an engine share."""
        self._ledger = DeathLedger() if ledger is None else ledger
        self._deaths = self._ledger.deaths
        self._holds_back = False
        """The step of the latest death is unknown."""
        self._sent_group = 0
        """The group to send first if `_holds_back`; 0: there are no suspects."""

    def isolation(self, awaited: Awaited) -> Isolation:
        """Return how the core must isolate `awaited`."""
        group = self._group(awaited)
        return Isolation(self._deaths[awaited].num_tokens + 1, group) if group else Isolation()

    def is_suspect(self, stream: RequestStream) -> bool:
        """Return whether anything that `stream` awaits is tested in a group."""
        return bool(self._ledger.suspects) and any(self._group(awaited) for awaited in stream.awaited)

    def is_exposed(self, stream: RequestStream) -> bool:
        """Return whether `stream` may have caused a death of a core, and has not got past that step."""
        return bool(self._deaths) and any(
            deaths.num_inside or not deaths.deaths[-1].is_step_known
            for awaited in stream.awaited
            if (deaths := self._deaths.get(awaited)) is not None and awaited.num_tokens <= deaths.num_tokens
        )

    def is_held_back(self, awaited: Awaited) -> bool:
        """Return whether `awaited` must not be sent yet, because a group of suspects is tested."""
        return self._holds_back and self._sent_group not in (0, self._group(awaited))

    def choose_sent_group(self, live: Iterable[Entry]) -> None:
        """Choose the group to send if requests are held back: the first with a `live` request that is not cleared."""
        groups = (self._group(awaited) for _, awaited in live) if self._ledger.suspects else ()
        self._sent_group = min(filter(None, groups), default=0)

    def record(self, death: Death, live: list[Entry]) -> list[Conviction]:
        """Record a death for each `live` request in its step; return the requests to blame, usually none or one.

        Call `choose_sent_group` before requests are sent to the next core.
        """
        in_step = self._in_step(death, live)
        is_inside = death.is_step_known and not death.is_from_outside
        for _, awaited, progress in in_step:
            self._count(awaited, progress, is_inside, death)
        self._holds_back = not death.is_step_known
        suspects = [entry for entry in in_step if self._deaths[entry[1]].is_suspect(is_inside, death.is_final)]
        streams = list({id(stream): stream for stream, _, _ in suspects}.values())
        # In an unknown step, the others were held back.
        was_alone = len(streams) == 1 and (not death.is_step_known or len(suspects) == death.num_in_step)
        culprits = {
            id(stream): Conviction(stream, self._deaths[awaited].deaths, was_alone)
            for stream, awaited, _ in suspects
            if self._deaths[awaited].is_culprit(is_inside, was_alone)
        }
        streams = [stream for stream in streams if id(stream) not in culprits]
        self._divide(streams, [(stream, awaited) for stream, awaited, _ in suspects], death.num_restarts_left)
        return list(culprits.values())

    def deaths_of(self, stream: RequestStream) -> list[Death]:
        """Return the deaths that are recorded against the completions of `stream`."""
        recorded = [self._deaths.get(awaited) for awaited in stream.awaited]
        return [death for deaths in recorded if deaths is not None for death in deaths.deaths]

    def _in_step(self, death: Death, live: list[Entry]) -> list[tuple[RequestStream, Awaited, int]]:
        """Return the `live` requests that may have been in the step of `death`, each with its progress."""
        if death.is_step_known:
            return [
                (stream, awaited, death.in_step[awaited.slot])
                for stream, awaited in live
                if awaited.slot in death.in_step
            ]
        return [(stream, awaited, awaited.num_tokens) for stream, awaited in live if not self.is_held_back(awaited)]

    def _count(self, awaited: Awaited, progress: int, is_inside: bool, death: Death) -> None:
        """Count a death with `awaited` in its step."""
        num_tokens = max(0, progress)
        deaths = self._deaths.get(awaited)
        if deaths is None or num_tokens > deaths.num_tokens:
            deaths = self._deaths[awaited] = _Deaths(num_tokens, progress)
            self._ledger.suspects.discard(awaited)
        elif progress > deaths.progress:
            deaths.progress, deaths.num_outside = progress, 0
        deaths.num_inside += is_inside
        deaths.num_outside += not is_inside
        deaths.deaths.append(death)

    def _divide(self, streams: list[RequestStream], suspects: list[Entry], num_restarts_left: int | None) -> None:
        """Put `streams` into two groups, or each into one of its own if the core may not die so often.

        All completions of a request stay together.
        """
        if not suspects:
            return
        sizes = [(len(streams) + 1) // 2, len(streams) // 2]
        if not any(self._deaths[awaited].group for _, awaited in suspects):
            streams, num_likely = self._likely_first(streams, suspects)
            sizes = [num_likely, len(streams) - num_likely]
        most_deaths = 1 + (max(sizes) - 1).bit_length()
        if num_restarts_left is not None and most_deaths > num_restarts_left:
            sizes = [1] * len(streams)
        groups = itertools.chain.from_iterable(itertools.repeat(i, size) for i, size in enumerate(sizes, 1))
        group_of = {id(stream): self._ledger.num_groups + i for stream, i in zip(streams, groups, strict=True)}
        self._ledger.num_groups += len(streams)
        for stream, awaited in suspects:
            group = self._deaths[awaited].group = group_of.get(id(stream), 0)
            (self._ledger.suspects.add if group else self._ledger.suspects.discard)(awaited)

    def _likely_first(self, streams: list[RequestStream], suspects: list[Entry]) -> tuple[list[RequestStream], int]:
        """Return `streams` with the likeliest culprits first, and how many of them have half of the weight."""
        num_tokens: dict[int, int] = {}
        for stream, awaited in suspects:
            tokens = self._deaths[awaited].num_tokens
            num_tokens[id(stream)] = min(tokens, num_tokens.get(id(stream), tokens))
        streams = sorted(streams, key=lambda stream: num_tokens[id(stream)])
        weights = list(itertools.accumulate((1 + num_tokens[id(stream)]) ** -2 for stream in streams))
        return streams, bisect.bisect_left(weights, weights[-1] / 2) + 1 if weights else 0

    def _group(self, awaited: Awaited) -> int:
        """Return the group in which `awaited` is tested; 0 if it is no suspect, or has got past the deaths."""
        deaths = self._deaths.get(awaited)
        return 0 if deaths is None or awaited.num_tokens > deaths.num_tokens else deaths.group
