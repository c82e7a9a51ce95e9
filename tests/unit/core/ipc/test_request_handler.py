"""Bounds on what one client can cost the core and its other clients."""

import contextlib
import math
import os
import select
import subprocess
import sys
import threading
import time
import types
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import zmq
from support.stand_in_engine import Engine

from vllm_mp import AsyncEngineArgs, __version__, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.sources.held_address import HeldAddress, listen_at
from vllm_mp.core.images.image_store import ImageStore
from vllm_mp.core.ipc import clients
from vllm_mp.core.ipc import request_handler as module
from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.call_handler import OperatorCall, StepFailedError
from vllm_mp.core.ipc.client_places import ClientPlaces
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.ipc.unread_output import UnreadOutput
from vllm_mp.core.lora.adapter_cache import AdapterChangedError
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.scheduler.waiting import memory_quota
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.keys import curve_server
from vllm_mp.keys.curve_keys import encode_key, read_client_key
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.testing.engines import make_keys
from vllm_mp.validation.image_validation import ImageShape

HELLO = wire.encode(wire.hello())
TOKENS = [bytes([number]) * wire.TOKEN_BYTES for number in (1, 2)]
PREDECESSOR = Predecessor(
    incarnation=7,
    cause="the core process 5 ended with signal SIGSEGV; its last log lines: a secret",
    kind="signal",
    is_from_outside=False,
    in_step=[(TOKENS[0], 3, 10), (TOKENS[1], 3, 20), (TOKENS[0], 4, 0), (b"", 5, 1)],
    earlier_deaths=[(6, [TOKENS[1]]), (5, [TOKENS[0]])],
)
KEY = b"k" * 32
_GREET = """
import sys, zmq
from vllm_mp import wire
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send(wire.encode(wire.hello()))
assert isinstance(wire.decode_core_message(socket.recv()), wire.Welcome)
sys.stdin.read()
"""


class Core:
    """A request handler at a real socket, with a scheduler that runs no step."""

    def __init__(self, address, config, is_shared=True, public=None, predecessor=PREDECESSOR):
        """`public` is the address for clients, if it is not `address`."""
        self.address = address if public is None else public.address
        listener = listen_at(Path(address.removeprefix("ipc://")))
        self.bound = BoundSocket(address, listener.detach(), public)
        self.request_handler = RequestHandler(self.bound.socket, config, 1, KEY, predecessor, is_shared)
        self.engine = Engine()
        self.page = StatusPage.create(None, 1)
        self.serve(
            echo=lambda value: value,
            fail=lambda: 1 // 0,
            refuse=_refuse,
            pause=OperatorCall(lambda mode: f"paused with {mode}"),
        )
        self.context = zmq.Context()

    def serve(self, **calls):
        self.request_handler.serve(self.engine.scheduler, calls, self.page)

    def connect(self, greet=True, limit=0, hello=HELLO):
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.SNDHWM, limit)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.address)
        if greet:
            dealer.send(hello)
            assert isinstance(self.answer(dealer), wire.Welcome)
        return dealer

    def receive_until(self, condition, timeout=10):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline
            self.request_handler.receive()
            time.sleep(0.001)

    def answer(self, dealer):
        """Return the next message to `dealer` that ends a request or answers a call."""
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
        self.context.destroy(linger=0)
        self.bound.close()


@pytest.fixture(scope="module")
def config(default_model):
    return AsyncEngineArgs(model=str(default_model), max_model_len=64).create_engine_config()


@pytest.fixture
def core(config, tmp_path):
    core = Core(f"ipc://{tmp_path}/core.sock", config)
    yield core
    core.close()


def test_request_and_call_are_on_the_page_while_the_core_is_at_work_on_them(core):
    core.request_handler.outside = OutsideWork(core.page)
    client = core.connect()
    seen = []

    def look():
        status = core.page.read()
        seen.append((status.requests, [call_id for _, call_id in status.calls]))

    core.serve(look=look)
    core.request_handler.processors = types.SimpleNamespace(enter=lambda request: look())
    client.send(wire.encode(request(3, num_tokens=5)))
    core.receive_until(lambda: seen)
    core.ask(client, wire.Call(1, 77, "look"))
    number = core.request_handler._clients.numbers()[0]
    assert seen == [([(number, 3, -5)], []), ([], [77])]
    assert (core.page.read().requests, core.page.read().calls) == ([], [])


