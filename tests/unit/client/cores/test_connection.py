"""A client's connection, and peers that do not behave as a core."""

import asyncio
import contextlib
import itertools
import logging
import socket
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import zmq

from vllm_mp import EngineStartError, wire
from vllm_mp.client.cores import connection as connection_module
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.stats import EngineStats
from vllm_mp.core.suspension_record import SuspensionRecord
from vllm_mp.core_link.core_status import NOT_SUSPENDED
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.keys.curve_keys import make_client_key, make_server_key


@contextlib.contextmanager
def peers(tmp_path):
    """Yield a client's connection and the socket of its peer, which stands in for a core."""
    address = f"ipc://{tmp_path}/core.sock"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.SNDHWM, 0)  # as in a core: a ROUTER drops messages that its queue has no room for
    router.bind(address)
    connection = CoreConnection(address)
    try:
        yield connection, router
    finally:
        connection.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (wire.encode(wire.Welcome(99, 1, 0, 1, b"{}")), "version 99"),
        (wire.encode(wire.Welcome(wire.PROTOCOL_VERSION, 1, 0, 1, b"{}", "0" * 16, "9.9")), "core is vllm-mp 9.9"),
        (wire.encode(wire.Welcome(wire.PROTOCOL_VERSION, 1, 0, 1, b"{}")), "schema unknown"),
        (wire.encode(wire.welcome(1, 0, 1, b"{")), "cannot be read"),
        (wire.encode(wire.welcome(1, 0, 1, b'{"model_config": 3}')), "cannot be read"),
        (wire.encode(wire.Refused("no room")), "no room"),
        (b"\xff\x00 HTTP/1.1", "is not a core"),
    ],
)
def test_answer_that_is_no_welcome_is_reported_with_its_cause(tmp_path, answer, words):
    with peers(tmp_path) as (connection, router):

        def respond():
            if router.poll(0):
                identity, _ = router.recv_multipart()
                router.send_multipart((identity, answer))

        with pytest.raises(EngineStartError, match=words):
            connection.greet(30, respond)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 503 No\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", bytes(100)])
def test_tcp_peer_with_another_protocol_is_reported_at_once(tmp_path, answer):
    client = tmp_path / "client.key"
    make_client_key(client, make_server_key(tmp_path / "server.key").public)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def respond():
            peer, _ = listener.accept()
            with peer, contextlib.suppress(ConnectionResetError):
                peer.sendall(answer)
                while peer.recv(4096):
                    pass

        responded = pool.submit(respond)
        connection = CoreConnection(f"tcp://127.0.0.1:{listener.getsockname()[1]}", str(client))
        with contextlib.closing(connection):
            with pytest.raises(EngineStartError, match=r"the peer at tcp://.* is not a core"):
                connection.greet(float("inf"), lambda: None)
            with pytest.raises(EngineStartError, match=r"the peer at tcp://.* is not a core"):
                connection.ask(30, "question")
        responded.result()


def test_marks_are_returned_and_pauses_noted_while_the_core_is_asked(tmp_path):
    def answer(router):
        identity, frame = router.recv_multipart()
        call = wire.decode_client_message(frame)
        for message in (wire.PauseChanged(0, True), wire.Mark(0, 7), wire.Reply(0, call.call_id, "yes")):
            router.send_multipart((identity, wire.encode(message)))
        return wire.decode_client_message(router.recv_multipart()[1])

    with peers(tmp_path) as (connection, router), ThreadPoolExecutor(1) as pool:
        router.setsockopt(zmq.RCVTIMEO, 30_000)
        last = pool.submit(answer, router)
        assert connection.ask(30, "question") == "yes"
        assert connection.was_paused
        connection.send(wire.Bye(0))
        assert last.result() == wire.MarkSeen(0, 7)


def test_core_carries_out_each_of_several_calls_that_it_is_asked_for(tmp_path):
    record, carried_out = SuspensionRecord(StatusPage.create(None, 1), NOT_SUSPENDED, lambda is_paused: None), []

    def answer(router):
        for _ in range(2):
            identity, frame = router.recv_multipart()
            call = wire.decode_client_message(frame)
            record.carry_out(call.call_id, carried_out.append, call.name)
            router.send_multipart((identity, wire.encode(wire.Reply(0, call.call_id))))

    with peers(tmp_path) as (connection, router), ThreadPoolExecutor(1) as pool:
        router.setsockopt(zmq.RCVTIMEO, 30_000)
        answers = pool.submit(answer, router)
        for name in ("sleep", "pause"):
            connection.ask(30, name)
        answers.result()
    assert carried_out == ["sleep", "pause"]


def test_flood_of_invalid_messages_is_counted_and_does_not_flood_the_log(tmp_path, caplog):
    with peers(tmp_path) as (connection, router):
        heard = []

        async def run():
            connection.attach(heard.append, connection.monitor.getsockopt(zmq.FD), lambda: None)
            connection.send(wire.Bye(0))
            router.poll(30_000)
            identity, _ = router.recv_multipart()
            for _ in range(1000):
                router.send_multipart((identity, b"\xc1"))
            router.send_multipart((identity, wire.encode(wire.Reply(0, 5))))
            deadline = asyncio.get_running_loop().time() + 30
            while not heard:
                assert asyncio.get_running_loop().time() < deadline
                await asyncio.sleep(0.01)
            connection.detach()

        with caplog.at_level(logging.WARNING):
            asyncio.run(run())
        assert [reply.call_id for reply in heard] == [5]
        assert connection.num_dropped == 1000
        assert 0 < len(caplog.records) < 12


