"""The requests and calls of a client, and their replay to the next core.

`EngineCoreClient` owns what a core, and its successor, must be told; it outlives every core. `CoreConnection` (in
`connection.py`) owns the socket to one core and knows nothing of requests.
"""

import asyncio
import itertools
import logging
import secrets
import time
import weakref
from collections import deque
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from vllm_mp import wire
from vllm_mp.arguments.counted import counted
from vllm_mp.client.cores.connection import run_on_and_wait
from vllm_mp.client.cores.pending_calls import PendingCall, PendingCalls
from vllm_mp.client.cores.pings import Pings
from vllm_mp.client.cores.recovery.blame import Blame
from vllm_mp.client.cores.recovery.engine_deaths import EngineDeaths
from vllm_mp.client.cores.recovery.news import Absence, Death, End, News
from vllm_mp.client.cores.recovery.suspects import Entry, Suspects
from vllm_mp.client.cores.recovery.unsent_requests import UnsentRequests
from vllm_mp.client.cores.sources.core_source import Core, ServedModel
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.images.sent_images import SentImages
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import Awaited, RequestStream
from vllm_mp.client.stats import EngineStats, Restart
from vllm_mp.client.stats.restart_counter import REPLACED
from vllm_mp.errors import EngineDeadError, EngineError, RequestInterruptedError

logger = logging.getLogger(__name__)


class CoresAround(Protocol):
    """The cores of an engine, as the client of one of them tells them what happens to it."""

    @property
    def num_serving(self) -> int:
        """Number of cores that serve."""
        ...

    @property
    def has_lasting(self) -> bool:
        """One of the cores is not gone for good."""
        ...

    def note_change(self) -> None:
        """Note that a core has died, has ended for good, serves again, or has loaded other weights."""
        ...

    def note_next_core(self, client: "EngineCoreClient", model: ServedModel) -> None:
        """Note the model of the next core of `client`, before that core is sent anything."""
        ...

    def note_sent(self, stream: RequestStream, rank: int) -> None:
        """Note that a new stream was sent to the core `rank`."""
        ...

    def note_output(self, output: wire.StepOutput, requests: OutputProcessor) -> None:
        """Note what a core has sent, before its `requests` get it."""
        ...