def test_call_that_ends_the_core_stays_on_the_page(core):
    def fail():
        raise WorkerFailedError("rank 1 has ended")

    core.request_handler.outside = OutsideWork(core.page)
    client = core.connect()
    core.serve(fail=fail)
    client.send(wire.encode(wire.Call(1, 77, "fail")))
    with pytest.raises(WorkerFailedError):
        core.receive_until(lambda: False)
    assert [call_id for _, call_id in core.page.read().calls] == [77]


@pytest.mark.parametrize("only_waits", [True, False])
def test_call_that_is_not_done_stays_on_the_page_unless_it_only_waits(config, tmp_path, only_waits):
    predecessor = msgspec.structs.replace(PREDECESSOR, calls=[(TOKENS[0], 77)])
    core = Core(f"ipc://{tmp_path}/core.sock", config, predecessor=predecessor)
    outside = core.request_handler.outside = OutsideWork(core.page)
    client = core.connect(hello=wire.encode(wire.hello(token=TOKENS[0], operator_key=KEY)))
    done, seen = Future(), []

    def work():
        seen.append([call_id for _, call_id in core.page.read().calls])
        return done

    core.serve(work=OperatorCall(work, only_waits=only_waits))
    client.send(wire.encode(wire.Call(1, 77, "work", is_suspect=True)))
    core.receive_until(lambda: seen)
    on_page = [] if only_waits else [77]
    assert (seen, [call_id for _, call_id in core.page.read().calls]) == ([[77]], on_page)
    assert outside.has_suspect_calls != only_waits
    done.set_result("done")
    assert core.answer(client).result == "done"
    assert (core.page.read().calls, outside.has_suspect_calls) == ([], False)
    core.close()


def test_call_is_alone_if_the_predecessor_died_in_it_and_only_then(config, tmp_path, monkeypatch):
    predecessor = msgspec.structs.replace(PREDECESSOR, calls=[(TOKENS[0], 77)])
    core = Core(f"ipc://{tmp_path}/core.sock", config, predecessor=predecessor)
    drained = []
    core.request_handler.process_pending = lambda: drained.append(True)
    client = core.connect(hello=wire.encode(wire.hello(token=TOKENS[0])))
    for call_id, is_suspect, count in ((76, True, 0), (77, False, 0), (77, True, 1)):
        core.ask(client, wire.Call(1, call_id, "echo", [1], is_suspect))
        assert len(drained) == count
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


@pytest.mark.parametrize(("token", "own"), [(TOKENS[0], [(3, 10), (4, 0)]), (TOKENS[1], [(3, 20)]), (b"", [])])
def test_welcome_tells_each_client_what_the_predecessor_computed_for_it(core, token, own):
    welcome = core.ask(core.connect(greet=False), wire.hello(token=token))
    assert welcome.last_death == wire.LastDeath(
        7, "the core process 5 ended with signal SIGSEGV", "signal", False, num_in_step=4, in_step=own
    )


def test_client_names_a_culprit_only_for_deaths_with_a_request_of_its_own_in_the_step(core):
    honest, liar = (core.connect(hello=wire.encode(wire.hello(token=token))) for token in TOKENS)
    stranger = core.connect()
    for dealer, deaths in ((stranger, [5, 6, 7]), (liar, [5, 6, 0, -1, 2**63 - 1]), (honest, [5, 5])):
        dealer.send(wire.encode(wire.Convicted(1, deaths)))
        dealer.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 3)
    assert sorted(core.page.convicted()) == [5, 6]


def test_client_that_comes_back_replaces_its_former_self(core):
    hello = wire.encode(wire.hello(token=TOKENS[0]))
    other, former = core.connect(hello=wire.encode(wire.hello(token=TOKENS[1]))), core.connect(hello=hello)
    for dealer in (other, former):
        dealer.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
    again = core.connect(hello=hello)
    assert core.engine.scheduler.num_waiting == 1
    assert sorted(core.page.tokens().values()) == sorted(TOKENS)
    again.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
    former.send(wire.encode(wire.AbortRequests(1, [3])))
    core.receive_until(lambda: core.request_handler.num_dropped == 1)
    assert core.engine.scheduler.num_waiting == 2
    assert core.request_handler.num_clients == 2


