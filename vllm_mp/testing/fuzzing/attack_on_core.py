"""A campaign against a live core: hostile frames arrive while a well-behaved client streams."""

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from vllm_mp import AsyncLLM, wire
from vllm_mp.errors import EngineError
from vllm_mp.keys.operator_key import read_operator_key
from vllm_mp.testing.engines import answer, eventually, greedy
from vllm_mp.testing.fuzzing.attacked_core import AttackedCore
from vllm_mp.testing.fuzzing.client_frames import ClientFrames, raw_connections
from vllm_mp.testing.fuzzing.report import CampaignReport

MEMORY_MARGIN = 48 * 2**20
"""Growth of the attacked process's memory in bytes that does not count as a leak."""
_NUM_STREAMS = 4
"""Streams of the well-behaved client at any time."""
_NUM_CALM_PROMPTS = 12
_MARGIN = 1e-3
"""Log-probability by which each calm token is ahead of the next best, so that rounding changes none."""
_BURST = 400
_TRIAL_DESCRIPTORS = 2
"""The pipes to the process that tries constraints, which the core keeps from the first suspicious constraint on."""
_ANSWER_TIMEOUT_S = 60.0
_REPEAT_MS = 100
"""Time without any answer after which the last message is repeated."""
_RECONNECT_MS = 10
"""Time after which an attacker whose connection was closed connects again."""