class EngineCoreClient:
    """Sends requests and calls to the core, and replays them to its successor after a death.

    A successor is told everything that is pending, in the order in which it was sent first: what live streams still
    await, with the tokens received so far, and the calls without a reply. A pause or a sleep belongs to the core, whose
    successor has entered it already. Requests and calls that are made while there is no core are recorded, and sent to
    the next core.

    All methods but `fail_all` and the properties must be called in the event loop's thread.
    """

    def __init__(
        self,
        supervisor: CoreSupervisor,
        requests: OutputProcessor,
        stats: EngineStats,
        group: CoresAround,
        deaths: EngineDeaths,
        rank: int,
    ) -> None:
        """The clients of all cores of an engine share `group` and `deaths`; `rank` names the core among them."""
        self.supervisor = supervisor
        self.requests = requests
        self.rank = rank
        self._group = group
        self._deaths = deaths
        self._stats = stats
        self._sent_images = SentImages()
        """The images that the core has, as far as is known."""
        self._num_drops_counted = 0
        """Number of dropped messages of the current connection that `stats` knows of."""
        self._core = supervisor.core
        self._recovers_from: str | None = None
        """The cause of the death, while there is no core."""
        self._closed_with: EngineDeadError | None = None
        self._calls = PendingCalls()
        self._call_ids = itertools.count(secrets.randbits(62))
        """Numbers for calls and requests, in the order in which they are sent; no other client uses them for calls."""
        self._is_paused = supervisor.core.connection.was_paused
        """There is a pause, as far as the core has told."""
        self._suspects = Suspects(deaths.ledger)
        self._blame = Blame(self, deaths, self._suspects)
        self._restart: Restart | None = None
        """What the statistics keep of the latest death."""
        self._waits_since: WeakKeyDictionary[RequestStream, float] = WeakKeyDictionary()
        """When each request was made that found no core, in seconds of `time.monotonic()`."""
        self.is_missed = False
        """No core has been found for so long that requests fail; it may come back."""
        self._unsent = UnsentRequests(requests, self._suspects, weakref.WeakMethod(self._send_waiting))
        self._news: deque[News] = deque()
        """News that wait until all messages that arrived before them have been handled."""
        self._news_loop: asyncio.AbstractEventLoop | None = None
        """The event loop that is about to call `_take_news_on`."""
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
    def model(self) -> ServedModel:
        """What the core has loaded last, also before its death."""
        return self._core.model

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that receives from the core, if any."""
        return self._core.connection.loop

    @property
    def has_core(self) -> bool:
        """There is a core that messages can be sent to."""
        return self._recovers_from is None and self._closed_with is None and self.supervisor.end is None

    @property
    def tests_suspects(self) -> bool:
        """Suspects run isolated in the core, which may die of them."""
        return self._deaths.has_suspects and any(map(self._suspects.is_suspect, self.requests.streams()))

    @property
    def has_exposed(self) -> bool:
        """The core runs requests that may have caused a death, so that it may be the next to die."""
        return self._deaths.is_recorded and any(map(self._suspects.is_exposed, self.requests.streams()))

    @property
    def has_unread_end(self) -> bool:
        """The core is gone for good, and this client has not handled the news of it."""
        return self.supervisor.end is not None and (bool(self._news) or self.supervisor.has_news)

    def attach(self) -> None:
        """Receive from the core on the running loop; raises EngineDeadError if the engine was closed."""
        if self._closed_with is not None:
            raise EngineDeadError(str(self._closed_with))
        if not self._core.connection.is_attached():
            self._listen()
            self._unsent.replays.retry_later(self.loop)
        if self._news or self.supervisor.has_news:
            self._take_news()

    def add(self, stream: RequestStream) -> bool:
        """Ask the core for all that `stream` awaits; return False, and send nothing, if it was aborted meanwhile.

        Raises ValueError if there are too many live completions, or if the message would be too large, and
        EngineGenerateError if an equal request was to blame for deaths of cores.
        """
        self._deaths.refused.check(stream)
        stream.after_pause = self._is_pausing
        stream.number = next(self._call_ids)
        if not self.requests.enter(stream):
            return False
        if not self.has_core:
            self._waits_since[stream] = time.monotonic()
        num_sent = 0
        try:
            for awaited in stream.awaited:
                self._send_request(stream, awaited)
                num_sent += 1
        except BaseException:
            self._abort_slots(self.requests.withdraw(stream, num_sent))
            raise
        self._group.note_sent(stream, self.rank)
        return True

    def abort(self, request_id: str) -> None:
        """End a live request: for its consumer now, in the core when the message arrives. No-op for other ids."""
        self._abort_slots(self.requests.abort(request_id))

    def movable_streams(self, *, has_next: bool) -> tuple[list[RequestStream], list[RequestStream]]:
        """Return the live streams that other cores may take over, while there is no core.

        The second list has those that may have caused its death. If the core has a next one (`has_next`), suspects stay
        for that, and all streams stay during a pause, which that core inherits.
        """
        if has_next and self._is_pausing:
            return [], []
        kinds: tuple[list[RequestStream], list[RequestStream]] = ([], [])
        for stream in self.requests.streams():
            if not (has_next and self._suspects.is_suspect(stream)):
                kinds[self._blame.is_exposed(stream)].append(stream)
        return kinds

    def hand_over(self, streams: list[RequestStream], target: "EngineCoreClient") -> None:
        """Let `target` go on with live `streams`, of which this client's core, dead or to be left, knows no longer."""
        if changes := self.model.changes(target.model, with_tokenizer=False):
            self._fail_begun(streams, changes)
            streams = [stream for stream in streams if not stream.is_over]
        self._unsent.forget(set(streams))
        for stream in streams:
            self.requests.release(stream)
        if self._restart is not None:
            self._stats.note_recovered(self._restart, streams)
        target._take_over(streams)

    def _take_over(self, streams: list[RequestStream]) -> None:
        for stream in streams:
            stream.number = next(self._call_ids)
            self.requests.adopt(stream)
            if not self.has_core:
                self._waits_since[stream] = time.monotonic()
                continue
            for awaited in stream.awaited:
                if awaited.finish is None:
                    self._replay(stream, awaited)
        self._unsent.replays.retry_later(self.loop)

    def fail(self, stream: RequestStream, why: str) -> None:
        """End a live stream with EngineGenerateError."""
        self._abort_slots(self.requests.fail(stream, why))

    def _fail_begun(self, streams: list[RequestStream], changes: list[str]) -> int:
        """Fail those of `streams` that have tokens, because the core that is to go on with them has another model.

        Return their number. `changes` are those of `ServedModel.changes`.
        """
        begun = [stream for stream in streams if any(awaited.num_tokens for awaited in stream.awaited)]
        for stream in begun:
            error = RequestInterruptedError(
                f"request {stream.request_id}: the model's files have changed since it began, and the core that is to "
                f"continue it has {', '.join(changes)}; send it again"
            )
            self._abort_slots(self.requests.fail_with(stream, error))
        return len(begun)

    def forgive(self, times: list[float]) -> None:
        """Stop counting the deaths seen at `times` against the limit of restarts."""
        self.supervisor.forgive(times)

    def post(self, name: str, *args: wire.CallArgument) -> None:
        """Have the next core run an operation, as `call` does, without waiting for its answer."""
        call = self._begin_call(name, args)
        call.reply.add_done_callback(call.report_failure)

    async def call(
        self, name: str, timeout: float | None, *args: wire.CallArgument, awaits_successor: bool = False
    ) -> Any:
        """Run an operation in the core, or in its successor if the core dies before it answers.

        Raises TimeoutError if there is no answer within `timeout` seconds, and EngineError if the answer is an error:
        NotOperatorError if only operators may make the call. With `awaits_successor` each core has `timeout` seconds,
        and the time without a core does not count.
        """
        call = self._begin_call(name, args)
        try:
            async with asyncio.timeout(timeout) as limit:
                if awaits_successor and timeout is not None:
                    self._calls.limit(call, limit, timeout, has_core=self._recovers_from is None)
                return await call.reply
        finally:
            self._calls.pop(call.call_id)
            self._blame.forget_call(call.call_id)

    def _begin_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> PendingCall:
        call = self._calls.add(next(self._call_ids), name, args)
        self._send_call(call)
        return call

    def fail_call(self, call_id: int, why: str) -> None:
        """End a call that is to blame for deaths of cores with EngineError; no-op if its caller waits no more."""
        if (call := self._calls.pop(call_id)) is not None:
            call.settle(None, EngineError(f"the call {call.name} failed: {why}"))

    def count_drops(self) -> None:
        """Count the messages that the connection to the current core has dropped since the last call."""
        num_dropped = self._core.connection.num_dropped
        self._stats.dropped_messages.add(num_dropped - self._num_drops_counted)
        self._num_drops_counted = num_dropped

    def fail_all(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`, which later ones raise too; from any thread."""
        self._closed_with = error
        self._fail_everything(error)

    def leave(self, error: EngineDeadError) -> None:
        """Send and receive nothing more, and end every call with `error`. Streams stay live, to be handed over."""
        self._closed_with = error
        self._core.connection.detach()
        self._calls.fail(str(error))

    @property
    def _is_pausing(self) -> bool:
        """There is a pause, or one has been asked for."""
        return self._is_paused or any(call.name == "pause" for call in self._calls)

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
        if self.has_core:
            self._core.connection.send(message)

    def _send_request(self, stream: RequestStream, awaited: Awaited) -> None:
        """Ask the core, if there is one, for the rest of `awaited`; raises ValueError if the message is too large."""
        message = stream.add_message(awaited.index, self.incarnation, self._suspects.isolation(awaited))
        if not self.has_core:
            wire.encode_bounded(message)  # so that the caller hears of its size now
        elif self._unsent.must_wait(stream, awaited):
            wire.encode_bounded(message)
            self._unsent.hold_back(stream, awaited)
        elif not stream.is_replay or self._unsent.replays.begin(stream, awaited):
            for image in self._sent_images.missing(stream.images):
                self._core.connection.send(wire.PutImage(self.incarnation, image))
            self._core.connection.send(message)

    def _send_call(self, call: PendingCall) -> None:
        is_suspect = self._blame.is_suspect_call(call.call_id)
        self._send(wire.Call(self.incarnation, call.call_id, call.name, list(call.args), is_suspect))

    def _note_pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        if not is_paused:
            for stream in self.requests.streams():
                stream.after_pause = False

    def _send_ping(self) -> None:
        self._send(wire.Call(self.incarnation, next(self._call_ids), "ping"))

    def _abort_slots(self, slots: list[int]) -> None:
        if not slots:
            return
        unsent = self._unsent.remove(slots)
        for _, awaited in unsent:
            slots.remove(awaited.slot)
            self.requests.free_unsent(awaited)
        if slots:
            self._send(wire.AbortRequests(self.incarnation, slots))
        if unsent:  # the core, which does not know them, reports no end of them
            self._send_held_back()

    def _send_held_back(self) -> None:
        """Ask the core for requests that are held back no longer; no-op while there is no core."""
        if self.has_core:
            for stream, awaited in self._unsent.release():
                self._send_again(stream, awaited)

    def _send_waiting(self) -> None:
        """Send replays again for which the core may have room now."""
        if self.has_core:
            for stream, awaited in self._unsent.replays.take():
                self._send_again(stream, awaited)
        self._unsent.replays.retry_later(self.loop)

    def _on_message(self, message: wire.CoreMessage) -> None:
        self._pings.reset()
        if isinstance(message, wire.StepOutput):
            if message.finished:
                message = self._unsent.without_refused_replays(message)
                self._unsent.replays.retry_later(self.loop)
            self._stats.note_step(message, self.rank)
            self._blame.note_output(message)
            self._group.note_output(message, self.requests)
            self._abort_slots(self.requests.process(message))
            self._unsent.replays.note_output(bool(message.finished))
        elif isinstance(message, wire.Reply):
            self._on_reply(message)
        elif isinstance(message, wire.PauseChanged):
            self._note_pause(message.is_paused)
        elif isinstance(message, wire.ModelChanged):
            self._core.connection.model = message.model
            self._group.note_change()
        elif isinstance(message, wire.Mark):
            self._send(wire.MarkSeen(self.incarnation, message.mark))
        elif isinstance(message, wire.MissingImages):
            self._on_missing_images(message)
        self._send_held_back()

    def _on_missing_images(self, missing: wire.MissingImages) -> None:
        """Send a request again that the core has not added, or has removed, after the images that it has lost."""
        self._sent_images.forget(missing.digests)
        for stream, awaited in self.requests.entries_at((missing.slot,)):
            if awaited.finish is not None or stream.is_over:  # it was aborted, of which the core reports no end
                self.requests.free_unsent(awaited)
            elif missing.was_admitted:
                self._replay(stream, awaited)
            elif not self._sent_images.may_send_again(stream, awaited.index, stream.is_replay):
                why = "the core has no memory for its images; raise mm_processor_cache_gb, or give fewer images"
                self._abort_slots(self.requests.fail(stream, f"request {stream.request_id}: {why}"))
                self.requests.free_unsent(awaited)
            elif stream.is_replay:
                self._unsent.put_back([(stream, awaited)])
            else:
                self._send_again(stream, awaited)
        self._unsent.replays.retry_later(self.loop)

    def forget_images(self) -> None:
        """Note that the core has forgotten all images that no live request needs."""
        self._sent_images.clear()

    def _on_reply(self, reply: wire.Reply) -> None:
        call = self._calls.pop(reply.call_id)
        if call is None:
            return
        self._blame.forget_call(reply.call_id)
        if reply.error is None:
            self.supervisor.note_call(call.name, call.args)
        call.take(reply)

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
        self._calls.suspend_limits()
        num_requests = len(self.requests.streams())
        self._restart = self._stats.note_death(death.kind, death.time, death.cause)
        others = "other cores" if self._group.num_serving else "the next core"
        continues = f"; {counted(num_requests, 'request')} will continue on {others}" if num_requests else ""
        level = logging.INFO if death.kind == REPLACED else logging.WARNING
        logger.log(level, "%s%s", death.cause.partition(";")[0], continues)
        self._blame.note_death(death, self._core, self._live_in_core())
        self._group.note_change()

    def _replay_to(self, core: Core) -> None:
        """Make `core` the current core, and tell it everything that is pending."""
        self.count_drops()
        changes = core.model_of_former(self._core).changes(core.model, with_tokenizer=False)
        if changes:
            self._group.note_next_core(self, core.model)
        old, self._core, self._num_drops_counted = self._core, core, 0
        self.is_missed = False
        old.connection.detach()
        if changes:
            num_failed = self._fail_begun(self.requests.streams(), changes)
            what = f"the model's files have changed, and the next core has {', '.join(changes)}"
            logger.error("%s; %s that had begun failed", what, counted(num_failed, "request"))
        if self._restart is not None:
            self._stats.note_restart(self._restart, self.requests.streams())
            seconds, num_requests = self._restart.recovery_s or 0.0, self._restart.num_recovered or 0
            continued = f", {counted(num_requests, 'request')} continued" if num_requests else ""
            number = 1 + core.num_restarts
            of_rank = f" of rank {self.rank}" if core.config.parallel_config.data_parallel_size > 1 else ""
            logger.warning("core %d%s serves again after %.1f s%s", number, of_rank, seconds, continued)
            self._restart = None
        self._sent_images.clear()
        self._listen()
        self.supervisor.release(old)
        self._note_pause(core.connection.was_paused)
        self._blame.note_successor(old, core)
        self._recovers_from = None
        self._calls.begin_limits()
        if convicted := self._blame.convicted:  # also if an earlier core was told, which may not have read that
            self._send(wire.Convicted(self.incarnation, convicted))
        self.requests.forget_core()
        self._unsent.clear()
        self._waits_since.clear()
        calls = deque(self._calls)
        live = self.requests.live()
        self._suspects.choose_sent_group(live)  # now: requests may have ended since the death
        for stream, awaited in sorted(live, key=lambda entry: entry[0].number):
            while calls and calls[0].call_id < stream.number:
                self._send_call(calls.popleft())
            self._replay(stream, awaited)
        self._send(wire.ReplayEnd(self.incarnation))
        for call in calls:
            self._send_call(call)
        self._unsent.replays.retry_later(self.loop)
        self._group.note_change()

    def _live_in_core(self) -> list[Entry]:
        """Return what is live and was sent to the core."""
        unsent = self._unsent.slots()
        return [entry for entry in self.requests.live() if entry[1].slot not in unsent]

    def _replay(self, stream: RequestStream, awaited: Awaited) -> None:
        stream.is_replay = True
        self._send_again(stream, awaited)

    def _send_again(self, stream: RequestStream, awaited: Awaited) -> None:
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
        self.is_missed = True
        self._group.note_change()
        waits_since = time.monotonic() - absence.limit_s
        error = EngineDeadError(absence.cause)
        late = [stream for stream in self.requests.streams() if self._waits_since.get(stream, 0.0) <= waits_since]
        for stream in late:
            self.requests.fail_with(stream, error)
        self._calls.fail(absence.cause, made_until=waits_since)
        if late:
            logger.error("%s; %s failed", absence.cause.partition(";")[0], counted(len(late), "request"))

    def _on_end(self, end: End) -> None:
        logger.error("%s", end.cause.partition(";")[0])  # the errors carry the whole cause
        if end.death is not None and self._group.has_lasting:
            self._blame.note_last_death(end.death, self._core, self._live_in_core())
        self._group.note_change()
        self._fail_everything(EngineDeadError(end.cause))  # what no other core has taken over

    def _fail_everything(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`; from any thread."""

        def fail() -> None:
            self._core.connection.detach()
            self.requests.fail_all(error)
            self._calls.fail(str(error))

        run_on_and_wait(self._core.connection.loop, fail)
