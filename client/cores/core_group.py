"""The cores of an engine: which core gets a request, and which goes on with the requests of a core that died."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from vllm_mp import wire
from vllm_mp.client.cores.connection import run_on, run_on_and_wait
from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.cores.lasting_calls import AdapterCalls
from vllm_mp.client.cores.recovery.engine_deaths import EngineDeaths
from vllm_mp.client.cores.router import Placement, RoutedRequest, Router, prefix_hashes
from vllm_mp.client.cores.sources.core_source import Core, ServedModel
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.stats import EngineStats
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.errors import EngineDeadError, EngineError, EngineStartError

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0
_KEPT_CALLS = frozenset(
    (
        *("add_lora", "pause", "pin_lora", "remove_lora", "reset_mm_cache", "reset_prefix_cache", "resume", "sleep"),
        "wake_up",
    )
)
"""Operations that change the state in which a core serves: a core that is away carries them out when it is back."""


class CoreGroup:
    """The clients of all cores of an engine; with one core, a thin layer above its client.

    Every request runs on one core, with all its completions. When that core dies, the others go on with its requests at
    once, as far as they have a core and there is no pause; suspects wait for the next core (see `suspects.py`).

    All requests meet one model. A core that has loaded another one, because the files have changed, is left out as long
    as another core has the engine's model, or may have it again.

    Methods must be called in the event loop's thread, except for `abandon`, `fail_all`, `run_on_loop` and properties.
    """

    def __init__(self, supervisors: list[CoreSupervisor], requests: LiveRequests, stats: EngineStats) -> None:
        """`supervisors`, in the order of the ranks, get and lose entries as cores are added and removed."""
        self.supervisors = supervisors
        self.requests = requests
        self._stats = stats
        self._clients: list[EngineCoreClient] = []
        """The clients of the cores, in the order of their ranks."""
        self._deaths = EngineDeaths(self._clients)
        self._draining: set[int] = set()
        """Ranks of the cores that get no new requests."""
        self._model: ServedModel | None = None
        """The engine's model; None before it is known."""
        self._left_out: dict[int, str] = {}
        """By rank: what differs in the model of a core that is left out."""
        self._router: Router | None = None
        """None while there is only one core."""
        self._placements: dict[RequestStream, tuple[Placement, bool]] = {}
        """Of each live stream that was routed, and whether its first token has arrived from that core."""
        self._moved_unread: set[RequestStream] = set()
        """Live streams that have moved to another core, which has sent no token of them yet."""
        self._latest_choice: tuple[RequestStream, RoutedRequest] | None = None
        """The request for which a core was chosen last, which is sent at once."""
        self.adapter_calls = AdapterCalls()
        self._num_ranks = 0
        self._is_closed = False
        """`fail_all` was called: no request moves any more."""
        self._owner = os.getpid()
        for supervisor in supervisors:
            self._add_client(supervisor, self.reserve_rank())

    @property
    def first(self) -> EngineCoreClient:
        """The client of the core with the lowest rank."""
        return self._clients[0]

    @property
    def clients(self) -> list[EngineCoreClient]:
        """The clients of the cores, in the order of their ranks."""
        return list(self._clients)

    @property
    def num_serving(self) -> int:
        """Number of cores that serve the engine's model."""
        return sum(client.has_core for client in self._clients_of_model)

    @property
    def has_lasting(self) -> bool:
        """One of the cores is not gone for good."""
        return any(client.dead_error is None for client in self._clients)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why all cores are gone for good; None while one is not."""
        error = None
        for client in self._clients:
            if (error := client.dead_error) is None:
                return None
        return error

    @property
    def recovers_from(self) -> str | None:
        """The cause of the latest known death, while there is no core."""
        clients = self._clients_of_model
        causes = [client.recovers_from for client in clients if not client.has_core]
        return None if len(causes) < len(clients) else next(filter(None, causes), None)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that receives from the cores, if any."""
        return next((client.loop for client in self._clients if client.loop is not None), None)

    def is_draining(self, rank: int) -> bool:
        """Return whether the core gets no new requests."""
        return rank in self._draining

    def why_left_out(self, rank: int) -> str | None:
        """Return what differs in the core's model, for which it gets no requests; None if it has the engine's."""
        return self._left_out.get(rank)

    def check_model(self, core: Core) -> None:
        """Raise EngineStartError unless a core that is to be added has the engine's model."""
        self._choose_model()
        model, has_own_parent = self._model or self.first.model, core.process is None
        if changes := model.changes(core.model, with_tokenizer=has_own_parent):
            raise EngineStartError(
                f"the new core and those of this engine have different models: {', '.join(changes)}; add a core of the "
                "same model, or first have all cores load the new weights: call sleep(level=2) and wake_up()"
            )

    def reserve_rank(self) -> int:
        """Return the rank of the next core that is added."""
        self._num_ranks += 1
        return self._num_ranks - 1

    def check_rank(self, rank: int | None) -> None:
        """Raise ValueError unless `rank` is None or names a core."""
        ranks = [client.rank for client in self._clients]
        if rank is None or (rank in ranks and not isinstance(rank, bool)):
            return
        known = "one core serves all requests, and its rank is 0" if ranks == [0] else f"the ranks are {_listed(ranks)}"
        raise ValueError(f"data_parallel_rank={rank!r}: {known}; leave it None")

    def attach(self) -> None:
        """Receive from the cores on the running loop; raises EngineDeadError if all are gone for good."""
        for client in self._clients:
            client.attach()
        if (error := self.dead_error) is not None:
            raise error

    def client_for(self, stream: RequestStream, rank: int | None = None) -> EngineCoreClient:
        """Return the client to which a new request must be given: of the core `rank`, or where it waits least.

        A core that does not serve, or is drained, is replaced by another one.
        """
        if self._router is None:
            return self._clients[0]
        candidates = self._candidates()
        request = self._routed(stream)
        self._latest_choice = stream, request
        return self.client(rank if rank in candidates else self._router.choose(request, candidates))

    def abort(self, request_id: str) -> None:
        """End a live request: for its consumer now, in its core when the message arrives. No-op for other ids."""
        stream = self.requests.find(request_id)
        if stream is None:
            self.requests.abort_early(request_id)
        for client in self._clients:
            if stream is not None and stream in client.requests:
                client.abort(request_id)

    def abandon(self, stream: RequestStream) -> None:
        """End a stream that has lost its consumer; from any thread, no-op in a forked child and at the exit."""
        if stream.is_over or os.getpid() != self._owner or sys.is_finalizing():
            return
        loop = self.loop
        if loop is None:
            self._abort_stream(stream)
        else:
            run_on(loop, self._abort_stream, stream)

    async def call(
        self, name: str, timeout: float | None, *args: wire.CallArgument, awaits_successor: bool = False
    ) -> list[Any]:
        """Run an operation in every core, as `EngineCoreClient.call` does, and return the results of those that serve.

        A core that is away is not waited for while another one serves. If the operation changes its state, the core
        carries it out when it is back. A core that ends for good meanwhile has no result.
        """
        with self.adapter_calls.noted(name, args):
            return await self._call(name, timeout, args, awaits_successor)

    async def _call(
        self, name: str, timeout: float | None, args: tuple[wire.CallArgument, ...], awaits_successor: bool
    ) -> list[Any]:
        clients = self._lasting_clients()
        if len(clients) == 1:
            return [await clients[0].call(name, timeout, *args, awaits_successor=awaits_successor)]
        serving = [client for client in clients if client.has_core]
        if serving and name in _KEPT_CALLS:
            for client in clients:
                if client not in serving:
                    client.post(name, *args)
        called = serving or clients
        if name == "reset_prefix_cache" and self._router is not None:
            for client in clients:
                self._router.forget_prefixes(client.rank)
        replies = await asyncio.gather(
            *(client.call(name, timeout, *args, awaits_successor=awaits_successor) for client in called),
            return_exceptions=True,
        )
        errors = [reply for reply in replies if isinstance(reply, BaseException)]
        results = [reply for reply in replies if not isinstance(reply, BaseException)]
        if lasting := [error for error in errors if not isinstance(error, EngineDeadError)] or (not results and errors):
            raise lasting[0]
        return results

    async def check_health(self, limit: float) -> None:
        """Return if a core is well; `limit` is the age in seconds of a heartbeat that means a hang.

        Raises EngineError if no core answers within 5 s, unless one is in a long step or waking up.
        """
        try:
            await self.ping(_PING_TIMEOUT_S)
        except EngineError:
            for client in self._clients:
                status = client.supervisor.status()
                if (
                    client.has_core
                    and status is not None
                    and status.state in (CoreState.STEPPING, CoreState.LOADING)
                    and status.heartbeat_age < limit
                ):
                    return
            raise

    async def ping(self, timeout: float) -> None:
        """Return once a core answers; raises EngineError if none does within `timeout` seconds."""
        clients = self._lasting_clients()
        serving = [client for client in self._clients_of_model if client.has_core] or clients
        try:
            await _first([client.call("ping", timeout) for client in serving])
        except TimeoutError as error:
            if (cause := self.recovers_from) is not None:
                raise EngineError(
                    f"the core died and its successor is not ready yet: {cause}; try again later"
                ) from error
            states = "; ".join(str(client.supervisor.status()) for client in serving)
            raise EngineError(f"the core has not answered for {timeout:g} s: {states}") from error

    def count_drops(self) -> None:
        """Count the messages that the connections to the current cores have dropped since the last call."""
        for client in self._clients:
            client.count_drops()

    def fail_all(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`, which later ones raise too; from any thread."""
        # A core that dies now must not leave its requests to a client that has failed all of its own.
        self._is_closed = True
        for client in self._clients:
            client.fail_all(error)

    def run_on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop of the streams and wait for its end; from any thread."""
        run_on_and_wait(self.loop, call)

    def add_core(self, supervisor: CoreSupervisor, rank: int) -> None:
        """Route requests to the core of `supervisor` too, which has served no request yet; `rank` was reserved."""
        self.supervisors.append(supervisor)
        self._add_client(supervisor, rank)

    def drain(self, rank: int) -> EngineCoreClient:
        """Send the core no new requests, unless no other core is left, and return its client.

        Raises ValueError if there is no such core.
        """
        client = self.client(rank)
        self._draining.add(rank)
        return client

    def resume(self, rank: int) -> None:
        """Send the core requests again, after `drain`. Raises ValueError if there is no such core."""
        self.client(rank)
        self._draining.discard(rank)

    def remove(self, rank: int) -> CoreSupervisor:
        """Let other cores go on with the core's requests, and forget it; return its supervisor, which must be stopped.

        Raises ValueError if there is no such core, or no other that is not gone for good.
        """
        client = self.client(rank)
        others = [other for other in self._clients if other is not client and other.dead_error is None]
        if not others or self._router is None:
            raise ValueError(f"rank={rank}: no other core could go on with its requests; add one before")
        self._draining.add(rank)
        client.leave(EngineDeadError(f"the core with rank {rank} was removed"))
        self._clients.remove(client)
        self._choose_model()
        for stream in client.requests.streams():
            self._move(stream, client, self._candidates())
        client.requests.forget_core()
        self._router.remove_core(rank)
        self._draining.discard(rank)
        self.supervisors.remove(client.supervisor)
        return client.supervisor

    def _add_client(self, supervisor: CoreSupervisor, rank: int) -> None:
        requests = OutputProcessor(self.requests)
        self._clients.append(EngineCoreClient(supervisor, requests, self._stats, self, self._deaths, rank))
        if self._router is not None:
            self._router.add_core(rank, _cache_tokens(supervisor))
        elif len(self._clients) > 1:
            self._begin_routing()
        if self._router is not None:
            self._choose_model()

    def _begin_routing(self) -> None:
        """Follow the requests from now on, because there is a choice between cores."""
        first = self.first.supervisor.core
        # Of an own core, this client is the only one.
        self._router = Router(seed=first.client if first.process is None else None)
        for client in self._clients:
            self._router.add_core(client.rank, _cache_tokens(client.supervisor))
        on_end = self.requests.on_end

        def note_end(stream: RequestStream) -> None:
            on_end(stream)
            self._note_left(stream)

        self.requests.on_end = note_end

    def client(self, rank: int) -> EngineCoreClient:
        """Return the client of a core. Raises ValueError if there is no such core."""
        for client in self._clients:
            if client.rank == rank:
                return client
        ranks = [client.rank for client in self._clients]
        raise ValueError(f"rank={rank!r}: there is no such core; the ranks are {_listed(ranks)}")

    def _lasting_clients(self) -> list[EngineCoreClient]:
        """Return the clients of cores that are not gone for good; raises EngineDeadError if all are."""
        clients = [client for client in self._clients if client.dead_error is None]
        if not clients and (error := self.dead_error) is not None:
            raise error
        return clients

    @property
    def _clients_of_model(self) -> list[EngineCoreClient]:
        """The clients of the cores that are not left out."""
        return [client for client in self._clients if client.rank not in self._left_out]

    def _choose_model(self, next_models: dict[EngineCoreClient, ServedModel] | None = None) -> None:
        """Choose the engine's model, and the cores to leave out, which have another one.

        It is the former model as long as a core has it that is neither gone for good nor missed for too long.
        `next_models` are those of cores that their clients do not have yet. A core without weights is not left out:
        nothing says which ones it will load.
        """
        current = {
            client: client.model for client in self._clients if client.dead_error is None and not client.is_missed
        }
        models = {
            client: model for client, model in (current | (next_models or {})).items() if model.digest != wire.NO_DIGEST
        }
        known = list(models.values())
        former = self._model
        if known and (former is None or all(former.changes(model, with_tokenizer=False) for model in known)):
            self._model = known[0]
        before, self._left_out = self._left_out, {}
        if self._model is None:
            return
        for client, model in models.items():
            if changes := self._model.changes(model, with_tokenizer=False):
                self._left_out[client.rank] = ", ".join(changes)
        for rank in self._left_out.keys() - before.keys():
            logger.error(
                "the core with rank %d differs from the other cores (%s): it gets no requests while another core has "
                "the engine's model; to load the new weights in all cores, call sleep(level=2) and wake_up()",
                rank,
                self._left_out[rank],
            )

    def _candidates(self) -> list[int]:
        """Return the ranks of the cores that may get a request, the best kind that there is."""
        clients = self._clients_of_model
        serving = [client for client in clients if client.has_core and client.rank not in self._draining]
        if self._deaths.has_suspects:
            serving = [client for client in serving if not client.tests_suspects] or serving
        lasting = (
            serving
            or [client for client in clients if client.has_core]
            or [client for client in clients if client.dead_error is None]
            or clients
        )
        return [client.rank for client in lasting]

    def _routed(self, stream: RequestStream) -> RoutedRequest:
        """Return what the router must know of a stream."""
        num_tokens = stream.num_prompt_tokens + max(awaited.num_tokens for awaited in stream.awaited)
        prompt, root = stream.prefix()
        caches = self._clients[0].supervisor.core.config.cache_config.enable_prefix_caching
        return RoutedRequest(num_tokens, len(stream.awaited), prefix_hashes(prompt, root) if caches else ())

    def note_change(self) -> None:
        """Let other cores go on with the requests of cores that are dead.

        Called when a core dies, ends, serves, or has loaded other weights.
        """
        if self._router is None or self._is_closed:
            return
        self._choose_model()
        for client in self._clients:
            if client.has_core or client.has_unread_end:  # the news tells which requests may have caused the death
                continue
            self._router.forget_prefixes(client.rank)
            others = [rank for rank in self._candidates() if self.client(rank).has_core]
            if not others and client.dead_error is not None:
                others = [other.rank for other in self._clients_of_model if other.dead_error is None]
            if others:
                self._move_all(client, others, has_next=client.dead_error is None)

    def note_next_core(self, client: EngineCoreClient, model: ServedModel) -> None:
        """Let other cores go on with the requests of `client`, which has no core, if its next core is left out.

        `model` is that core's.
        """
        if self._router is None or self._is_closed:
            return
        self._choose_model({client: model})
        if client.rank in self._left_out:
            self._move_all(client, self._candidates(), has_next=False)

    def _move_all(self, client: EngineCoreClient, ranks: list[int], *, has_next: bool) -> None:
        """Let `ranks` go on with the requests of a core that is dead; `has_next` is as for `movable_streams`."""
        streams, exposed = client.movable_streams(has_next=has_next)
        shelter = [rank for rank in ranks if exposed and self.client(rank).has_exposed] or ranks
        for stream in exposed:
            shelter = [self._move(stream, client, shelter)]
        for stream in streams:
            self._move(stream, client, ranks)

    def _move(self, stream: RequestStream, source: EngineCoreClient, ranks: list[int]) -> int:
        """Let one of `ranks` go on with a stream of `source`, and return that rank."""
        assert self._router is not None
        self._note_left(stream)
        request = self._routed(stream)
        chosen = self._router.choose(request, ranks)
        self._placements[stream] = self._router.place(request, chosen), False
        self._moved_unread.add(stream)
        source.hand_over([stream], self.client(chosen))
        return chosen

    def note_sent(self, stream: RequestStream, rank: int) -> None:
        """Note that a new stream was sent to the core `rank`."""
        if self._router is None:
            return
        choice = self._latest_choice
        request = choice[1] if choice is not None and choice[0] is stream else self._routed(stream)
        self._placements[stream] = self._router.place(request, rank), False

    def note_output(self, output: wire.StepOutput, requests: OutputProcessor) -> None:
        """Note which prompts a core has read: of streams that get their first token or vector from it."""
        if self._router is None:
            return
        if output.queued:
            self._note_read(requests.streams_at([slot for slot, _ in output.queued]))
        if self._moved_unread:  # which are not in `queued` if they moved with tokens
            self._note_read(self._moved_unread.intersection(requests.streams_in(output)))

    def _note_read(self, streams: Iterable[RequestStream]) -> None:
        assert self._router is not None
        for stream in streams:
            self._moved_unread.discard(stream)
            placement, was_read = self._placements.get(stream, (None, True))
            if placement is not None and not was_read:
                self._router.note_read(placement)
                self._placements[stream] = placement, True

    def _note_left(self, stream: RequestStream) -> None:
        """Note that a stream has ended, or has left its core."""
        self._moved_unread.discard(stream)
        placement, was_read = self._placements.pop(stream, (None, True))
        if placement is not None and self._router is not None:
            self._router.note_end(placement, was_read)

    def _abort_stream(self, stream: RequestStream) -> None:
        if not stream.is_over:  # else its id may belong to another request
            self.abort(stream.request_id)


def _cache_tokens(supervisor: CoreSupervisor) -> int:
    """Return the number of tokens for which a core's KV cache has room."""
    cache = supervisor.core.config.cache_config
    return cache.num_blocks * cache.block_size


async def _first(calls: list[Coroutine[Any, Any, Any]]) -> None:
    """Return when the first of `calls` has succeeded; raise what the last one raises if all fail."""
    if len(calls) == 1:
        await calls[0]
        return
    pending: set[asyncio.Future[Any]] = {asyncio.ensure_future(call) for call in calls}
    error: BaseException | None = None
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            errors = [task.exception() for task in done]
            if None in errors:
                return
            error = errors[0]
    finally:
        for task in pending:
            task.cancel()
    assert error is not None
    raise error


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