class Attacker:
    """Sends hostile messages to one core from several sockets. Runs in a thread of its own."""

    def __init__(
        self, target: AttackedCore, seed: int, incarnation: int, vocab_size: int, report: CampaignReport
    ) -> None:
        self._target = target
        self._chance = random.Random(seed)
        self._context = zmq.Context()
        self._frames = iter(ClientFrames(seed, incarnation, vocab_size))
        self._raw = raw_connections(seed)
        self._incarnation = incarnation
        self._operator_key = read_operator_key(target.operator_key_file)
        self._report = report
        self._versions = itertools.count(2**32)
        """Versions of the protocol that no core has."""
        self._sockets = [self._dealer() for _ in range(4)]
        self._stranger = self._dealer()
        self._episodes = itertools.cycle(
            (
                self._raw_bytes,
                self._fresh_identities,
                self._pause_flood,
                self._sleep_flood,
                self._too_large,
                self._never_reads,
                self._flood,
            )
        )

    def run(self, num_messages: int) -> None:
        """Send `num_messages` more messages. After every fourth burst comes an episode of a special kind."""
        target, bursts = self._report.num_sent + num_messages, 0
        while self._report.num_sent < target:
            self._burst(min(_BURST, target - self._report.num_sent))
            bursts += 1
            if bursts % 4 == 0:
                next(self._episodes)()

    def close(self) -> None:
        for dealer in (*self._sockets, self._stranger):
            dealer.close(linger=0)
        self._context.term()

    def _dealer(self, identity: bytes | None = None) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            dealer.setsockopt(option, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if identity is not None:
            dealer.setsockopt(zmq.ROUTING_ID, identity)
        self._target.connect(dealer)
        return dealer

    def _burst(self, count: int) -> None:
        """Send frames of every kind on every socket. Return when the core has processed them."""
        for dealer in self._sockets:
            self._enter(dealer)
        for _ in range(count):
            kind, frames = next(self._frames)
            dealer = self._stranger if self._chance.random() < 0.1 else self._chance.choice(self._sockets)
            dealer.send_multipart(frames)
            self._report.sent[kind] += 1
        for dealer in self._sockets:
            if self._chance.random() < 0.5:
                self._send("bye", dealer, wire.Bye(self._incarnation))
            else:
                self._send("abort", dealer, wire.AbortRequests(self._incarnation, list(range(64))))
            self._await_core(dealer)
        while self._stranger.poll(0):
            self._count(self._stranger.recv_multipart())

    def _send(self, kind: str, dealer: "zmq.Socket[bytes]", message: wire.ClientMessage) -> None:
        dealer.send(wire.encode(message))
        self._report.sent[kind] += 1

    def _enter(self, dealer: "zmq.Socket[bytes]", operator_key: bytes = b"") -> None:
        """Say hello until `dealer` is a client: the core ignores a hello over a connection that it is closing."""
        self._repeat("hello", dealer, wire.hello(operator_key), lambda answer: isinstance(answer, wire.Welcome))

    def _await_core(self, dealer: "zmq.Socket[bytes]") -> None:
        """Return when the core has processed everything sent on `dealer`: a refused hello is answered last."""
        version = next(self._versions)
        self._repeat(
            "other version",
            dealer,
            wire.Hello(version),
            lambda answer: isinstance(answer, wire.Refused) and str(version) in answer.reason,
        )

    def _repeat(
        self,
        kind: str,
        dealer: "zmq.Socket[bytes]",
        message: wire.ClientMessage,
        is_awaited: Callable[[wire.CoreMessage], bool],
    ) -> None:
        """Send `message` until the awaited answer comes, because it is lost if the core closes the connection first.

        It counts as one message, so that the load of the machine does not shorten a campaign.
        """
        self._report.sent[kind] += 1
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            dealer.send(wire.encode(message))
            while dealer.poll(_REPEAT_MS):
                if is_awaited(self._count(dealer.recv_multipart())):
                    return
        raise TimeoutError(f"the core has not answered for {_ANSWER_TIMEOUT_S:g} s")

    def _count(self, frames: list[bytes]) -> wire.CoreMessage:
        """Count an answer and return it."""
        message = wire.decode_core_message(frames[0])
        answers = self._report.answers
        if isinstance(message, wire.StepOutput):
            answers["tokens"] += len(message.tokens) // 4
            answers.update(f"ended: {end.reason}" for end in message.finished)
        elif isinstance(message, wire.Reply):
            answers["call refused" if message.error else "call answered"] += 1
        else:
            answers[type(message).__name__.lower()] += 1
        return message

    def _raw_bytes(self) -> None:
        """Open connections that do not speak the transport protocol, or stop in the middle of it."""
        connections = []
        for data in itertools.islice(self._raw, 60):
            connection = self._target.raw_connection()
            with contextlib.suppress(OSError):
                connection.sendall(data)
            connections.append(connection)
            self._report.sent["raw connection"] += 1
        for connection in connections:
            connection.close()

    def _fresh_identities(self) -> None:
        """Let clients connect, send a request, and leave with or without a goodbye, again and again."""
        own = (None, b"x", b"\xff" * 255, b"same", b"same", b"\x00")
        dealers = []
        for i in range(120):
            dealer = self._dealer(own[i] if i < len(own) else self._chance.randbytes(self._chance.randint(1, 255)))
            self._send("fresh identity", dealer, wire.hello())
            if i % 2:
                params = self._one_token()
                self._send("fresh identity", dealer, wire.AddRequest(self._incarnation, i, "id", b"\1\0\0\0", params))
            if i % 3 == 0:
                self._send("fresh identity", dealer, wire.Bye(self._incarnation))
            dealers.append(dealer)
        for dealer in dealers:
            dealer.close(linger=100)

    def _pause_flood(self) -> None:
        """Send, as an operator, pauses that are undone at once, and pauses with invalid arguments."""
        bad: tuple[list[Any], ...] = ([], ["x", True], [None, None], ["keep", 1], ["keep"] * 9, [2**64 - 1, 0.5])
        self._undone_calls(
            "pause",
            [[("pause", ["keep", False]), ("pause", bad[i % len(bad)]), ("resume", [])] for i in range(100)],
        )

    def _sleep_flood(self) -> None:
        """Send, as an operator, sleeps of either level that end at once, and calls with invalid arguments.

        Wake up in either order.
        """
        bad: tuple[list[Any], ...] = ([], [0], [True], [1.0, "keep"], [1, "wait"], ["weights"], [2**64 - 1], [1] * 9)
        self._undone_calls(
            "sleep",
            [
                [
                    ("sleep", [1 + i % 2, "keep"]),
                    ("sleep", bad[i % len(bad)]),
                    ("wake_up", bad[1 + i % (len(bad) - 1)]),
                    *(("wake_up", [tag]) for tag in wire.SLEEP_TAGS[:: (1, -1)[i % 3 > 0]]),
                ]
                for i in range(40)
            ],
        )

    def _undone_calls(self, kind: str, rounds: list[list[tuple[str, list[Any]]]]) -> None:
        """Send, as an operator, rounds of calls, the last of which undo the others: the core must generate after each.

        First all rounds follow a message for which the core closes the connection, so that the close may cut them off
        anywhere. Then they are sent over a fresh connection, which the core has no reason to close.
        """
        doomed = self._sockets[0]
        doomed.send_multipart([b"", b""])
        self._report.sent["several frames"] += 1
        self._send("hello", doomed, wire.hello(operator_key=self._operator_key))
        for name, args in itertools.chain.from_iterable(rounds):
            self._send(kind, doomed, self._call(name, args))
        self._await_core(doomed)
        with self._dealer() as operator:
            self._enter(operator, self._operator_key)
            checks: dict[int, str] = {}
            for calls, after in [([], "calls that were cut off"), *((calls, str(calls)) for calls in rounds)]:
                for name, args in calls:
                    self._send(kind, operator, self._call(name, args))
                check = self._call("status", [])
                self._send("status", operator, check)
                checks[check.call_id] = after
            self._require_generation(operator, checks)

    def _require_generation(self, operator: "zmq.Socket[bytes]", checks: dict[int, str]) -> None:
        """Wait for the answers to `checks`: calls of `status` by id, with what preceded each.

        A core that was paused or asleep is a breach. It is made to generate again, so that calm streams go on.
        """
        has_stopped = False
        while checks:
            if not operator.poll(int(_ANSWER_TIMEOUT_S * 1000)):
                raise TimeoutError(f"the core has not answered an operator for {_ANSWER_TIMEOUT_S:g} s")
            answer = self._count(operator.recv_multipart())
            if not isinstance(answer, wire.Reply) or (after := checks.pop(answer.call_id, None)) is None:
                continue
            if answer.result["is_paused"] or answer.result["is_sleeping"]:
                has_stopped = True
                self._report.breaches.append(f"the core does not generate after {after}: {answer.result}")
        if has_stopped:
            for name in ("resume", "wake_up"):
                self._send(name, operator, self._call(name, []))
            self._await_core(operator)

    def _call(self, name: str, args: list[Any]) -> wire.Call:
        """Return a call that the core has not carried out under the same id."""
        return wire.Call(self._incarnation, self._chance.getrandbits(62), name, args)

    def _too_large(self) -> None:
        """Send a message above the size limit, and messages below it that decode into as much memory as possible."""
        dealer, call = self._sockets[1], b"\x95\x04\x00\x00\xa4ping"
        empty_lists = b"\xdd" + (2**20).to_bytes(4, "big") + b"\x90" * 2**20
        head = b"\x96\x02\xcf" + self._incarnation.to_bytes(8, "big") + b"\x00\xa2id\xc4\x04\x01\x00\x00\x00"
        for frame in (
            call + empty_lists,
            head + b"\x81\xb2structured_outputs" + empty_lists,
            head + b"\x81\xaaextra_args\x81\xa1x" + empty_lists,
            head + b"\x81\xa4stop" + empty_lists,
            wire.encode(wire.AbortRequests(self._incarnation, [1] * 2**21)),
            wire.encode(wire.Call(self._incarnation, 1, "pause", ["x" * 2**22, True])),
            wire.encode(wire.AddRequest(self._incarnation, 0, "i" * 2**22, b"", self._one_token())),
            wire.encode(wire.AddRequest(self._incarnation, 0, "i", bytes(2**22), self._one_token())),
        ):
            dealer.send(frame)
            self._report.sent["megabytes"] += 1
        self._await_core(dealer)
        huge = self._dealer()
        huge.send(bytes(wire.MAX_MESSAGE_BYTES + 1))
        self._report.sent["above the limit"] += 1
        huge.close(linger=1000)

    def _never_reads(self) -> None:
        """Be a client that sends calls and never reads an answer."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.RCVHWM, 1)
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.setsockopt(zmq.LINGER, 2000)
            self._target.connect(dealer)
            self._send("never reads", dealer, wire.hello())
            for i in range(2000):
                self._send("never reads", dealer, wire.Call(self._incarnation, i, "status"))

    def _flood(self) -> None:
        """Send many requests at once, all of them isolated or none, and abort all of them."""
        dealer = self._sockets[2]
        self._enter(dealer)
        isolate_until = self._chance.choice((0, 1, 2**40))
        for slot in range(1000, 3000):
            message = wire.AddRequest(self._incarnation, slot, "id", b"\1\0\0\0", self._one_token())
            message.isolate_until_num_tokens, message.isolation_group = isolate_until, slot % 7
            self._send("flood", dealer, message)
        self._send("flood", dealer, wire.AbortRequests(self._incarnation, list(range(3000)) * 2))
        self._await_core(dealer)

    @staticmethod
    def _one_token() -> Any:
        return greedy(1, seed=1)


async def holdings(engine: AsyncLLM) -> dict[str, int]:
    """Return the resources that the core of `engine` holds."""
    status = await engine.core_status()
    process = psutil.Process(status["pid"])
    return {
        "bytes of memory": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "blocks": status["total_blocks"],
        "free blocks": status["free_blocks"],
        "clients": status["num_clients"],
        "live requests": status["num_running"] + status["num_waiting"],
        "messages dropped": status["num_dropped_messages"],
    }


async def calm_outputs(
    engine: AsyncLLM, vocab_size: int, count: int = _NUM_CALM_PROMPTS
) -> dict[tuple[int, ...], list[int]]:
    """Return random prompts and their undisturbed greedy tokens, each well ahead of the next best."""
    chance = random.Random(0)
    found: dict[tuple[int, ...], list[int]] = {}
    while len(found) < count:
        prompt = [chance.randrange(vocab_size) for _ in range(chance.randint(1, 24))]
        output = await answer(engine, {"prompt_token_ids": prompt}, greedy(40, logprobs=2, ignore_eos=True))
        [completion] = output.outputs
        assert completion.logprobs is not None
        values = [sorted((value.logprob for value in entry.values()), reverse=True) for entry in completion.logprobs]
        if all(best - second > _MARGIN for best, second in values):
            found[tuple(prompt)] = completion.token_ids
    return found


async def attack_core(
    target: AttackedCore, num_messages: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> CampaignReport:
    """Send `num_messages` hostile messages to `target`. Call `say` with lines about the progress."""
    report = CampaignReport()
    engine = AsyncLLM.connect(target.address, key_file=target.key_file)
    incarnation, vocab_size = (await engine.core_status())["incarnation"], engine.model_config.get_vocab_size()
    expected = await calm_outputs(engine, vocab_size)
    attacker = Attacker(target, seed, incarnation, vocab_size, report)
    is_over = threading.Event()

    async def stream(first: int) -> None:
        for prompt, token_ids in itertools.islice(itertools.cycle(expected.items()), first, None):
            if is_over.is_set():
                return
            try:
                output = await asyncio.wait_for(
                    answer(engine, {"prompt_token_ids": list(prompt)}, greedy(40, ignore_eos=True)), _ANSWER_TIMEOUT_S
                )
            except (EngineError, TimeoutError, ValueError) as error:
                report.breaches.append(f"a calm stream failed: {error!r}; {await _state(engine)}")
                await asyncio.sleep(0.1)
                continue
            report.calm_answers += 1
            if output.outputs[0].token_ids != token_ids:
                report.breaches.append(f"a calm completion changed: {output.outputs[0]}; expected {token_ids}")

    async def attack(count: int) -> bool:
        try:
            await asyncio.to_thread(attacker.run, count)
        except TimeoutError as error:
            report.breaches.append(str(error))
            return False
        return True

    calm = [asyncio.create_task(stream(i)) for i in range(_NUM_STREAMS)]
    # The first messages fill caches and the allocator, which is not a leak.
    warm = await attack(num_messages // 10)
    report.before = await holdings(engine) if warm else {}
    began, sent = time.monotonic(), report.num_sent
    while warm and report.num_sent < num_messages:
        if not await attack(min(100_000, num_messages - report.num_sent)):
            break
        say(f"{report.num_sent:,} sent, {report.calm_answers:,} calm completions, {len(report.breaches)} breaches")
    report.seconds = (time.monotonic() - began) * report.num_sent / max(1, report.num_sent - sent)
    is_over.set()
    await asyncio.gather(*calm)
    attacker.close()
    await _check_resources(engine, target, report)
    engine.shutdown()
    return report


async def _state(engine: AsyncLLM) -> str:
    """Return what the core says of itself, or why it does not."""
    try:
        return str(await engine.core_status())
    except EngineError as error:
        return repr(error)


async def _check_resources(engine: AsyncLLM, target: AttackedCore, report: CampaignReport) -> None:
    """Compare the resources of the core with those before the campaign, once all other clients have left."""
    before = report.before

    async def is_released() -> bool:
        # A hello makes the core check which clients are still connected.
        AsyncLLM.connect(target.address, key_file=target.key_file).shutdown()
        report.after = now = await holdings(engine)
        return (
            now["live requests"] == 0
            and now["free blocks"] == now["blocks"]
            and now["clients"] <= 2
            and now["descriptors"] <= before.get("descriptors", 0) + _TRIAL_DESCRIPTORS
        )

    try:
        await eventually(is_released, _ANSWER_TIMEOUT_S)
    except (AssertionError, EngineError) as error:
        report.breaches.append(f"the core has not released its resources: {before} became {report.after}: {error!r}")
    if report.after.get("bytes of memory", 0) > before.get("bytes of memory", 0) + MEMORY_MARGIN:
        report.breaches.append("the core grew")