def test_clients_without_a_token_do_not_replace_each_other(core):
    core.connect()
    core.connect()
    assert core.request_handler.num_clients == 2


def test_status_page_holds_the_tokens_of_connected_clients(core):
    leaving, _ = [core.connect(hello=wire.encode(wire.hello(token=token))) for token in TOKENS]
    assert core.page.tokens() == dict(enumerate(TOKENS))
    leaving.send(wire.encode(wire.Bye(1)))
    core.receive_until(lambda: core.request_handler.num_clients == 1)
    assert core.page.tokens() == {1: TOKENS[1]}


def test_client_that_left_without_bye_is_forgotten_although_no_other_client_says_hello(core, monkeypatch):
    monkeypatch.setattr(clients, "_LOOK_INTERVAL_S", 0.05)
    staying, leaving = core.connect(), core.connect()
    leaving.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 1)
    leaving.close()
    core.receive_until(lambda: core.request_handler.num_clients == 1)
    assert not core.engine.scheduler.num_waiting
    assert core.ask(staying, wire.Call(1, 1, "echo", ["here"])).result == "here"


VANISH = """
import os, socket, stat, sys
from vllm_mp import SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection

address, key_file = sys.argv[1:]
connection = CoreConnection(address, key_file)
connection.greet(60, lambda: None)
connection.send(wire.AddRequest(1, 3, "id", wire.pack_ids([5]), SamplingParams(seed=1)))
connection.ask(60, "echo", "the request has left this process")
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        opened = socket.socket(fileno=os.dup(number))
    except OSError:
        continue
    if opened.family == socket.AF_INET:
        opened.setsockopt(socket.IPPROTO_TCP, 19, 1)  # TCP_REPAIR: the connection ends without a packet
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.extended
def test_client_that_vanishes_over_tcp_without_closing_its_connection_is_forgotten(config, tmp_path, monkeypatch):
    monkeypatch.setattr(curve_server, "PROBE_S", 1)
    server, own = make_keys(tmp_path)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.closing(HeldAddress("tcp://127.0.0.1:0", server)))
        public = held.public_address()
        # A core has a descriptor of its own, which it closes.
        public = msgspec.structs.replace(public, listener=os.dup(public.listener))
        core = stack.enter_context(contextlib.closing(Core(f"ipc://{tmp_path}/parent.sock", config, public=public)))
        socket = core.bound.socket
        assert socket.get(zmq.HEARTBEAT_IVL) == 0, "with heartbeats, libzmq aborts when a flooding client dies"
        assert (socket.get(zmq.TCP_KEEPALIVE), socket.get(zmq.TCP_MAXRT)) == (1, 3000)
        command = [sys.executable, "-c", VANISH, held.address, own]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            core.receive_until(lambda: select.select([process.stdout], [], [], 0)[0], timeout=30)
            assert core.engine.scheduler.num_waiting == 1
            if not process.stdout.readline():
                pytest.skip("ending a connection without a packet needs CAP_NET_ADMIN")
            core.receive_until(lambda: not core.request_handler._clients._unconfirmed)  # or a message would show it
            process.kill()
            core.receive_until(lambda: core.request_handler.num_clients == 0, timeout=30)
            assert not core.engine.scheduler.num_waiting
        finally:
            process.kill()
            process.communicate()


def test_number_of_clients_is_limited_and_a_client_that_leaves_makes_room(core, monkeypatch):
    monkeypatch.setattr(wire, "MAX_CLIENTS", 4)
    first, *_ = [core.connect() for _ in range(3)]
    late = core.connect(greet=False)
    late.send(HELLO)
    refusal = core.answer(late)
    assert isinstance(refusal, wire.Refused)
    assert f"the limit is 4, of which process {os.getpid()} has 3 and may have 3; close" in refusal.reason
    assert isinstance(core.ask(first, wire.hello()), wire.Welcome)
    first.send(wire.encode(wire.Bye(1)))
    core.receive_until(lambda: core.request_handler.num_clients == 2)
    assert isinstance(core.ask(late, wire.hello()), wire.Welcome)


def test_process_with_many_clients_locks_out_no_other_process_and_no_operator(core, monkeypatch):
    monkeypatch.setattr(wire, "MAX_CLIENTS", 32)
    own = [core.connect(greet=False) for _ in range(40)]
    for client in own:
        client.send(HELLO)
    core.receive_until(lambda: core.request_handler.num_clients == 21)
    with subprocess.Popen([sys.executable, "-c", _GREET, core.address], stdin=subprocess.PIPE) as other:
        core.receive_until(lambda: core.request_handler.num_clients == 22)
        assert other.communicate() == (None, None)
    for _ in range(4):
        core.connect(hello=wire.encode(wire.hello(KEY)))


def test_clients_over_tcp_belong_to_their_key(config, tmp_path):
    server, own = make_keys(tmp_path)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(contextlib.closing(HeldAddress("tcp://127.0.0.1:0", server)))
        public = held.public_address()
        public = msgspec.structs.replace(public, listener=os.dup(public.listener))
        core = stack.enter_context(contextlib.closing(Core(f"ipc://{tmp_path}/parent.sock", config, public=public)))
        connections = [stack.enter_context(contextlib.closing(CoreConnection(held.address, own))) for _ in range(2)]
        greetings = [threading.Thread(target=each.greet, args=(60, lambda: None)) for each in connections]
        for greeting in greetings:
            greeting.start()
        core.receive_until(lambda: core.request_handler.num_clients == 2)
        for greeting in greetings:
            greeting.join()
        (owner,) = {core.request_handler._clients.owner_of(client) for client in (0, 1)}
        assert owner == f"the key {encode_key(read_client_key(own).public)}"


def test_client_that_comes_back_has_its_place_before_new_clients(core, monkeypatch):
    monkeypatch.setattr(wire, "MAX_CLIENTS", 8)
    former = [bytes([number]) * wire.TOKEN_BYTES for number in range(4)]
    core.request_handler._clients._places = ClientPlaces(former)
    new = [core.connect(greet=False) for _ in range(8)]
    for client in new:
        client.send(HELLO)
    core.receive_until(lambda: core.request_handler.num_clients == 2)
    for token in former:
        core.connect(hello=wire.encode(wire.hello(token=token)))
    assert core.request_handler.num_clients == 6
    core.connect(hello=wire.encode(wire.hello(token=former[0])))
    assert core.request_handler.num_clients == 6, "the client takes its own place again"


def test_request_whose_adapter_has_changed_is_refused_as_one_that_may_be_sent_again(core):
    def find(lora, may_open, digest):
        raise AdapterChangedError(f"the weights of {lora.lora_name} have changed")

    core.request_handler.adapters = types.SimpleNamespace(find=find)
    client = core.connect()
    client.send(wire.encode(msgspec.structs.replace(request(3), lora=LoRARequest("a", 1, "/a"))))
    [end] = core.answer(client).finished
    assert (end.slot, end.reason, end.error, end.interrupted) == (3, "error", "the weights of a have changed", True)


def test_request_beyond_the_memory_quota_is_refused_and_other_clients_have_room(core, monkeypatch):
    monkeypatch.setattr(memory_quota, "MAX_BYTES", 20_000)
    greedy, modest = core.connect(), core.connect()
    for slot in range(20):
        greedy.send(wire.encode(request(slot)))
    end = core.answer(greedy).finished[0]
    assert end.reason == "error"
    assert end.no_room
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

    core.serve(work=work)
    for call_id in range(30):
        flooding.send(wire.encode(wire.Call(1, call_id, "work")))
    while core.bound.socket.poll(100):
        before = len(calls)
        core.request_handler.receive()
        assert len(calls) - before <= 2
    assert len(calls) == 30


@pytest.mark.parametrize("kind", [WorkerFailedError, StepFailedError])
def test_caller_gets_no_answer_from_a_core_that_cannot_continue(kind, core):
    caller = core.connect()

    def fail():
        raise kind("rank 1 ended")

    core.serve(fail=fail)
    caller.send(wire.encode(wire.Call(1, 1, "fail")))
    assert core.bound.socket.poll(10_000)
    with pytest.raises(kind, match="rank 1 ended"):
        core.request_handler.receive()
    assert not caller.poll(100), "the successor answers"


def test_message_of_a_client_is_handled_before_the_rest_of_another_clients_flood(core):
    flooding, quiet, handled = core.connect(), core.connect(), []

    def note(number):
        handled.append(number)
        if number == 10:
            quiet.send(wire.encode(wire.Call(1, 1, "note", [-1])))
        if number >= 10 and -1 not in handled:
            time.sleep(0.01)  # ZeroMQ may not have delivered it yet

    core.serve(note=note)
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

    core.serve(begin=begin)
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


def test_requests_that_a_client_sends_again_are_all_received_before_the_first_step(core):
    client = core.connect()

    def replay(slot):
        return wire.encode(msgspec.structs.replace(request(slot), is_replay=True))

    def send_rest():
        time.sleep(0.03)
        for slot in range(1, 20):
            client.send(replay(slot))
        client.send(wire.encode(wire.ReplayEnd(1)))

    client.send(replay(0))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 1)
    rest = threading.Thread(target=send_rest)
    rest.start()
    core.request_handler.receive_replays()
    assert core.engine.scheduler.num_waiting == 20
    rest.join()


def test_client_that_does_not_end_its_replay_holds_up_the_core_only_once(core, monkeypatch):
    client = core.connect()
    client.send(wire.encode(msgspec.structs.replace(request(0), is_replay=True)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 1)
    core.request_handler.receive_replays()
    monkeypatch.setattr(module, "_REPLAY_S", 60)
    started = time.monotonic()
    core.request_handler.receive_replays()
    assert time.monotonic() - started < 30


def monitor_of(dealer):
    return dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)


def test_message_for_another_incarnation_is_dropped(core):
    client = core.connect()
    earlier = request(3)
    earlier.incarnation = 2
    for message in (earlier, wire.Call(2, 7, "echo", ["for another core"]), wire.Bye(0)):
        client.send(wire.encode(message))
    assert core.ask(client, wire.Call(1, 8, "echo", ["for this core"])).call_id == 8
    assert core.request_handler.num_dropped == 3
    assert core.request_handler.num_clients == 1
    assert not core.engine.scheduler.num_waiting


def test_client_that_sends_several_parts_is_dropped_and_told_why_when_it_comes_back(core):
    hello = wire.encode(wire.hello(token=TOKENS[0]))
    hostile, other = core.connect(hello=hello), core.connect()
    monitor = monitor_of(hostile)
    for dealer in (hostile, other):
        dealer.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
    hostile.send_multipart([bytes(1000)] * 1000)
    core.receive_until(lambda: monitor.poll(0))
    assert core.request_handler.num_clients == core.engine.scheduler.num_waiting == 1
    assert "several parts" in core.ask(core.connect(greet=False), wire.hello(token=TOKENS[0])).why_dropped
    assert core.ask(core.connect(greet=False), wire.hello(token=TOKENS[0])).why_dropped == ""


def test_operator_cannot_pause_over_a_connection_that_is_being_closed(core, monkeypatch):
    monkeypatch.setattr(clients, "_CONFIRM_S", math.inf)  # the connection stays open
    hello, carried_out = wire.encode(wire.hello(operator_key=KEY)), []
    core.serve(pause=OperatorCall(carried_out.append))
    operator = core.connect(hello=hello)
    operator.send_multipart([b"", b""])
    operator.send(hello)
    operator.send(wire.encode(wire.Call(1, 1, "pause", ["keep"])))
    core.receive_until(lambda: core.request_handler.num_dropped == 3 or carried_out)
    assert not carried_out
    assert not core.request_handler.num_clients
    assert core.ask(core.connect(hello=hello), wire.Call(1, 2, "pause", ["keep"])).error is None
    assert carried_out == ["keep"]


def test_connection_of_a_peer_that_takes_itself_for_a_client_is_closed(core):
    stranger = core.connect(greet=False)
    monitor = monitor_of(stranger)
    stranger.send(wire.encode(request(3)))
    core.receive_until(lambda: monitor.poll(0))
    assert not core.engine.scheduler.num_waiting


def test_peer_that_is_refused_again_and_again_is_disconnected(core):
    stranger = core.connect(greet=False)
    monitor = monitor_of(stranger)
    for _ in range(50):
        stranger.send(wire.encode(wire.Hello(1)))
    core.receive_until(lambda: monitor.poll(0))


class Reader:
    """A client that is sent output, and that reads it, pretends to, or does not."""

    def __init__(self, core, token=b""):
        self.core = core
        self.dealer = core.connect(hello=wire.encode(wire.hello(token=token)))
        self.monitor = monitor_of(self.dealer)

    def ask_for(self, num_messages, num_bytes=2**15):
        for call_id in range(num_messages):
            self.dealer.send(wire.encode(wire.Call(1, call_id, "echo", ["x" * num_bytes])))

    def read(self, returns_marks=True):
        """Read all messages that have arrived; return the number of replies."""
        num_replies = 0
        while self.dealer.poll(0):
            message = wire.decode_core_message(self.dealer.recv())
            num_replies += isinstance(message, wire.Reply)
            if isinstance(message, wire.Mark) and returns_marks:
                self.dealer.send(wire.encode(wire.MarkSeen(1, message.mark)))
        return num_replies


def test_client_that_does_not_read_is_dropped_and_its_output_discarded(core, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_UNREAD_BYTES", 2**22)
    reader, other = Reader(core, TOKENS[0]), core.connect()
    for dealer in (reader.dealer, other):
        dealer.send(wire.encode(request(3)))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
    reader.ask_for(1000)
    core.receive_until(lambda: reader.monitor.poll(0))
    assert core.request_handler.num_clients == core.engine.scheduler.num_waiting == 1
    assert "bytes of output" in core.ask(core.connect(greet=False), wire.hello(token=TOKENS[0])).why_dropped


def test_client_that_forges_marks_is_dropped_as_if_it_read_nothing(core, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_UNREAD_BYTES", 2**22)
    reader = Reader(core)
    for mark in range(100):
        reader.dealer.send(wire.encode(wire.MarkSeen(1, mark)))
    reader.ask_for(1000)
    core.receive_until(lambda: reader.monitor.poll(0))
    assert core.request_handler.num_dropped >= 100


def test_client_that_reads_is_sent_any_amount(core, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_UNREAD_BYTES", 2**20)
    reader, num_replies = Reader(core), 0
    for _ in range(50):
        reader.ask_for(10)
        expected = num_replies + 10
        deadline = time.monotonic() + 10
        while num_replies < expected:
            assert time.monotonic() < deadline
            core.request_handler.receive()
            num_replies += reader.read()
    assert core.request_handler.num_clients == 1


def test_clients_share_the_room_for_unread_output(core, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_UNREAD_BYTES_OF_ALL", 2**22)
    reader, alone = Reader(core), []
    reader.ask_for(60)
    core.receive_until(lambda: not core.bound.socket.poll(50))
    assert core.request_handler.num_clients == 1
    alone.extend(core.connect() for _ in range(3))
    reader.ask_for(10)
    core.receive_until(lambda: reader.monitor.poll(0))
    assert core.request_handler.num_clients == 3


def test_results_of_one_step_may_exceed_the_limit():
    unread = UnreadOutput()
    for _ in range(100):
        unread.add(2**16, True)
    assert not unread.exceeds(2**20)
    for _ in range(301):
        unread.add(2**16, True)
        exceeds = unread.exceeds(2**20)
    assert exceeds


def test_one_message_may_exceed_the_limit():
    unread = UnreadOutput()
    for num_bytes in (100, 2**25):
        unread.add(num_bytes, False)
        assert not unread.exceeds(2**20)
    unread.add(2**21, False)
    assert unread.exceeds(2**20)


def test_owner_of_a_core_may_leave_any_output_unread(config, tmp_path, monkeypatch):
    monkeypatch.setattr(clients, "_MAX_UNREAD_BYTES", 2**20)
    with contextlib.closing(Core(f"ipc://{tmp_path}/private.sock", config, is_shared=False)) as core:
        reader = Reader(core)
        reader.ask_for(200)
        core.receive_until(lambda: not core.bound.socket.poll(50))
        assert core.request_handler.num_clients == 1


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


def isolations(core, hello):
    """Return the number of tokens up to which each of four requests of a client is isolated, by slot."""
    client = core.connect(hello=wire.encode(hello))
    asked = {3: 5, 4: 2**40, 5: 1, 6: 1}
    for slot, until in asked.items():
        message = request(slot)
        message.isolate_until_num_tokens, message.isolation_group = until, 9
        client.send(wire.encode(message))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == len(asked))
    requests = core.engine.scheduler._requests.values()
    assert {request.isolation_group for request in requests} == {9}
    return {request.slot: request.isolate_until_num_tokens for request in requests}


def test_client_of_a_shared_core_isolates_only_what_was_in_a_fatal_step_and_only_past_it(core):
    assert isolations(core, wire.hello(token=TOKENS[0])) == {3: 5, 4: 1, 5: 0, 6: 0}


def test_client_without_a_token_isolates_nothing_in_a_shared_core(core):
    assert isolations(core, wire.hello()) == dict.fromkeys((3, 4, 5, 6), 0)


def test_request_is_isolated_once(core):
    client = core.connect(hello=wire.encode(wire.hello(token=TOKENS[0])))
    for until in (1, 0):
        message = request(3)
        message.isolate_until_num_tokens = 1
        client.send(wire.encode(message))
        core.receive_until(lambda: core.engine.scheduler.num_waiting == 1)
        assert core.engine.scheduler._requests[0, 3].isolate_until_num_tokens == until
        assert core.ask(client, wire.AbortRequests(1, [3])).finished


def test_request_that_was_refused_for_lack_of_room_is_isolated_when_it_comes_again(core, monkeypatch):
    client = core.connect(hello=wire.encode(wire.hello(token=TOKENS[0])))
    message = request(3)
    message.isolate_until_num_tokens = 5
    with monkeypatch.context() as patch:
        patch.setattr(memory_quota, "MAX_BYTES", 0)
        assert core.ask(client, message).finished[0].no_room
    client.send(wire.encode(message))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 1)
    assert core.engine.scheduler._requests[0, 3].isolate_until_num_tokens == 5


def test_suspect_that_is_removed_for_its_images_is_isolated_when_it_comes_again(core):
    image = ProcessedImage(bytes(32), [ImageArray("pixel_values", "uint8", [1], b"x")])
    core.request_handler.images = ImageStore(lambda image: ImageShape(1, 1), 8, limit=2**20)
    suspects, other = (core.connect(hello=wire.encode(wire.hello(token=token))) for token in (TOKENS[0], b"x" * 16))
    message = request(3)
    message.images = [PlacedImage(image.digest, [(0, 1)])]
    message.isolate_until_num_tokens = 5
    for _ in range(2):
        for client in (suspects, other):
            client.send(wire.encode(wire.PutImage(1, image)))
            client.send(wire.encode(message))
        core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
        requests = core.engine.scheduler._requests
        assert [requests[client, 3].isolate_until_num_tokens for client in (0, 1)] == [5, 0]
        for each in list(requests.values()):
            each.images.images[0].note_encoded(0, object())
        core.request_handler.drop_embeddings()
        for client in (suspects, other):
            assert core.answer(client).was_admitted
    assert not core.engine.scheduler.num_waiting


def test_owner_of_a_private_core_isolates_what_it_wants(config, tmp_path):
    core = Core(f"ipc://{tmp_path}/private.sock", config, is_shared=False)
    assert isolations(core, wire.hello()) == {3: 5, 4: 2**40, 5: 1, 6: 1}
    core.close()


def test_suspect_gets_no_drafts(config, tmp_path):
    model = config.model_config.path
    drafting = AsyncEngineArgs(model=model, max_model_len=64, spec_method="ngram").create_engine_config()
    core = Core(f"ipc://{tmp_path}/drafts.sock", drafting, is_shared=False)
    client = core.connect()
    for slot in (3, 4):
        message = request(slot)
        message.isolate_until_num_tokens = 5 * (slot == 3)
        client.send(wire.encode(message))
    core.receive_until(lambda: core.engine.scheduler.num_waiting == 2)
    most = {request.slot: request.max_drafts for request in core.engine.scheduler._requests.values()}
    assert most == {3: 0, 4: drafting.speculative_config.num_speculative_tokens}
    core.close()


def test_suspects_of_earlier_deaths_stay_known_with_their_furthest_progress():
    earlier = [(TOKENS[0], 3, 12), (TOKENS[0], 8, -5), (TOKENS[0], 4, -7)]
    launched = msgspec.structs.replace(PREDECESSOR, in_earlier_steps=earlier)
    assert launched.suspects() == {
        (TOKENS[0], 3): 12,
        (TOKENS[0], 4): 0,
        (TOKENS[0], 8): -5,
        (TOKENS[1], 3): 20,
    }
