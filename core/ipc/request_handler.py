"""Serves what clients send: adds their requests to the scheduler, runs their calls, and sends results back."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import zmq

from vllm_mp import wire
from vllm_mp.config import VllmConfig
from vllm_mp.core.images.image_store import ImageStore
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.core.ipc.call_handler import CallHandler, Operation, StepFailedError, shortened
from vllm_mp.core.ipc.clients import Clients
from vllm_mp.core.ipc.greeting import Greeting
from vllm_mp.core.ipc.new_request import new_request
from vllm_mp.core.ipc.peer_connection import PeerConnection
from vllm_mp.core.ipc.step_messages import by_client, step_outputs
from vllm_mp.core.ipc.suspects import Suspects
from vllm_mp.core.lora.adapter_cache import AdapterCache, AdapterChangedError, NotOperatorOfAdapterError
from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.scheduler.step import ModelOutput, StepUpdate
from vllm_mp.core.scheduler.waiting.memory_quota import NoRoomError
from vllm_mp.core.structured_output.compile_lanes import Waiter
from vllm_mp.core.structured_output.compiler import GrammarCompiler, TooManyConstraintsError
from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.requests.images import ImageDigest

if TYPE_CHECKING:
    from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors

logger = logging.getLogger(__name__)

_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
"""As numbers, because enums take longer to combine."""
_RECEIVE_S = 0.01
"""Seconds that messages may take between two steps, so that a flood of messages does not hold up the streams."""
_REPLAY_S = 0.1
"""Time that the first step waits for the rest of the requests that a client sends again."""
_REPLAY_LOOK_MS = 10
_MAX_PROGRESS = 2**31 - 1
_AddMessage = wire.AddRequest | wire.AddPooling


class _SlotInUse(Exception):
    """A client names a slot that is not free. No answer can be sent: the slot belongs to another request."""


class RequestHandler:
    """Turns messages into requests for the scheduler, and step updates into messages.

    No message may harm the core. A message that cannot be decoded, comes from a client that has not said hello or is
    meant for another incarnation is counted in `num_dropped`. A request that cannot run is answered with its error.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        config: VllmConfig,
        incarnation: int,
        operator_key: bytes = b"",
        predecessor: Predecessor | None = None,
        is_shared: bool = True,
    ) -> None:
        """Clients that say hello with `operator_key` are operators; if it is empty there are none.

        `predecessor`: the core that served before this one and died; each client is told its part of that.
        `is_shared`: the clients are not this core's owner, so that none may make it keep much output.
        """
        self._dropped = wire.DropCounter(logger, "a client")
        self._socket = socket
        self._config = config
        self._incarnation = incarnation
        self.greeting = Greeting(config, incarnation, operator_key, predecessor)
        self.is_shared = is_shared
        self.outside: OutsideWork = OutsideWork()
        """What is done outside of steps."""
        self.process_pending: Callable[[], None] = lambda: None
        """Processes all pending steps; raises StepFailedError."""
        self._suspects = Suspects(predecessor, is_shared)
        returning = [] if predecessor is None else predecessor.clients
        self._clients = Clients(socket, incarnation, is_shared, returning)
        self._operators: set[int] = set()
        """The clients that are operators."""
        self.processors: RegisteredProcessors | None = None
        """The operator's logits processors."""
        self._scheduler: Scheduler | None = None
        self._page: StatusPage | None = None
        self.adapters: AdapterCache | None = None
        """The LoRA adapters that requests may use; None: requests with an adapter are refused."""
        self.images: ImageStore | None = None
        """The images that clients have sent; None: the model takes none."""
        self.grammars: GrammarCompiler | None = None
        """Compiles the constraints of requests; None: requests with a constraint are refused."""
        self._replaying: set[int] = set()
        """The clients that are sending requests again that earlier cores had admitted."""
        self._may_wait_for_replays = True
        self._calls: CallHandler | None = None
        self._is_held_up = False
        """The latest call must be completed before later messages are read."""

    @property
    def num_dropped(self) -> int:
        """Messages that were dropped: invalid, or of another incarnation."""
        return self._dropped.num_dropped

    @property
    def num_clients(self) -> int:
        """Number of clients that have said hello and are not known to have left."""
        return len(self._clients)

    def serve(self, scheduler: Scheduler, operations: Mapping[str, Operation], page: StatusPage) -> None:
        """Begin to admit requests and to carry out `operations`, which clients may call, or operators only.

        An operation gets the client's arguments in the right number but of any type, and refuses them with ValueError
        or TypeError. It returns its result, plain data, or a future of it. The client is answered when the future is
        done; if it is not done yet, later messages are left for the next `receive`.
        """
        self._scheduler = scheduler
        self._calls = CallHandler(operations, self.outside, self._alone, self._send_to, self._incarnation)
        self._page = page

    def refuse(self, reason: str, wait_s: float = 0.0) -> None:
        """Tell every client that has said hello, or whose hello has arrived, why the core will not serve.

        Wait up to `wait_s` seconds for the first hello.
        """
        self._socket.poll(int(1000 * wait_s))
        while self._socket.poll(0):
            identity, *frames = self._socket.recv_multipart()
            with contextlib.suppress(*wire.DECODE_ERRORS):
                if isinstance(wire.decode_client_message(b"".join(frames)), wire.Hello):
                    self._clients.refuse(identity, None, reason)

    def receive(self, admit: bool = True) -> None:
        """Handle the messages that have arrived, without waiting; ignore new clients and requests unless `admit`.

        These wait for the next core: their clients send them to it when they see the end of this core.
        """
        deadline = time.monotonic() + _RECEIVE_S
        self._is_held_up = False
        while not self._is_held_up and self._has_message() and time.monotonic() < deadline:
            try:
                identity = self._socket.recv(_NOBLOCK)
            except zmq.Again:
                break
            client = self._clients.find(identity)
            if client is not None:
                frame, connection = self._socket.recv(), None
            else:
                first = self._socket.recv(copy=False)
                frame, connection = first.bytes, PeerConnection.of(first)
            if self._socket.getsockopt(zmq.RCVMORE):
                self._drop_for_parts(identity, client, connection)
                continue
            try:
                message = wire.decode_client_message(frame)
            except wire.DECODE_ERRORS as error:
                self._dropped.warn(str(error))
                continue
            if not admit and isinstance(message, wire.Hello | wire.AddRequest | wire.AddPooling):
                continue
            if client is None:
                self._handle_stranger(identity, connection, message)
            else:
                self._handle(client, message, len(frame))
        self._clients.close_due()
        for client in self._clients.find_gone():
            self._forget(client)
        for client, num_bytes in self._clients.take_slow():
            self._drop(client, f"it had not read {num_bytes} bytes of output; read faster, or ask for less at a time")

    def _has_message(self) -> bool:
        """Return whether a message has arrived; this costs less than the exception for a receive in vain."""
        return bool(self._socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def receive_replays(self) -> None:
        """Wait for the rest of the requests that clients are sending again, so that they continue in one step.

        Call this after `receive`, before the first step. Only once it takes time, and at most `_REPLAY_S`, so that no
        client can hold up the others.
        """
        if not (self._replaying and self._may_wait_for_replays):
            return
        self._may_wait_for_replays = False
        deadline = time.monotonic() + _REPLAY_S
        while self._replaying and time.monotonic() < deadline:
            self._socket.poll(_REPLAY_LOOK_MS)
            self.receive()

    def tell_pause(self, is_paused: bool) -> None:
        """Tell every client, also those that say hello from now on, whether there is a pause."""
        self.greeting.is_paused = is_paused
        for client in self._clients.numbers():
            self._send_to(client, wire.PauseChanged(self._incarnation, is_paused))

    def tell_model(self, model: wire.ModelDigest) -> None:
        """Tell every client, also those that say hello from now on, what the core has loaded."""
        self.greeting.model_digest = model
        for client in self._clients.numbers():
            self._send_to(client, wire.ModelChanged(self._incarnation, model))

    def drop_embeddings(self) -> None:
        """Forget all images and their embeddings, because the next weights may compute others.

        A live request that needs an image whose arrays are gone is removed; its client sends both again, and a suspect
        is then isolated as before.
        """
        if self.images is None:
            return
        self.images.clear()
        removed = self._running_scheduler().drop_embeddings()
        for request, _ in removed:
            if isolate_until := request.isolate_until_num_tokens:
                self._suspects.remember(self._clients.token_of(request.client), request.slot, isolate_until)
        for request, digests in removed:
            message = wire.MissingImages(self._incarnation, request.slot, digests, was_admitted=True)
            self._send_to(request.client, message)

    def send_ends(self, ends: list[tuple[int, wire.Finished]]) -> None:
        """Send (client, end) of requests that have ended outside of a step to their clients."""
        for client, own in by_client(ends).items():
            self._send_ends(client, own)

    def publish(self, number: int, update: StepUpdate, output: ModelOutput) -> None:
        """Send each client its part of what step `number` changed."""
        for client, message in self.step_outputs(number, update, output):
            self._send_to(client, message)

    def step_outputs(
        self, number: int, update: StepUpdate, output: ModelOutput
    ) -> Iterator[tuple[int, wire.StepOutput]]:
        """Yield (client, message) for step `number`."""
        return step_outputs(self._incarnation, number, update, output)

    def _handle_stranger(self, identity: bytes, connection: PeerConnection | None, message: wire.ClientMessage) -> None:
        """Greet a peer that says hello. Another peer takes itself for a client: its broken connection tells it."""
        if isinstance(message, wire.Hello):
            self._greet(identity, connection, message)
            return
        self._dropped.warn("a message from a client that has not said hello")
        if not isinstance(message, wire.Bye):
            self._clients.close(identity, connection, "this core does not know the client; say hello first")

    def _drop_for_parts(self, identity: bytes, client: int | None, connection: PeerConnection | None) -> None:
        """Drop a peer that has sent a message in several parts, which have no limit together."""
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(copy=False)
        self._dropped.warn("a message of several parts where 1 was expected")
        why = "it sent a message of several parts; send messages of 1 part"
        if client is None:
            self._clients.close(identity, connection, why)
        else:
            self._drop(client, why)

    def _handle(self, client: int, message: wire.ClientMessage, num_bytes: int) -> None:
        """Do what a message of `num_bytes` asks for.

        Raises no error but `zmq.ZMQError`, and those after which the core cannot continue; its successor then answers.
        """
        try:
            if isinstance(message, wire.Hello):
                self._welcome(client, message)
            elif message.incarnation != self._incarnation:
                self._dropped.warn(f"a message for incarnation {message.incarnation}, this is {self._incarnation}")
            elif isinstance(message, _AddMessage):
                if message.is_replay:
                    self._replaying.add(client)
                self._add_request(client, message, num_bytes)
            elif isinstance(message, wire.AbortRequests):
                self._abort(client, message.slots)
            elif isinstance(message, wire.Call):
                self._carry_out(client, message)
            elif isinstance(message, wire.PutImage):
                self._put_image(client, message)
            elif isinstance(message, wire.Convicted):
                self._note_convicted(client, message.deaths)
            elif isinstance(message, wire.ReplayEnd):
                self._replaying.discard(client)
            elif isinstance(message, wire.MarkSeen):
                if not self._clients.note_seen(client, message.mark):
                    self._dropped.warn("a mark that the client was not sent, or not in this order")
            else:
                self._forget(client)
        except (zmq.ZMQError, WorkerFailedError, StepFailedError):
            raise
        except _SlotInUse as error:
            self._dropped.warn(str(error))
        except Exception as error:
            # Whatever a message asks for, the other clients are served.
            self._answer_failure(client, message, error)

    def _answer_failure(self, client: int, message: wire.ClientMessage, error: Exception) -> None:
        """Tell the client why its request or call failed."""
        is_add = isinstance(message, _AddMessage)
        if is_add and isinstance(error, ValueError | NotImplementedError):
            why = str(error)
        else:
            why = repr(error)
            self._dropped.warn(f"it could not be handled: {why}", error)
        if isinstance(message, _AddMessage):
            self._turn_away(client, message, why, error)
        elif isinstance(message, wire.Call):
            self._running_calls().reply(client, message.call_id, error=why)

    def _greet(self, identity: bytes, connection: PeerConnection | None, hello: wire.Hello) -> None:
        """Make a peer that says hello a client, in place of its former self, or refuse it.

        No peer becomes a client over a connection that is being closed: the close would cut off what it sends at any
        point, for example between a pause and the call that ends it.
        """
        if reason := self.greeting.why_refused(hello):
            self._clients.refuse(identity, connection, reason)
            return
        if self._clients.is_closing(identity, connection):
            self._dropped.warn("a hello over a connection that is being closed")
            return
        # The connection of the former self may not have broken yet.
        if (former := self._clients.find_token(hello.token)) is not None:
            self._forget(former)
        try:
            is_operator = bool(hello.operator_key)
            client = self._clients.add(identity, hello.token, connection, is_operator, has_place=former is not None)
        except ValueError as error:
            self._clients.refuse(identity, connection, str(error))
            return
        if self._page is not None and hello.token:
            self._page.note_client(client, hello.token)
        self._welcome(client, hello)

    def _welcome(self, client: int, hello: wire.Hello) -> None:
        """Answer the hello of a client, which may have said hello before on this connection."""
        if reason := self.greeting.why_refused(hello):
            self._send_to(client, wire.Refused(reason))
            return
        if hello.operator_key:
            self._operators.add(client)
        why_dropped = self._clients.take_why_dropped(hello.token)
        self._send_to(client, self.greeting.welcome(client, hello.token, why_dropped))

    def _turn_away(self, client: int, message: _AddMessage, why: str, cause: Exception) -> None:
        """Answer a request that was never added to the scheduler."""
        num_output_tokens = len(message.output) // 4 if isinstance(message, wire.AddRequest) else 0
        end = wire.Finished(
            message.slot,
            num_output_tokens,
            "error",
            error=shortened(why),
            needs_operator=isinstance(cause, NotOperatorOfAdapterError),
            invalid_constraint=isinstance(cause, GrammarError) and not isinstance(cause, TooManyConstraintsError),
            too_many_constraints=isinstance(cause, TooManyConstraintsError),
            no_room=isinstance(cause, NoRoomError),
            interrupted=isinstance(cause, AdapterChangedError),
        )
        self._send_ends(client, [end])

    def _add_request(self, client: int, message: _AddMessage, num_bytes: int) -> None:
        """Validate a request and give it to the scheduler.

        Raises _SlotInUse, and ValueError or NotImplementedError for a request that cannot run.
        """
        scheduler = self._scheduler_for_new(client, message.slot)
        images = None
        if isinstance(message, wire.AddRequest) and message.images:
            images, missing = self._find_images(client, message)
            if missing:
                self._send_to(client, wire.MissingImages(self._incarnation, message.slot, missing))
                return
        token = self._clients.token_of(client)
        isolate_until = self._suspects.isolate_until(token, message.slot, message.isolate_until_num_tokens)
        may_come_again = False
        try:
            with self._alone() if isolate_until else contextlib.nullcontext(), self._handling(client, message):
                self._admit(client, message, num_bytes, scheduler, isolate_until, images)
        except NoRoomError:
            may_come_again = True
            raise
        finally:
            if not may_come_again:
                self._suspects.forget(token, message.slot)

    def _admit(
        self,
        client: int,
        message: _AddMessage,
        num_bytes: int,
        scheduler: Scheduler,
        isolate_until: int,
        images: RequestImages | None,
    ) -> None:
        adapter = self._find_adapter(client, message)
        try:
            order = scheduler.order_of(message.priority)
            token = self._clients.token_of(client)
            request = new_request(client, message, self._config, order, num_bytes, adapter, token, images)
            if self.processors is not None and request.pooling is None:
                self.processors.enter(request)
            request.owner = self._clients.owner_of(client)
            request.isolate_until_num_tokens = isolate_until
            if isolate_until:
                request.max_drafts = 0  # a draft model may be what has ended the cores
            if request.constrained is not None:
                self._begin_to_constrain(request, request.constrained)
            scheduler.add(request)
        except BaseException:
            if self.grammars is not None:
                self.grammars.forget((client, message.slot))
            if adapter is not None and self.adapters is not None:
                self.adapters.release(adapter)
            raise

    @contextlib.contextmanager
    def _handling(self, client: int, message: _AddMessage) -> Iterator[None]:
        """Publish on the status page that the message of a request is handled."""
        if self._page is None:
            yield
            return
        output = message.output if isinstance(message, wire.AddRequest) else b""
        embeds = message.prompt_embeds if isinstance(message, wire.AddRequest) else None
        left = len(message.prompt) // wire.TOKEN_IDS.itemsize if embeds is None else embeds.num_tokens
        progress = len(output) // wire.TOKEN_IDS.itemsize or -min(max(left, 0), _MAX_PROGRESS)
        self._page.begin_message(OutsideTask(client, message.slot, progress))
        try:
            yield
        finally:
            self._page.end_message()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let neither a step nor other work outside of steps be under way in this block."""
        self.process_pending()
        beat = (lambda: None) if self._page is None else self._page.beat
        with self.outside.exclusively(beat):
            yield

    def _find_adapter(self, client: int, message: _AddMessage) -> CachedAdapter | None:
        """Return the adapter that a new request names, if any. Raises ValueError if the request may not have it."""
        if message.lora is None:
            return None
        if self.adapters is None:
            raise ValueError("lora_request: LoRA is not enabled; start the engine with enable_lora=True")
        digest = message.adapter_digest if isinstance(message, wire.AddRequest) else ""
        return self.adapters.find(message.lora, client in self._operators, digest)

    def _put_image(self, client: int, message: wire.PutImage) -> None:
        """Keep an image. What is wrong with it is told to the requests that name it."""
        if self.images is None:
            self._dropped.warn("an image for a model that takes none")
        else:
            self.images.put(client, message.image)

    def _find_images(self, client: int, message: wire.AddRequest) -> tuple[RequestImages | None, list[ImageDigest]]:
        """Return the images of a request, or the digests of those that are not here. Raises ValueError."""
        if self.images is None:
            raise ValueError("the model takes no images; leave multi_modal_data out")
        images, missing = self.images.find(client, message.images)
        if missing:
            return None, missing
        num_tokens = len(message.prompt) // wire.TOKEN_IDS.itemsize
        return RequestImages(message.images, images, num_tokens), []

    def _begin_to_constrain(self, request: Request, constrained: ConstrainedOutput) -> None:
        """Give the output of a new request its grammar, or have its constraint compiled.

        Raises ValueError if the constraint was refused, or if too many others are being compiled.
        """
        if self.grammars is None:
            raise ValueError("structured_outputs are for models that generate text")
        group = request.isolation if request.isolate_until_num_tokens else None
        owner = request.owner, request.client, request.tenant
        waiter = Waiter(request.task, owner=owner, group=group, is_replay=request.is_replay)
        if (grammar := self.grammars.request(constrained.constraint, waiter)) is not None:
            constrained.begin(grammar)

    def _note_convicted(self, client: int, deaths: list[int]) -> None:
        """Tell the parent that a request of this client is to blame for `deaths`, if it was in their steps."""
        if self._page is not None:
            own = self._suspects.deaths_of(self._clients.token_of(client))
            self._page.note_convicted(own.intersection(deaths))

    def _carry_out(self, client: int, call: wire.Call) -> None:
        token = self._clients.token_of(client)
        is_suspect = call.is_suspect and self._suspects.may_be_alone(token, call.call_id)
        is_completed = self._running_calls().handle(client, call, client in self._operators, is_suspect)
        self._is_held_up = not is_completed

    def _abort(self, client: int, slots: list[int]) -> None:
        ends = [self._running_scheduler().abort(client, slot) for slot in slots]
        self._send_ends(client, [end for end in ends if end is not None])

    def _send_ends(self, client: int, ends: list[wire.Finished]) -> None:
        if ends:
            self._send_to(client, wire.StepOutput(self._incarnation, 0, b"", b"", b"", finished=ends))

    def _send_to(self, client: int, message: wire.CoreMessage) -> None:
        """Send `message`; forget the client if it is gone."""
        if not self._clients.send(client, message):
            logger.debug("client %d is gone", client)
            self._forget(client)

    def _drop(self, client: int, why: str) -> None:
        """Close the connection of a client that harms the core, and abort all its requests; it may come back."""
        logger.warning("client %d is dropped: %s", client, why)
        self._clients.drop(client, why)
        self._end_requests(client)

    def _forget(self, client: int) -> None:
        """Remove a client that is gone and abort all its requests."""
        self._clients.remove(client)
        self._end_requests(client)

    def _end_requests(self, client: int) -> None:
        """Abort all requests of a client that was removed."""
        if self._page is not None:
            self._page.forget_client(client)
        self._operators.discard(client)
        self._replaying.discard(client)
        if self.images is not None:
            self.images.drop_client(client)
        self._running_scheduler().drop_client(client)

    def _scheduler_for_new(self, client: int, slot: int) -> Scheduler:
        """Return the scheduler, for a request that gets `slot`; raises _SlotInUse if it is not free."""
        scheduler = self._running_scheduler()
        if not 0 <= slot < wire.MAX_LIVE_REQUESTS or scheduler.is_live(client, slot):
            raise _SlotInUse(f"slot {slot} of client {client} is not free")
        return scheduler

    def _running_calls(self) -> CallHandler:
        if self._calls is None:
            raise RuntimeError("the core does not serve yet")
        return self._calls

    def _running_scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("the core does not serve yet")
        return self._scheduler
