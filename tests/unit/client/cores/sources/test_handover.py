"""The last words of a handover: whatever happens to either process, exactly one of them serves."""

import socket
import threading

import pytest

from vllm_mp.client.cores.sources import handover
from vllm_mp.client.cores.sources.handover import Estate, Heir, Inheritance, Offer
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import NOT_SUSPENDED
from vllm_mp.errors import EngineStartError

OFFER = Offer(address="ipc:///a", incarnation=3, core_pid=1, limits={}, num_held=0)
ESTATE = Estate(
    predecessor=Predecessor(incarnation=3, cause="", kind="replaced", is_from_outside=True, in_step=[]),
    suspension=NOT_SUSPENDED,
    adapters=None,
    tried=[],
)


class Old(threading.Thread):
    """The old process, whose core has ended, and which hands over in a thread."""

    def __init__(self, connection):
        super().__init__()
        self.heir = Heir(connection, OFFER, [])
        self.has_let_go = None
        self.runs = threading.Event()
        """Not set: a signal has stopped the process before it receives the word that the new core is ready."""
        self.runs.set()

    def run(self):
        receive = self.heir._channel.receive

        def receive_unless_stopped(*args):
            self.runs.wait()
            return receive(*args)

        self.heir._channel.receive = receive_unless_stopped
        self.has_let_go = self.heir.take(ESTATE)
        self.heir.close()


def never():
    """Let the new process wait."""


@pytest.fixture
def pair():
    """The old process, and what the new one sees of it."""
    ends = socket.socketpair()
    old = Old(ends[0])
    inheritance = Inheritance(ends[1], "ipc:///a")
    yield old, inheritance
    inheritance.close()
    if old.ident is not None:
        old.join()
    old.heir.close()


def claim(old, inheritance):
    """Let the old process send what its core has left, and the new one receive it."""

    def start_once_ready():
        if old.ident is None and old.heir.is_ready(core_pid=1):
            old.start()

    assert inheritance.claim(start_once_ready).predecessor.incarnation == 3


def test_old_process_lets_go_once_the_new_core_is_ready(pair):
    old, inheritance = pair
    claim(old, inheritance)
    inheritance.confirm(never)
    old.join()
    assert old.has_let_go


def test_new_process_gives_way_to_an_old_one_that_has_taken_its_core_back(pair, monkeypatch):
    old, inheritance = pair
    monkeypatch.setattr(handover, "_TAKE_TIMEOUT_S", 0.01)
    claim(old, inheritance)
    old.join()
    assert not old.has_let_go
    with pytest.raises(EngineStartError, match="at ipc:///a has taken its core back and goes on, because this"):
        inheritance.confirm(never)


def test_new_process_that_was_stopped_for_too_long_gives_way(pair, monkeypatch):
    """It finds everything that the old process has said at once."""
    old, inheritance = pair
    monkeypatch.setattr(handover, "_TAKE_TIMEOUT_S", 0.01)

    def wait_for_verdict():
        if old.ident is None and old.heir.is_ready(core_pid=1):
            old.start()
            old.join()

    assert inheritance.claim(wait_for_verdict) is not None
    with pytest.raises(EngineStartError, match="has taken its core back"):
        inheritance.confirm(never)


def test_new_process_gives_way_to_an_old_one_that_goes_on_with_its_core(pair):
    old, inheritance = pair
    old.heir.close()
    with pytest.raises(EngineStartError, match="at ipc:///a goes on, because its core is being replaced already"):
        inheritance.claim(never)


def test_new_process_knows_the_latest_core_of_an_old_one_that_ends(pair):
    old, inheritance = pair
    looks = []

    def die_after_a_restart():
        looks.append(old.heir.is_ready(core_pid=2))
        old.heir._channel.close()  # as the system does at the end of the process

    assert inheritance.claim(die_after_a_restart) is None
    assert inheritance.core_pid == 2


def test_new_process_stays_ready_while_the_core_is_restarted(pair):
    old, inheritance = pair
    looks = []

    def look():
        looks.append(old.heir.is_ready(core_pid=1 + len(looks)))
        if len(looks) == 3:
            old.start()

    assert inheritance.claim(look) is not None
    assert looks == [True] * 3
    assert inheritance.core_pid == 3


def test_new_process_goes_on_if_the_old_one_ends_without_a_verdict(pair):
    old, inheritance = pair
    old.heir._channel.close()  # as the system does at the end of the process
    inheritance.confirm(never)


def test_new_process_waits_for_the_verdict_of_an_old_one_that_is_stopped(pair):
    old, inheritance = pair
    looks = []

    def continue_at_third_look():
        looks.append(old.has_let_go)
        if len(looks) == 3:
            old.runs.set()

    old.runs.clear()
    claim(old, inheritance)
    inheritance.confirm(continue_at_third_look)
    old.join()
    assert looks[:3] == [None] * 3
    assert old.has_let_go


def test_old_process_goes_on_if_the_new_one_ends_before_the_verdict(pair):
    old, inheritance = pair

    def end():
        raise KeyboardInterrupt

    old.runs.clear()
    claim(old, inheritance)
    with pytest.raises(KeyboardInterrupt):
        inheritance.confirm(end)
    inheritance._channel.close()  # as the system does at the end of the process
    old.runs.set()
    old.join()
    assert not old.has_let_go
