"""Bounds on what one client can cost the core and its other clients."""

import time
from concurrent.futures import Future

import pytest
import zmq
from support.stand_in_engine import Engine

from vllm_mp import AsyncEngineArgs, __version__, wire
from vllm_mp.core.ipc import clients
from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.request_handler import OperatorCall, RequestHandler
from vllm_mp.core.scheduler import memory_quota
from vllm_mp.sampling_params import SamplingParams

HELLO = wire.encode(wire.hello())
KEY = b"k" * 32


class Core:
    """A request handler at a real socket, with a scheduler that runs no step."""

    def __init__(self, address, config):
        self.address = address
        self.bound = BoundSocket(address)
        self.request_handler = RequestHandler(self.bound.socket, config, 1, KEY)
        self.engine = Engine()
        self.request_handler.serve(
            self.engine.scheduler,
            {
                "echo": lambda value: value,
                "fail": lambda: 1 // 0,
                "refuse": _refuse,
                "pause": OperatorCall(lambda mode: f"paused with {mode}"),
            },
        )
        self.context = zmq.Context()
        self.dealers = []

    def connect(self, greet=True, limit=0):
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.SNDHWM, limit)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.address)
        self.dealers.append(dealer)
        if greet:
            dealer.send(HELLO)
            assert isinstance(self.answer(dealer), wire.Welcome)
        return dealer

    def answer(self, dealer):
        """Return the next message to `dealer` that is no probe."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.request_handler.receive()
            while dealer.poll(1):
                message = wire.decode_core_message(dealer.recv())
                if not isinstance(message, wire.StepOutput) or message.finished:
                    return message
        raise AssertionError("no answer")

    def ask(self, dealer, message):
        dealer.send(wire.encode(message))
        return self.answer(dealer)

    def close(self):
        for dealer in self.dealers:
            dealer.close()
        self.context.term()
        self.bound.close()


@pytest.fixture(scope="module")
def config(default_model):
    return AsyncEngineArgs(model=str(default_model), max_model_len=64).create_engine_config()


@pytest.fixture
def core(config, tmp_path):
    core = Core(f"ipc://{tmp_path}/core.sock", config)
    yield core
    core.close()


def request(slot, num_tokens=1):
    return wire.AddRequest(1, slot, f"id {slot}", wire.pack_ids([5] * num_tokens), SamplingParams(seed=1))


@pytest.mark.parametrize("hello", [wire.Hello(1), wire.Hello(wire.PROTOCOL_VERSION, "0" * 16, "9.9")], ids=str)
def test_client_of_another_version_or_schema_is_refused(core, hello):
    client = core.connect()
    refused = core.ask(client, hello)
    assert isinstance(refused, wire.Refused)
    assert f"core is vllm-mp {__version__} (protocol version {wire.PROTOCOL_VERSION}, schema {wire.SCHEMA})" in (
        refused.reason
    )
    assert (hello.package or "another vllm-mp") in refused.reason
    assert "install the same vllm-mp for both" in refused.reason
    assert isinstance(core.ask(client, wire.hello()), wire.Welcome)


def test_flood_of_hellos_sends_few_probes_to_other_clients(core):
    quiet, loud = core.connect(), core.connect()
    for _ in range(1000):
        loud.send(HELLO)
    for _ in range(1000):
        core.answer(loud)
    num_probes = 0
    while quiet.poll(50):
        quiet.recv()
        num_probes += 1
    assert num_probes <= 10


def test_client_that_left_without_bye_is_forgotten_after_the_next_hello(core):
    leaving = core.connect()
    leaving.send(wire.encode(request(3)))
    while not core.engine.scheduler.num_waiting:
        core.request_handler.receive()
    leaving.close()
    core.connect()
    deadline = time.monotonic() + 10
    while core.request_handler.num_clients != 1:
        assert time.monotonic() < deadline
        core.request_handler.receive()
        time.sleep(0.01)
    assert not core.engine.scheduler.num_waiting


def test_number_of_clients_is_limited_and_a_client_that_leaves_makes_room(core, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_CLIENTS", 3)
    first, *_ = [core.connect() for _ in range(3)]
    late = core.connect(greet=False)
    late.send(HELLO)
    refusal = core.answer(late)
    assert isinstance(refusal, wire.Refused)
    assert "the limit is 3" in refusal.reason
    assert isinstance(core.ask(first, wire.hello()), wire.Welcome)
    first.send(wire.encode(wire.Bye(1)))
    while core.request_handler.num_clients == 3:
        core.request_handler.receive()
    assert isinstance(core.ask(late, wire.hello()), wire.Welcome)


def test_request_beyond_the_memory_quota_is_refused_and_other_clients_have_room(core, monkeypatch):
    monkeypatch.setattr(memory_quota, "MAX_BYTES", 20_000)
    greedy, modest = core.connect(), core.connect()
    for slot in range(20):
        greedy.send(wire.encode(request(slot)))
    end = core.answer(greedy).finished[0]
    assert end.reason == "error"
    assert "20000" in end.error
    assert "no room" in end.error
    assert 5 < end.slot < 10
    live = core.engine.scheduler.num_waiting
    modest.send(wire.encode(request(0)))
    while core.engine.scheduler.num_waiting == live:
        core.request_handler.receive()
    ends = core.ask(greedy, wire.AbortRequests(1, list(range(20)))).finished
    while not all(end.reason == "abort" for end in ends):  # first come the refusals of the others
        ends = core.answer(greedy).finished
    greedy.send(wire.encode(request(0)))
    while core.engine.scheduler.num_waiting != 2:
        core.request_handler.receive()


def test_flood_of_messages_does_not_delay_the_next_step(core):
    flooding, calls = core.connect(), []

    def work():
        calls.append(1)
        busy_until = time.monotonic() + 0.01
        while time.monotonic() < busy_until:
            pass

    core.request_handler.serve(core.engine.scheduler, {"work": work})
    for call_id in range(30):
        flooding.send(wire.encode(wire.Call(1, call_id, "work")))
    while core.bound.socket.poll(100):
        before = len(calls)
        core.request_handler.receive()
        assert len(calls) - before <= 2
    assert len(calls) == 30


def test_message_of_a_client_is_handled_before_the_rest_of_another_clients_flood(core):
    flooding, quiet, handled = core.connect(), core.connect(), []

    def note(number):
        handled.append(number)
        if number == 10:
            quiet.send(wire.encode(wire.Call(1, 1, "note", [-1])))
            time.sleep(0.05)  # until ZeroMQ has delivered it

    core.request_handler.serve(core.engine.scheduler, {"note": note})
    for number in range(500):
        flooding.send(wire.encode(wire.Call(1, number, "note", [number])))
    while len(handled) <= 500:
        core.request_handler.receive()
    assert handled.index(-1) < 100


def test_messages_behind_an_unfinished_call_are_left_for_the_next_receive(core):
    calls = []

    def begin(waits):
        calls.append(Future())
        if not waits:
            calls[-1].set_result("done")
        return calls[-1]

    core.request_handler.serve(core.engine.scheduler, {"begin": begin})
    client = core.connect()
    for call_id, waits in enumerate((False, False, True, False)):
        client.send(wire.encode(wire.Call(1, call_id, "begin", [waits])))
    while len(calls) < 3:
        core.request_handler.receive()
    assert [call.done() for call in calls] == [True, True, False]
    while len(calls) < 4:
        core.request_handler.receive()
    calls[2].set_result("at last")
    answers = [core.answer(client) for _ in range(4)]
    assert [(reply.call_id, reply.result) for reply in answers] == [
        (0, "done"),
        (1, "done"),
        (3, "done"),
        (2, "at last"),
    ]


def test_unread_messages_wait_with_their_sender(core):
    num_sent, frame = 0, wire.encode(wire.Call(1, 1, "echo", ["x" * 2**20]))
    dealer = core.connect(greet=False, limit=1)
    while num_sent < 1000 and dealer.poll(500, zmq.POLLOUT):
        dealer.send(frame)
        num_sent += 1
    assert 0 < num_sent < 200


def test_failing_call_is_answered_every_time_and_logged_sometimes(core, caplog):
    client = core.connect()
    for call_id in range(64):
        assert "ZeroDivisionError" in core.ask(client, wire.Call(1, call_id, "fail")).error
    assert 1 <= len(caplog.records) <= 7


def test_error_does_not_repeat_a_large_value(core):
    client = core.connect()
    assert len(core.ask(client, wire.Call(1, 1, "refuse", ["z" * 2**20])).error) < 3000
    assert len(core.ask(client, wire.Call(1, 1, "z" * 2**20)).error) < 3000


def _refuse(value):
    raise ValueError(f"got {value}")


def test_call_for_operators_is_refused_by_name_to_other_clients(core):
    user, operator = core.connect(), core.connect(greet=False)
    reply = core.ask(user, wire.Call(1, 1, "pause", ["keep"]))
    assert reply.needs_operator
    assert "pause is for operators" in reply.error
    assert "operator_key_file" in reply.error
    assert isinstance(core.ask(operator, wire.hello(operator_key=KEY)), wire.Welcome)
    reply = core.ask(operator, wire.Call(1, 2, "pause", ["keep"]))
    assert (reply.result, reply.error, reply.needs_operator) == ("paused with keep", None, False)
    assert core.ask(user, wire.Call(1, 3, "pause", ["keep"])).needs_operator
    assert core.ask(user, wire.Call(1, 4, "echo", [5])).result == 5


def test_hello_with_another_operator_key_is_refused(core, config):
    for key in (b"k", b"x" * 32):
        assert "not that of this core" in core.ask(core.connect(greet=False), wire.hello(operator_key=key)).reason
    core.request_handler = RequestHandler(core.bound.socket, config, 1)
    assert "no operators" in core.ask(core.connect(greet=False), wire.hello(operator_key=KEY)).reason


def test_client_that_comes_back_without_the_key_is_no_operator(core):
    client = core.connect(greet=False)
    core.ask(client, wire.hello(operator_key=KEY))
    client.send(wire.encode(wire.Bye(1)))
    core.ask(client, wire.hello())
    assert core.ask(client, wire.Call(1, 2, "pause", ["keep"])).needs_operator
