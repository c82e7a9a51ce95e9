"""The deaths of all cores of an engine: who is to blame for them, and which requests are refused because of it."""

from collections.abc import Sequence
from typing import Protocol

from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.cores.recovery.refused_requests import RefusedRequests
from vllm_mp.client.cores.recovery.suspects import Conviction, DeathLedger, Suspects
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import RequestStream


class CoreUser(Protocol):
    """The client of one core, as far as deaths concern it."""

    @property
    def requests(self) -> OutputProcessor:
        """The live requests of the core."""
        ...

    def fail(self, stream: RequestStream, why: str) -> None:
        """End a live stream of the core with EngineGenerateError."""
        ...

    def fail_call(self, call_id: int, why: str) -> None:
        """End a call with EngineError; no-op if its caller does not wait any more."""
        ...

    def forgive(self, times: list[float]) -> None:
        """Stop counting the deaths seen at `times` against the limit of restarts."""
        ...


class EngineDeaths:
    """What the clients of all cores of an engine share about deaths."""

    def __init__(self, clients: Sequence[CoreUser]) -> None:
        """`clients` gains and loses entries as cores are added and removed."""
        self._clients = clients
        self.ledger = DeathLedger()
        self.refused = RefusedRequests()

    @property
    def is_recorded(self) -> bool:
        """Deaths are recorded against live requests."""
        return bool(self.ledger.deaths)

    @property
    def has_suspects(self) -> bool:
        """There may be suspects among the live requests; after a single death there are none."""
        return bool(self.ledger.suspects)

    def forgive(self, times: list[float]) -> None:
        """Stop counting the deaths seen at `times` against the limits of restarts."""
        for client in self._clients:
            client.forgive(times)

    def convict(self, conviction: Conviction, of: CoreUser) -> list[Death]:
        """Fail a request that is to blame for deaths, and all equal requests, live or to come; return their deaths.

        `of` is the client whose core died last.
        """
        culprit, why, suspects = conviction.stream, conviction.why(), Suspects(self.ledger)
        digest = culprit.digest()
        equals = [
            (client, stream)
            for client in self._clients
            for stream in client.requests.streams()
            if stream is not culprit and stream.digest() == digest
        ]
        deaths = [*conviction.deaths, *(death for _, stream in equals for death in suspects.deaths_of(stream))]
        self.refused.add(culprit, why)
        owner = next((client for client in self._clients if culprit in client.requests), of)
        owner.fail(culprit, f"request {culprit.request_id} failed: {why}")
        for client, stream in equals:
            equal = f"request {stream.request_id} failed: it is equal to request {culprit.request_id}, of which"
            client.fail(stream, f"{equal} is known: {why}")
        return deaths
