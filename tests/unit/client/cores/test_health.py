"""The conditions under which a core counts as hung."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from vllm_mp.client.cores import health
from vllm_mp.client.cores.health import HangWatch, OomKills
from vllm_mp.client.cores.process_activity import is_ending
from vllm_mp.core_link.core_status import CoreState, StepRequests
from vllm_mp.core_link.status_page import StatusPage

NO_REQUESTS = np.zeros(0, np.uint32)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that moves only when the test moves it."""
    now = [100.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    return now


def look(watch, page, clock, seconds, has_work=True):
    """Observe the page every `interval_s` for `seconds`; return whether any observation found a hang."""
    found = False
    for _ in range(round(seconds / watch.interval_s)):
        clock[0] += watch.interval_s
        found |= watch.is_hung(page, has_work)
    return found


@pytest.fixture
def page():
    page = StatusPage.create(None, 1)
    page.begin_step(1, StepRequests(NO_REQUESTS, NO_REQUESTS, NO_REQUESTS))
    return page


def test_step_without_a_heartbeat_is_a_hang_after_the_limit(clock, page):
    watch = HangWatch(2.0, None)
    assert not look(watch, page, clock, 2.0)
    assert look(watch, page, clock, 0.5)


def test_step_with_heartbeats_is_no_hang_however_long_it_takes(clock, page):
    watch = HangWatch(2.0, None)
    for _ in range(20):
        page._header[6] += 1  # the heartbeat, because the clock does not move
        assert not look(watch, page, clock, 1.5)


def test_time_without_work_is_no_hang_and_does_not_count_later(clock, page):
    watch = HangWatch(2.0, None)
    assert not look(watch, page, clock, 60.0, has_work=False)
    assert not look(watch, page, clock, 2.0)
    assert look(watch, page, clock, 0.5)


def test_idle_core_has_time_to_beat(clock, page):
    page.enter(CoreState.IDLE)
    watch = HangWatch(0.2, None)
    assert not look(watch, page, clock, 0.9)
    assert look(watch, page, clock, 0.3)


def test_time_that_was_not_observed_does_not_count(clock, page):
    watch = HangWatch(2.0, None)
    assert not watch.is_hung(page, True)
    clock[0] += 1000.0
    assert not watch.is_hung(page, True)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system has no /proc")
def test_process_that_a_signal_has_stopped_is_detected(clock):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        watch = HangWatch(2.0, process.pid)
        for _ in range(40):
            clock[0] += watch.interval_s
            assert not watch.is_stopped_for_too_long()
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        found = []
        for _ in range(12):
            clock[0] += watch.interval_s
            found.append(watch.is_stopped_for_too_long())
        assert found[-1]
        assert not any(found[:8])
    finally:
        process.kill()
        process.wait()


def test_core_that_loads_may_be_silent_for_the_start_timeout(clock, page):
    page.enter(CoreState.LOADING)
    watch = HangWatch(2.0, None, 10.0)
    assert not look(watch, page, clock, 9.5)
    assert look(watch, page, clock, 1.0)


def test_core_that_is_stopped_while_it_loads_hangs_after_the_usual_limit(clock, page, monkeypatch):
    page.enter(CoreState.LOADING)
    monkeypatch.setattr(health, "is_stopped", lambda pid: True)
    assert look(HangWatch(2.0, None, 10.0), page, clock, 4.0)


@pytest.fixture
def kills(monkeypatch):
    """Return the number of the kernel's kills, and whether the core is ending, for the test to change."""
    found = {"kills": 3, "is_ending": False}
    monkeypatch.setattr(health, "count_oom_kills", lambda: found["kills"])
    monkeypatch.setattr(health, "is_ending", lambda pid: found["is_ending"])
    return found


def watch_kills(oom_kills, clock, seconds):
    for _ in range(round(seconds / 0.1)):
        clock[0] += 0.1
        oom_kills.look(1)


def test_kill_for_lack_of_memory_counts_for_a_core_that_dies_within_a_second(clock, kills):
    oom_kills = OomKills()
    for seconds, counts in ((0.0, True), (0.3, True), (1.2, False), (60.0, False)):
        watch_kills(oom_kills, clock, 2.0)
        kills["kills"] += 1
        watch_kills(oom_kills, clock, seconds)
        assert oom_kills.note_death() == counts
    assert not oom_kills.note_death(), "the kill counts for one core only"


def test_kill_for_lack_of_memory_counts_for_a_core_however_long_its_memory_takes_to_be_given_back(clock, kills):
    oom_kills = OomKills()
    watch_kills(oom_kills, clock, 2.0)
    kills.update(kills=4, is_ending=True)
    watch_kills(oom_kills, clock, 60.0)
    assert oom_kills.note_death()


def test_process_that_was_killed_is_ending():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_ending(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(process.pid)
    assert is_ending(process.pid)
