"""The requests to blame for the deaths of a client's cores, and what follows for them and for the limit of restarts."""

import logging
from collections import deque

from vllm_mp import wire
from vllm_mp.client.cores.recovery.engine_deaths import CoreUser, EngineDeaths
from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.cores.recovery.suspects import (
    MAX_DEATHS,
    MIN_DEATHS,
    MIN_OUTSIDE_DEATHS_ALONE,
    Entry,
    Suspects,
)
from vllm_mp.client.cores.recovery.unexplained_death import UnexplainedDeath
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.outputs.stream import RequestStream

logger = logging.getLogger(__name__)


class Blame:
    """Records the deaths of the cores of one client, and fails the requests that are to blame."""

    def __init__(self, client: CoreUser, engine: EngineDeaths, suspects: Suspects) -> None:
        self._client = client
        self._engine = engine
        self._suspects = suspects
        self._unexplained: UnexplainedDeath | None = None
        """The death of a shared core, until its successor says what it was computing."""
        self._convicted: deque[int] = deque(maxlen=wire.MAX_CONVICTED_DEATHS)
        """The incarnations of shared cores for whose deaths requests of this client are to blame."""
        self._calls: dict[int, _CallDeaths] = {}
        """By id: the deaths of cores that carried out a call of this client."""
        self._cores_work = True
        """A core has computed something since the latest conviction, so not every request ends every core."""

    @property
    def convicted(self) -> list[int]:
        """The incarnations of shared cores for whose deaths requests of this client are to blame."""
        return list(self._convicted)

    def is_exposed(self, stream: RequestStream) -> bool:
        """Return whether `stream` may have caused a death."""
        unexplained = self._unexplained
        return self._suspects.is_exposed(stream) or (unexplained is not None and unexplained.may_be_due_to(stream))

    def is_suspect_call(self, call_id: int) -> bool:
        """Return whether a core has died while it carried out a call that is not answered."""
        return call_id in self._calls

    def forget_call(self, call_id: int) -> None:
        """Note that a call has ended."""
        self._calls.pop(call_id, None)

    def note_output(self, output: wire.StepOutput) -> None:
        """Note that a core has sent `output`."""
        self._cores_work = self._cores_work or bool(output.tokens or output.vectors)

    def note_death(self, death: Death, core: Core, live: list[Entry]) -> None:
        """Record the death of `core` with the requests `live`; that of a shared core once its successor explains it."""
        if core.process is None:
            self._unexplained = UnexplainedDeath.of(death, live)
        else:
            self._record(death, core, live)

    def note_successor(self, old: Core, core: Core) -> None:
        """Find the request to blame for the death of `old`, a shared core, with what its successor says of it."""
        unexplained, self._unexplained = self._unexplained, None
        if unexplained is None:
            return
        if core.welcome.why_dropped:
            logger.warning("the core had dropped this client: %s", core.welcome.why_dropped)
        if core.connection.incarnation != old.connection.incarnation:  # else the connection broke, and the core lives
            self._record(unexplained.explained_by(old, core), core, unexplained.live())

    def note_last_death(self, death: Death, core: Core, live: list[Entry]) -> None:
        """Record the death of `core`, which no successor follows."""
        unexplained, self._unexplained = self._unexplained, None
        self._record(death, core, live if unexplained is None else unexplained.live())

    def _record(self, death: Death, core: Core, live: list[Entry]) -> None:
        """Record a death for each live request in its step, and fail those that are to blame."""
        for conviction in self._suspects.record(death, live):
            self._forgive(self._engine.convict(conviction, self._client), core)
        for call_id in death.calls:
            deaths_of_call = self._calls.setdefault(call_id, _CallDeaths())
            deaths_of_call.record(death)
            if (why := deaths_of_call.why_to_blame(death)) is not None:
                del self._calls[call_id]
                self._client.fail_call(call_id, why)
                self._forgive(deaths_of_call.deaths, core)

    def _forgive(self, deaths: list[Death], core: Core) -> None:
        """Count deaths no longer against the limit of restarts, because it is known what caused them."""
        if core.process is None:
            self._convicted.extend(sorted({death.incarnation for death in deaths if death.is_step_known}))
        elif self._cores_work:  # else the limit of restarts ends an engine in which nothing can run
            self._engine.forgive(sorted({death.time for death in deaths}))
        self._cores_work = False


class _CallDeaths:
    """The deaths of cores that carried out a call."""

    def __init__(self) -> None:
        self.deaths: list[Death] = []
        self._num_inside = 0

    def record(self, death: Death) -> None:
        self.deaths.append(death)
        self._num_inside += not death.is_from_outside

    def why_to_blame(self, death: Death) -> str | None:
        """Return why the call is to blame, for which the evidence is as for a request; None if it is not."""
        count, least = len(self.deaths), MIN_DEATHS
        if death.is_from_outside:
            least = MIN_OUTSIDE_DEATHS_ALONE
        enough = (count if death.is_from_outside else self._num_inside) >= least
        if not (enough and death.num_in_step == 1) and count < MAX_DEATHS:
            return None
        return f"{count} cores died while they carried it out; the last time, {death.cause}"
