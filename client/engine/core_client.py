"""The client's end of the wire to whichever core there is: what is sent, what comes back, what outlives a core."""

import asyncio
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from vllm_mp import wire
from vllm_mp.client.engine.connection import run_on
from vllm_mp.client.engine.launcher import Core
from vllm_mp.client.engine.supervisor import CoreSupervisor, Death, End
from vllm_mp.client.engine.suspects import Suspects
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.errors import EngineDeadError, EngineError
from vllm_mp.status_page import AWAKE

logger = logging.getLogger(__name__)

_HANDOVER_TIMEOUT_S = 5.0


class EngineCoreClient:
    """Sends requests and calls to the core, and to its successor again when it has died.

    The books say all that a core has to be told: every live answer with its tokens so far, every call that has not been
    answered, and the pause that is in force. Whether it is to sleep, the dead one's page says. So what happens between
    two cores is written down and sent later. All methods belong to the thread of the loop, but `close` and the
    properties.
    """

    def __init__(self, supervisor: CoreSupervisor, requests: OutputProcessor, on_tokens: Callable[[int], None]) -> None:
        """`on_tokens` is told how many tokens each message has brought."""
        self.supervisor = supervisor
        self.requests = requests
        self._on_tokens = on_tokens
        self._core = supervisor.core
        self._recovers_from: str | None = None
        """The cause of the death, while there is no core."""
        self._closed_with: EngineDeadError | None = None
        self._calls: dict[int, tuple[asyncio.Future[Any], wire.Call]] = {}
        self._call_ids = itertools.count()
        self._pause: wire.Call | None = None
        """The pause that is in force."""
        self._sleep = AWAKE
        """That the last core died in, for the next to go to."""
        self._sleep_calls: set[int] = set()
        """The ids of the calls that bring it there, as long as they are not answered."""
        self._suspicion = Suspects()
        calls = self._calls
        supervisor.watch(lambda: bool(requests.num_slots_in_use or calls))

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the core is gone for good; None while it is not."""
        end = self.supervisor.end
        return None if end is None else EngineDeadError(end)

    @property
    def recovers_from(self) -> str | None:
        """Why there is no core at the moment; None if there is one."""
        return self._recovers_from

    @property
    def incarnation(self) -> int:
        return self._core.connection.incarnation

    def attach(self) -> None:
        """Hear from the core on the running loop; raises EngineDeadError if there will never be one again."""
        if self._closed_with is not None:
            raise EngineDeadError(str(self._closed_with))
        self._listen()
        self._take_news()
        if (error := self.dead_error) is not None:
            raise error

    def add(self, stream: RequestStream, messages: Sequence[wire.AddRequest | wire.AddPooling]) -> None:
        """Ask for the answers of `stream`, with one of `messages` each.

        Raises ValueError where there are too many already, or one is too large.
        """
        stream.is_held = self._pause is not None
        self.requests.enter(stream)
        num_sent = 0
        try:
            for answer, message in zip(stream.answers, messages, strict=True):
                answer.message = message
                self._ask_for(answer)
                num_sent += 1
        except BaseException:
            self.abort_slots(self.requests.withdraw(stream, num_sent))
            raise

    def abort(self, stream: RequestStream) -> None:
        """End a live stream, for its consumer at once, in the core as soon as it hears of it."""
        self.abort_slots(self.requests.end_by_abort(stream))

    def abort_slots(self, slots: list[int]) -> None:
        """Tell the core that nobody waits for these."""
        if slots:
            self._send(wire.AbortRequests(self.incarnation, slots))

    async def call(self, name: str, timeout: float | None, *args: wire.CallArgument) -> Any:
        """Run an operation in the core, or in its successor if it dies before it has answered.

        Raises TimeoutError when there is no answer within `timeout` seconds, EngineError when it is an error.
        """
        call = wire.Call(self.incarnation, next(self._call_ids), name, list(args))
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = reply, call
        self._note_pause(call)
        self._send(call)
        try:
            async with asyncio.timeout(timeout):
                return await reply
        finally:
            self._calls.pop(call.call_id, None)

    def close(self, error: EngineDeadError, timeout: float | None) -> None:
        """End every stream and call with `error`, and the core by force after `timeout` seconds; from any thread."""
        self._closed_with = error
        try:
            self._fail_everything(error)
        finally:
            self.supervisor.stop(timeout)

    def _listen(self) -> None:
        # The loop must not keep a link alive that its owner has dropped.
        this = weakref.ref(self)

        def on_message(message: wire.CoreMessage) -> None:
            if (link := this()) is not None:
                link._on_message(message)

        def on_news() -> None:
            if (link := this()) is not None:
                link._take_news()

        self._core.connection.attach(on_message, self.supervisor.news_fd, on_news)

    def _send(self, message: wire.ClientMessage) -> None:
        """Send what the books hold anyway, if there is a core that is not known to be dead."""
        if self._recovers_from is None and self._closed_with is None and self.supervisor.end is None:
            self._core.connection.send(message)

    def _ask_for(self, answer: Completion) -> None:
        """Ask the core for the rest of an answer; raises ValueError if that takes too large a message."""
        message = answer.message
        assert message is not None
        message.incarnation, message.slot = self.incarnation, answer.slot
        message.isolate_until_num_tokens = self._suspicion.suspect_until(answer)
        if isinstance(message, wire.AddRequest):
            message.output = wire.pack_ids(answer.token_ids)
        if self._recovers_from is None:
            self._send(message)
        else:
            wire.encode_bounded(message)

    def _on_message(self, message: wire.CoreMessage) -> None:
        if isinstance(message, wire.StepOutput):
            self.abort_slots(self.requests.take_in(message))
            self._on_tokens(len(message.tokens) // 4)
        elif isinstance(message, wire.Reply):
            reply, call = self._calls.pop(message.call_id, (None, None))
            if message.call_id in self._sleep_calls:
                self._sleep_calls.remove(message.call_id)
                if message.error is not None:
                    logger.warning("the core does not sleep as the one before it did: %s", message.error)
            if message.error is not None and call is not None and call is self._pause:
                self._pause = None  # it was ended by somebody else
            if reply is not None and not reply.done() and not reply.get_loop().is_closed():
                if message.error is None:
                    reply.set_result(message.result)
                else:
                    reply.set_exception(EngineError(message.error))

    def _take_news(self) -> None:
        for news in self.supervisor.take_news():
            if isinstance(news, Death):
                self._on_death(news)
            elif isinstance(news, Core):
                self._go_on_with(news)
            else:
                self._on_end(news)

    def _on_death(self, death: Death) -> None:
        self._core.connection.drain()
        self._recovers_from = death.cause
        if not self._sleep_calls:  # else it was not yet where it was to be
            self._sleep = death.sleep
        requests = self.requests
        logger.warning("%s; %d requests go on with the next", death.cause.partition(";")[0], len(requests))
        culprit = self._suspicion.note(death, requests.live())
        if culprit is not None:
            requests.fail(
                culprit,
                f"request {culprit.request_id} failed: it was in the step of each core that died, alone in the last: "
                f"{death.cause}",
            )

    def _go_on_with(self, core: Core) -> None:
        """Tell a new core all that it has to know."""
        old, self._core = self._core, core
        old.connection.drain()
        old.connection.detach()
        self._recovers_from = None
        self._listen()
        self.supervisor.release(old)
        self._sleep_again()
        requests = self.requests
        requests.forget_core()
        live = requests.live()
        if self._pause is not None and self._pause.args[0] == "wait":
            # What was there before the pause runs to its end.
            self._ask_again([entry for entry in live if not entry[0].is_held])
            live = [entry for entry in live if entry[0].is_held]
        if self._pause is not None:
            self._pause.incarnation = self.incarnation
            self._send(self._pause)
        self._ask_again(live)
        for _, call in list(self._calls.values()):
            if call is not self._pause:
                call.incarnation = self.incarnation
                self._send(call)

    def _sleep_again(self) -> None:
        """Have a new core sleep before it is told anything else, if the last one did."""
        self._sleep_calls.clear()
        level, missing = self._sleep
        if not missing:
            return
        self._call_for_sleep("sleep", level)
        if back := [tag for tag in wire.SLEEP_TAGS if tag not in missing]:
            self._call_for_sleep("wake_up", *back)

    def _call_for_sleep(self, name: str, *args: wire.CallArgument) -> None:
        call = wire.Call(self.incarnation, next(self._call_ids), name, list(args))
        self._sleep_calls.add(call.call_id)
        self._send(call)

    def _ask_again(self, answers: list[tuple[RequestStream, Completion]]) -> None:
        for stream, answer in answers:
            try:
                self._ask_for(answer)
            except ValueError as error:
                self.abort_slots(self.requests.fail(stream, f"request {stream.request_id}: {error}"))

    def _note_pause(self, call: wire.Call) -> None:
        if call.name == "pause":
            self._pause = call
        elif call.name == "resume":
            self._pause = None
            for stream, _ in self.requests.live():
                stream.is_held = False

    def _on_end(self, end: End) -> None:
        self._core.connection.drain()
        logger.error("%s", end.cause.partition(";")[0])  # the errors carry all of it
        self._fail_everything(EngineDeadError(end.cause))

    def _fail_everything(self, error: EngineDeadError) -> None:
        """End every stream and call with `error`, on the loop that they belong to, which may run in another thread."""
        done = threading.Event()

        def fail() -> None:
            self._core.connection.detach()
            self.requests.fail_all(error)
            for reply, _ in self._calls.values():
                if not reply.done() and not reply.get_loop().is_closed():
                    reply.set_exception(EngineDeadError(str(error)))
            self._calls.clear()
            done.set()

        loop = self._core.connection.loop
        if loop is None:
            fail()
        else:
            run_on(loop, fail)
            done.wait(_HANDOVER_TIMEOUT_S)