def test_messages_of_other_incarnations_of_the_core_are_dropped(tmp_path):
    with peers(tmp_path) as (connection, router):
        connection.incarnation = 2
        heard = []

        async def run():
            is_last = asyncio.Event()

            def on_message(reply):
                heard.append(reply.call_id)
                if reply.call_id == 9:
                    is_last.set()

            connection.attach(on_message, connection.monitor.getsockopt(zmq.FD), lambda: None)
            connection.send(wire.Bye(2))
            assert router.poll(30_000)
            identity, _ = router.recv_multipart()
            for incarnation, call_id in ((1, 7), (3, 8), (2, 9)):
                router.send_multipart((identity, wire.encode(wire.Reply(incarnation, call_id))))
            async with asyncio.timeout(30):
                await is_last.wait()
            connection.detach()

        asyncio.run(run())
        assert heard == [9]
        assert connection.num_dropped == 2


def send_replies(connection, router, count):
    """Let the peer send replies to the client, and wait until all of them have arrived."""
    connection.send(wire.Bye(0))
    assert router.poll(30_000)
    identity, _ = router.recv_multipart()
    for call_id in range(count):
        router.send_multipart((identity, wire.encode(wire.Reply(0, call_id))))
    connection._socket.poll(30_000)


def test_other_callbacks_run_between_messages_that_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_RECEIVE_S", 0)
    with peers(tmp_path) as (connection, router):
        heard, seen = [], [0]

        async def run():
            loop = asyncio.get_running_loop()
            connection.attach(heard.append, connection.monitor.getsockopt(zmq.FD), lambda: None)
            send_replies(connection, router, 50)
            for _ in range(5):
                connection.send(wire.Bye(0))  # must not have further messages received in each turn
            deadline = loop.time() + 30
            while len(heard) < 50:
                assert loop.time() < deadline
                await asyncio.sleep(0)
                seen.append(len(heard))
            connection.detach()

        asyncio.run(run())
        assert [reply.call_id for reply in heard] == list(range(50))
        assert max(after - before for before, after in itertools.pairwise(seen)) == 1


def test_messages_that_wait_are_drained_in_turns_until_none_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(connection_module, "_RECEIVE_S", 0)
    with peers(tmp_path) as (connection, _):
        heard, frames = [], deque(wire.encode(wire.Reply(0, call_id)) for call_id in range(50))

        def getsockopt(name):
            assert name == zmq.EVENTS
            return zmq.POLLIN if frames else 0

        async def run():
            assert connection.drain(), "no loop, nothing to deliver to"
            connection.attach(heard.append, connection.monitor.getsockopt(zmq.FD), lambda: None)
            with monkeypatch.context() as patch:
                waiting = SimpleNamespace(closed=False, getsockopt=getsockopt, recv=lambda flags: frames.popleft())
                patch.setattr(connection, "_socket", waiting)
                for count in range(1, 51):
                    assert not connection.drain()
                    assert len(heard) == count
                assert connection.drain()
            connection.detach()

        asyncio.run(run())
        assert [reply.call_id for reply in heard] == list(range(50))


class DyingCore:
    """A supervisor whose core has died while messages of it wait, and that core's connection."""

    incarnation = num_dropped = 0
    was_paused = False
    news_fd = -1
    end = None

    def __init__(self, num_turns):
        self.num_left = num_turns
        """Number of turns that the messages which wait take."""
        self.core = SimpleNamespace(connection=self)
        self.loop = None
        self.news = [Death("the core died", {}, 0, True)]

    def is_attached(self):
        return self.loop is asyncio.get_running_loop()

    def attach(self, on_message, news_fd, on_news):
        self.loop = asyncio.get_running_loop()

    def drain(self):
        self.num_left -= 1
        return self.num_left < 0

    @property
    def has_news(self):
        return bool(self.news)

    def take_news(self):
        news, self.news = self.news, []
        return news

    def watch(self, has_work, pings):
        pass


def test_death_is_handled_after_all_messages_that_arrived_before_it_and_other_callbacks_run_meanwhile():
    core = DyingCore(20)
    stats = EngineStats(64, False)
    client = CoreGroup([core], LiveRequests(), stats).first

    async def run():
        seen = []
        client.attach()
        while client.recovers_from is None:
            client.attach()  # a request that arrives meanwhile must not have more messages received in a turn
            seen.append(core.num_left)
            await asyncio.sleep(0)
        return seen

    seen = asyncio.run(run())
    assert len(seen) >= 10
    assert core.num_left == -1
    assert client.recovers_from == "the core died"


def test_death_is_handled_by_another_event_loop_if_the_first_was_closed_meanwhile():
    core = DyingCore(1000)
    client = CoreGroup([core], LiveRequests(), EngineStats(64, False)).first

    async def attach():
        client.attach()

    async def run():
        client.attach()
        while core.num_left >= 0:  # noqa: ASYNC110, it counts turns
            await asyncio.sleep(0)

    asyncio.run(attach())
    assert client.recovers_from is None
    asyncio.run(run())
    assert client.recovers_from == "the core died"
