"""What the log of a shared core says of its work."""

import logging
from types import SimpleNamespace

import pytest

from vllm_mp.core import activity_log
from vllm_mp.core.activity_log import ActivityLog
from vllm_mp.core.ipc import client_log
from vllm_mp.core.ipc.client_log import ClientLog

S = 10**9


@pytest.fixture
def clock(monkeypatch):
    """The time of the log, in seconds."""
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(activity_log.time, "monotonic_ns", lambda: int(time.now * S))
    monkeypatch.setattr(client_log.time, "monotonic", lambda: time.now)
    return time


@pytest.fixture
def scheduler():
    """A stand-in for a scheduler that has run nothing."""
    pool = SimpleNamespace(num_free=75, num_blocks=100)
    cache = SimpleNamespace(pool=pool, num_prompt_tokens=0, num_cached_tokens=0)
    return SimpleNamespace(cache=cache, num_running=0, num_waiting=0)


def test_line_has_the_load_and_the_speed_since_the_last_line(clock, scheduler, caplog):
    caplog.set_level(logging.INFO)
    log = ActivityLog(scheduler, is_on=True)
    assert log.due == 110 * S
    scheduler.num_running, scheduler.num_waiting = 3, 1
    scheduler.cache.num_prompt_tokens, scheduler.cache.num_cached_tokens, log.num_generated = 400, 100, 1000
    log.write(110 * S)
    log.num_generated += 50
    log.write(120 * S)
    load = "3 running, 1 waiting"
    assert caplog.messages == [
        f"{load}, 40.0 prompt tokens/s, 100.0 tokens/s generated, KV cache 25.0% in use, prefix cache hits 25.0%",
        f"{load}, 0.0 prompt tokens/s, 5.0 tokens/s generated, KV cache 25.0% in use",
    ]


def test_idle_core_logs_nothing_and_its_time_does_not_count(clock, scheduler, caplog):
    caplog.set_level(logging.INFO)
    log = ActivityLog(scheduler, is_on=True)
    clock.now += 1000
    log.note_idle()
    assert caplog.messages == []
    log.num_generated += 20  # a short answer, after which the core is idle again
    clock.now += 4
    log.note_idle()
    assert caplog.messages == []
    clock.now += 6
    log.note_idle()
    assert len(caplog.messages) == 1
    assert "0 running, 0 waiting, 0.0 prompt tokens/s, 2.0 tokens/s generated" in caplog.text


def test_core_of_a_single_client_leaves_these_lines_to_the_client(clock, scheduler, caplog):
    caplog.set_level(logging.INFO)
    log = ActivityLog(scheduler, is_on=False)
    log.num_generated += 20
    clock.now += 1000
    log.note_idle()
    assert log.due > 10**6 * S
    assert caplog.messages == []


def test_client_that_connects_again_and_again_does_not_fill_the_log(clock, caplog):
    caplog.set_level(logging.INFO)
    log = ClientLog()
    for client in range(1000):
        log.joined(client, None)
        log.left(client)
    assert len(caplog.messages) == 101
    assert caplog.messages[:2] == ["client 0 (unknown) has connected", "client 0 (unknown) has left"]
    assert "not all are logged" in caplog.messages[-1]
    clock.now += 61
    log.joined(1000, None)
    assert caplog.messages[-1] == "client 1000 (unknown) has connected"
