"""The requests and calls of a client, and their replay to the next core.

`EngineCoreClient` owns what a core, and its successor, must be told; it outlives every core. `CoreConnection` (in
`connection.py`) owns the socket to one core and knows nothing of requests.
"""

import asyncio
import itertools
import logging
import os
import secrets
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from vllm_mp import wire
from vllm_mp.client.engine.connection import run_on, run_on_and_wait
from vllm_mp.client.engine.launcher import Core
from vllm_mp.client.engine.pending_call import PendingCall
from vllm_mp.client.engine.pings import Pings
from vllm_mp.client.engine.refused_requests import RefusedRequests
from vllm_mp.client.engine.supervisor import Absence, CoreSupervisor, Death, End, News
from vllm_mp.client.engine.suspects import Conviction, Entry, Suspects
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import Awaited, RequestStream
from vllm_mp.client.stats import EngineStats
from vllm_mp.counted import counted
from vllm_mp.errors import EngineDeadError, EngineError, NotOperatorError
from vllm_mp.status_page import CoreState

logger = logging.getLogger(__name__)

_PING_TIMEOUT_S = 5.0


class EngineCoreClient:
    """Sends requests and calls to the core, and replays them to its successor after a death.

    A successor is told everything that is pending, in the order in which it was sent first: what live streams still
    await, with the tokens received so far, and the calls without a reply. A pause or a sleep belongs to the core, whose
    successor has entered it already. Requests and calls that are made while there is no core are recorded, and sent to
    the next core.

    All methods but `fail_all`, `run_on_loop` and the properties must be called in the event loop's thread.
    """

    def __init__(self, supervisor: CoreSupervisor, requests: OutputProcessor, stats: EngineStats) -> None:
        self.supervisor = supervisor
        self.requests = requests
        self._stats = stats
        self._num_drops_counted = 0
        """Number of dropped messages of the current connection that `stats` knows of."""
        self._core = supervisor.core
        self._recovers_from: str | None = None
        """The cause of the death, while there is no core."""
        self._closed_with: EngineDeadError | None = None
        self._calls: dict[int, PendingCall] = {}
        """By id: the calls that the core has not answered."""
        self._call_ids = itertools.count(secrets.randbits(62))
        """Numbers for calls and requests, in the order in which they are sent; no other client uses them for calls."""
        self._is_paused = supervisor.core.connection.was_paused
        """There is a pause, as far as the core has told."""
        self._suspects = Suspects()
        self._unexplained: Death | None = None
        """The death of a shared core, until its successor says what it was computing."""
        self._waits_since: WeakKeyDictionary[RequestStream, float] = WeakKeyDictionary()
        """When each request was made that found no core, in seconds of `time.monotonic()`."""
        self._held_back: list[Entry] = []
        """What the core has not been asked for, because a group of suspects is tested."""
        self._refused = RefusedRequests()
        self._convicted: deque[int] = deque(maxlen=wire.MAX_CONVICTED_DEATHS)
        """The incarnations of shared cores for whose deaths requests of this client are to blame."""
        self._cores_work = True
        """A core has computed something since the latest conviction, so not every request ends every core."""
        self._news: deque[News] = deque()
        """News that wait until all messages that arrived before them have been handled."""
        self._news_loop: asyncio.AbstractEventLoop | None = None
        """The event loop that is about to call `_take_news_on`."""
        self._owner = os.getpid()
        calls = self._calls
        self._pings = Pings(weakref.WeakMethod(self._send_ping))
        supervisor.watch(lambda: bool(requests.num_slots_in_use or calls), self._pings)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone for good; None while it is not."""
        end = self.supervisor.end
        return None if end is None else EngineDeadError(end)

    @property
    def recovers_from(self) -> str | None:
        """The cause of the death, while there is no core."""
        return self._recovers_from

    @property
    def incarnation(self) -> int:
        return self._core.connection.incarnation

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that receives from the core, if any."""
        return self._core.connection.loop

    @property
    def _has_core(self) -> bool:
        """There is a core that messages can be sent to."""
        return self._recovers_from is None and self._closed_with is None and self.supervisor.end is None

    def attach(self) -> None:
        """Receive from the core on the running loop; raises EngineDeadError if the core is gone for good."""
        if self._closed_with is not None:
            raise EngineDeadError(str(self._closed_with))
        if not self._core.connection.is_attached():
            self._listen()
        if self._news or self.supervisor.has_news:
            self._take_news()
        if (error := self.dead_error) is not None:
            raise error

    def add(self, stream: RequestStream) -> bool:
        """Ask the core for all that `stream` awaits; return False, and send nothing, if it was aborted meanwhile.

        Raises ValueError if there are too many live completions, or if the message would be too large, and
        EngineGenerateError if an equal request was to blame for deaths of cores.
        """
        self._refused.check(stream)
        stream.after_pause = self._is_paused or any(call.name == "pause" for call in self._calls.values())
        stream.number = next(self._call_ids)
        if not self.requests.enter(stream):
            return False
        if not self._has_core:
            self._waits_since[stream] = time.monotonic()
        num_sent = 0
        try:
            for awaited in stream.awaited:
                self._send_request(stream, awaited)
                num_sent += 1
        except BaseException:
            self._abort_slots(self.requests.withdraw(stream, num_sent))
            raise
        return True

    def abort(self, request_id: str) -> None:
        """End a live request: for its consumer now, in the core when the message arrives. No-op for other ids."""
        self._abort_slots(self.requests.abort(request_id))

    def abandon(self, stream: RequestStream) -> None:
        """End a stream that has lost its consumer; from any thread, no-op in a forked child and at the exit."""
        if stream.is_over or os.getpid() != self._owner or sys.is_finalizing():
            return
        loop = self._core.connection.loop
        if loop is None:
            self._abort_stream(stream)
        else:
            run_on(loop, self._abort_stream, stream)

    async def call(self, name: str, timeout: float | None, *args: wire.CallArgument) -> Any:
        """Run an operation in the core, or in its successor if the core dies before it answers.

        Raises TimeoutError if there is no answer within `timeout` seconds, and EngineError if the answer is an error:
        NotOperatorError if only operators may make the call.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = PendingCall(next(self._call_ids), name, args, reply, time.monotonic())
        self._calls[call.call_id] = call
        self._send_call(call)
        try:
            async with asyncio.timeout(timeout):
                return await reply
        finally:
            self._calls.pop(call.call_id, None)

    async def check_health(self, limit: float) -> None:
        """Return if the core is well; `limit` is the age in seconds of a heartbeat that means a hang.

        Raises EngineError if the core does not answer within 5 s, unless it is in a long step or waking up.
        """
        try:
            await self.ping(_PING_TIMEOUT_S)
        except EngineError:
            status = self.supervisor.status()
            if (
                self._has_core
                and status is not None
                and status.state in (CoreState.STEPPING, CoreState.LOADING)
                and status.heartbeat_age < limit
            ):
                return
            raise

    async def ping(self, timeout: float) -> None:
        """Return once the core answers; raises EngineError if it does not within `timeout` seconds."""
        try:
            await self.call("ping", timeout)
        except TimeoutError as error:
            if self._recovers_from is not None:
                raise EngineError(
                    f"the core died and its successor is not ready yet: {self._recovers_from}; try again later"
                ) from error
            raise EngineError(f"the core has not answered for {timeout:g} s: {self.supervisor.status()}") from error

    def count_drops(self) -> None:
        """Count the messages that the connection to the current core has dropped since the last call."""
        num_dropped = self._core.connection.num_dropped
        self._stats.dropped_messages.add(num_dropped - self._num_drops_counted)
        self._num_drops_counted = num_dropped

    def fail_all(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`, which later ones raise too; from any thread."""
        self._closed_with = error
        self._fail_everything(error)

    def run_on_loop(self, call: Callable[[], None]) -> None:
        """Run `call` on the event loop of the streams and wait for its end; from any thread."""
        run_on_and_wait(self._core.connection.loop, call)

    def _listen(self) -> None:
        # The loop must not keep a client alive that its owner has dropped.
        this = weakref.ref(self)

        def on_message(message: wire.CoreMessage) -> None:
            if (client := this()) is not None:
                client._on_message(message)

        def on_news() -> None:
            if (client := this()) is not None:
                client._take_news()

        self._core.connection.attach(on_message, self.supervisor.news_fd, on_news)

    def _send(self, message: wire.ClientMessage) -> None:
        """Send, unless there is no core: then the message is dropped, and its content is replayed to the next one."""
        if self._has_core:
            self._core.connection.send(message)

    def _send_request(self, stream: RequestStream, awaited: Awaited) -> None:
        """Ask the core, if there is one, for the rest of `awaited`; raises ValueError if the message is too large."""
        message = stream.add_message(awaited.index, self.incarnation, self._suspects.isolation(awaited))
        if self._has_core and self._suspects.is_held_back(awaited):
            self._held_back.append((stream, awaited))
        elif self._has_core:
            self._core.connection.send(message)
        else:
            wire.encode_bounded(message)  # so that the caller hears of its size now

    def _send_call(self, call: PendingCall) -> None:
        self._send(wire.Call(self.incarnation, call.call_id, call.name, list(call.args)))

    def _note_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if not is_paused:
            for stream in self.requests.streams():
                stream.after_pause = False

    def _send_ping(self) -> None:
        self._send(wire.Call(self.incarnation, next(self._call_ids), "ping"))

    def _abort_stream(self, stream: RequestStream) -> None:
        if not stream.is_over:  # else its id may belong to another request
            self.abort(stream.request_id)

    def _abort_slots(self, slots: list[int]) -> None:
        if slots and self._held_back:
            unsent = [entry for entry in self._held_back if entry[1].slot in slots]
            self._held_back = [entry for entry in self._held_back if entry not in unsent]
            for _, awaited in unsent:
                slots.remove(awaited.slot)
                self.requests.free_unsent(awaited)
        if slots:
            self._send(wire.AbortRequests(self.incarnation, slots))

    def _send_held_back(self) -> None:
        """Ask the core for the next group of suspects, or for all that was held back, once the last is cleared."""
        if self._held_back and self._suspects.choose_sent_group(self.requests.live()):
            held_back, self._held_back = self._held_back, []
            for stream, awaited in held_back:
                self._replay(stream, awaited)

    def _on_message(self, message: wire.CoreMessage) -> None:
        self._pings.reset()
        if isinstance(message, wire.StepOutput):
            self._stats.note_step(message)
            self._cores_work = self._cores_work or bool(message.tokens or message.vectors)
            self._abort_slots(self.requests.process(message))
            self._send_held_back()
        elif isinstance(message, wire.Reply):
            self._on_reply(message)
        elif isinstance(message, wire.PauseChanged):
            self._note_pause(message.is_paused)
        elif isinstance(message, wire.Mark):
            self._send(wire.MarkSeen(self.incarnation, message.mark))

    def _on_reply(self, reply: wire.Reply) -> None:
        call = self._calls.pop(reply.call_id, None)
        if call is None:
            return
        if reply.error is None:
            call.settle(reply.result, None)
        else:
            call.settle(None, (NotOperatorError if reply.needs_operator else EngineError)(reply.error))

    def _take_news(self) -> None:
        """Handle the news of the supervisor, in later turns of the loop while messages of the core wait."""
        self._news += self.supervisor.take_news()
        while self._news:
            if not self._core.connection.drain():
                loop = self._core.connection.loop
                if loop is not None and loop is not self._news_loop:
                    self._news_loop = loop
                    loop.call_soon(self._take_news_on, loop)
                return
            news = self._news.popleft()
            if isinstance(news, Death):
                self._on_death(news)
            elif isinstance(news, Core):
                self._replay_to(news)
            elif isinstance(news, Absence):
                self._on_absence(news)
            else:
                self._on_end(news)

    def _take_news_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._news_loop:
            self._news_loop = None
        if loop is self._core.connection.loop:  # else another loop, or none, takes the news
            self._take_news()

    def _on_death(self, death: Death) -> None:
        self._recovers_from = death.cause
        requests = self.requests
        self._stats.note_death(death.kind, death.time, death.cause)
        continues = f"; {counted(len(requests), 'request')} will continue on the next core" if requests else ""
        logger.warning("%s%s", death.cause.partition(";")[0], continues)
        if self._core.process is None:
            self._unexplained = death
        else:
            self._blame(death)

    def _explain_death(self, old: Core, core: Core) -> None:
        """Find the request to blame for the death of `old`, a shared core, with what its successor says of it."""
        death, self._unexplained = self._unexplained, None
        if death is None:
            return
        if core.welcome.why_dropped:
            logger.warning("the core had dropped this client: %s", core.welcome.why_dropped)
        if core.connection.incarnation == old.connection.incarnation:
            return  # the connection broke, and the core lives
        last = core.welcome.last_death
        if last is not None and last.incarnation == old.connection.incarnation:
            death = death._replace(
                cause=last.cause,
                in_step=dict(last.in_step),
                num_in_step=last.num_in_step,
                is_from_outside=last.is_from_outside,
                kind=last.kind,
                is_step_known=True,
                incarnation=last.incarnation,
            )
        self._blame(death)

    def _blame(self, death: Death) -> None:
        """Record a death for each live request in its step, and fail those that are to blame."""
        for conviction in self._suspects.record(death, self.requests.live()):
            self._convict(conviction)

    def _convict(self, conviction: Conviction) -> None:
        """Fail a request that is to blame for deaths, and all equal requests, live or to come."""
        culprit, why = conviction.stream, conviction.why()
        digest = culprit.digest()
        equals = [stream for stream in self.requests.streams() if stream is not culprit and stream.digest() == digest]
        deaths = [*conviction.deaths, *(death for stream in equals for death in self._suspects.deaths_of(stream))]
        if self._core.process is None:
            self._convicted.extend(sorted({death.incarnation for death in deaths if death.is_step_known}))
        elif self._cores_work:  # else the limit of restarts ends an engine in which no request can run
            self.supervisor.forgive(sorted({death.time for death in deaths}))
        self._cores_work = False
        self._refused.add(culprit, why)
        self.requests.fail(culprit, f"request {culprit.request_id} failed: {why}")
        for stream in equals:
            equal = f"request {stream.request_id} failed: it is equal to request {culprit.request_id}, of which"
            self.requests.fail(stream, f"{equal} is known: {why}")

    def _replay_to(self, core: Core) -> None:
        """Make `core` the current core, and tell it everything that is pending."""
        self.count_drops()
        old, self._core, self._num_drops_counted = self._core, core, 0
        old.connection.detach()
        self._recovers_from = None
        self._stats.note_restart()
        self._listen()
        self.supervisor.release(old)
        self._note_pause(core.connection.was_paused)
        self._explain_death(old, core)
        if self._convicted:  # also if an earlier core was told, which may have died before it read that
            self._send(wire.Convicted(self.incarnation, list(self._convicted)))
        self.requests.forget_core()
        self._held_back.clear()
        self._waits_since.clear()
        calls = deque(self._calls.values())
        live = self.requests.live()
        self._suspects.choose_sent_group(live)  # now: requests may have ended since the death
        for stream, awaited in sorted(live, key=lambda entry: entry[0].number):
            while calls and calls[0].call_id < stream.number:
                self._send_call(calls.popleft())
            self._replay(stream, awaited)
        for call in calls:
            self._send_call(call)

    def _replay(self, stream: RequestStream, awaited: Awaited) -> None:
        if stream.is_over:  # another of its completions could not be sent, which failed all of them
            self.requests.free_unsent(awaited)
            return
        try:
            self._send_request(stream, awaited)
        except ValueError as error:
            self._abort_slots(self.requests.fail(stream, f"request {stream.request_id}: {error}"))
            self.requests.free_unsent(awaited)

    def _on_absence(self, absence: Absence) -> None:
        """Fail what has waited too long for a shared core; the supervisor goes on trying to reach one."""
        waits_since = time.monotonic() - absence.limit_s
        error = EngineDeadError(absence.cause)
        late = [stream for stream in self.requests.streams() if self._waits_since.get(stream, 0.0) <= waits_since]
        for stream in late:
            self.requests.fail_with(stream, error)
        for call in list(self._calls.values()):
            if call.made_at <= waits_since:
                del self._calls[call.call_id]
                call.settle(None, EngineDeadError(absence.cause))
        if late:
            logger.error("%s; %s failed", absence.cause.partition(";")[0], counted(len(late), "request"))

    def _on_end(self, end: End) -> None:
        logger.error("%s", end.cause.partition(";")[0])  # the errors carry the whole cause
        self._fail_everything(EngineDeadError(end.cause))

    def _fail_everything(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`; from any thread."""

        def fail() -> None:
            self._core.connection.detach()
            self.requests.fail_all(error)
            for call in self._calls.values():
                call.settle(None, EngineDeadError(str(error)))
            self._calls.clear()

        self.run_on_loop(fail)
