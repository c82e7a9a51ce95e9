"""Messages to other ranks: complete, in order, none lost, and no processor time without messages."""

import contextlib
import mmap
import os
import socket
import threading
import time

import pytest

from vllm_mp.core.parallel.ring import MessageRing, RingError

SLOT_BYTES = 4096


class Ring:
    """A ring with its readers' descriptors."""

    def __init__(self, num_readers):
        self.memory = mmap.mmap(-1, MessageRing.num_bytes(num_readers, SLOT_BYTES))
        self.ring = MessageRing(self.memory, 0, num_readers, SLOT_BYTES)
        self.events = [os.eventfd(0) for _ in range(num_readers)]
        self.core, self.ends = socket.socketpair()

    def write(self, *parts, check=lambda: None):
        self.ring.write(parts, self.events, check)

    def read(self, reader):
        return self.ring.read(reader, self.events[reader], [self.ends.fileno()])

    def close(self):
        self.core.close()
        self.ends.close()
        for event in self.events:
            os.close(event)


@pytest.fixture
def make_ring():
    with contextlib.ExitStack() as stack:

        def make(num_readers):
            ring = Ring(num_readers)
            stack.callback(ring.close)
            return ring

        yield make


def test_all_readers_get_all_messages_in_order(make_ring):
    ring, found = make_ring(3), [[], [], []]

    def follow(reader):
        while (message := ring.read(reader)) is not None:
            found[reader].append(message)

    threads = [threading.Thread(target=follow, args=(reader,)) for reader in range(3)]
    for thread in threads:
        thread.start()
    sent = [bytes([i % 256]) * (i % 50) for i in range(300)]
    for message in sent:
        ring.write(message[:3], message[3:])
    while any(reader.num_read < 300 for reader in ring.ring.progress):
        time.sleep(0.001)
    ring.core.close()
    for thread in threads:
        thread.join()
    assert found == [sent] * 3


def test_message_is_not_overwritten_before_all_have_read_it(make_ring):
    ring = make_ring(2)
    for i in range(4):
        ring.write(bytes([i]))
    assert [ring.read(0) for _ in range(4)] == [b"\x00", b"\x01", b"\x02", b"\x03"]

    def check():
        raise TimeoutError("reader 1 is behind")

    with pytest.raises(TimeoutError, match="reader 1 is behind"):
        ring.write(b"late", check=check)
    assert [ring.read(1) for _ in range(4)] == [b"\x00", b"\x01", b"\x02", b"\x03"]


def test_reader_without_messages_uses_no_processor_time(make_ring):
    ring, used = make_ring(1), []

    def follow():
        start = time.thread_time()
        ring.read(0)
        used.append(time.thread_time() - start)

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.2)
    ring.write(b"message")
    thread.join()
    assert used[0] < 0.04


def test_reader_ends_with_its_core(make_ring):
    ring = make_ring(1)
    ring.core.close()
    assert ring.read(0) is None


def test_message_that_does_not_fit_is_refused(make_ring):
    with pytest.raises(ValueError, match="a message of 4,096 bytes does not fit a slot of 4,096 bytes"):
        make_ring(1).write(b"x" * 4096)


def test_message_that_others_have_overwritten_is_refused(make_ring, monkeypatch):
    monkeypatch.setattr("vllm_mp.core.parallel.ring._VISIBLE_S", 0.01)
    ring = make_ring(1)
    ring.write(b"message")
    place = ring.memory.find(b"message")
    ring.memory[place : place + 4] = b"MESS"
    with pytest.raises(RingError, match="message 1 of the core is damaged"):
        ring.read(0)
