"""What the clients of all cores of an engine share: the blame for deaths, and news for the routing of requests."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm_mp.client.cores.recovery.refused_requests import RefusedRequests
from vllm_mp.client.cores.recovery.suspects import Conviction, DeathLedger, Suspects
from vllm_mp.client.outputs.stream import RequestStream

if TYPE_CHECKING:
    from vllm_mp.client.cores.core_client import EngineCoreClient
    from vllm_mp.client.cores.recovery.news import Death


class Peers:
    """The clients of the cores of an engine, as each of them knows the others."""

    def __init__(self) -> None:
        self.clients: list[EngineCoreClient] = []
        """In the order of their ranks."""
        self.ledger = DeathLedger()
        self.refused = RefusedRequests()
        self.on_change: Callable[[], None] = lambda: None
        """Called after a core has died, has ended for good, or serves again."""
        self.on_sent: Callable[[RequestStream, int], None] | None = None
        """Called with each new stream that is sent, and the rank of its core; None: no part asks."""
        self.on_read: Callable[[Iterable[RequestStream]], None] | None = None
        """Called with streams of which a core has read the prompt; None: no part asks.

        That is at the first token or vector of each of their completions, and at the first tokens of `moved_unread`.
        """
        self.moved_unread: set[RequestStream] = set()
        """Live streams that have moved to another core, which has sent no token of them yet; empty if no part asks."""

    @property
    def has_deaths(self) -> bool:
        """Deaths are recorded against live requests."""
        return bool(self.ledger.deaths)

    @property
    def has_suspects(self) -> bool:
        """There may be suspects among the live requests; after a single death there are none."""
        return bool(self.ledger.suspects)

    @property
    def num_serving(self) -> int:
        """Number of clients that have a core."""
        return sum(client.has_core for client in self.clients)

    def forgive(self, times: list[float]) -> None:
        """Count the deaths seen at `times` no longer against the limits of restarts."""
        for client in self.clients:
            client.supervisor.forgive(times)

    def convict(self, conviction: Conviction, of: "EngineCoreClient") -> "list[Death]":
        """Fail a request that is to blame for deaths, and all equal requests, live or to come; return their deaths.

        `of` is the client whose core died last.
        """
        culprit, why, suspects = conviction.stream, conviction.why(), Suspects(self.ledger)
        digest = culprit.digest()
        equals = [
            (client, stream)
            for client in self.clients
            for stream in client.requests.streams()
            if stream is not culprit and stream.digest() == digest
        ]
        deaths = [*conviction.deaths, *(death for _, stream in equals for death in suspects.deaths_of(stream))]
        self.refused.add(culprit, why)
        owner = next((client for client in self.clients if culprit in client.requests), of)
        owner.fail(culprit, f"request {culprit.request_id} failed: {why}")
        for client, stream in equals:
            equal = f"request {stream.request_id} failed: it is equal to request {culprit.request_id}, of which"
            client.fail(stream, f"{equal} is known: {why}")
        return deaths
