"""A core whose process stands still hangs after the limit of its step; one that uses the machine does not."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from vllm_mp.client.cores import health
from vllm_mp.client.cores.health import HangWatch
from vllm_mp.client.cores.process_activity import Activity, ProcessActivity, describe_activity, is_stopped
from vllm_mp.core_link.core_status import StepRequests
from vllm_mp.core_link.status_page import StatusPage

NO_REQUESTS = StepRequests(*[np.zeros(0, np.uint32)] * 3)
LIMIT_S, STEP_LIMIT_S = 60.0, 0.5


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that moves only when the test moves it."""
    now = [100.0]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def page():
    """A page of a core in a step with a limit."""
    page = StatusPage.create(None, 1)
    page.begin_step(1, NO_REQUESTS, 1, int(1e9 * STEP_LIMIT_S))
    return page


class Watched:
    """A watch of a process whose activity the test chooses."""

    def __init__(self, page, clock):
        self.page, self.clock = page, clock
        self.watch = HangWatch(LIMIT_S, os.getpid())
        self.watch._activity.look = lambda elapsed: self.activity
        self.activity = Activity.ACTIVE

    def hangs_within(self, seconds, activity):
        """Observe the core for `seconds`; return whether it hung."""
        self.activity, end = activity, self.clock[0] + seconds
        while self.clock[0] < end:
            self.clock[0] += self.watch.interval_s
            if self.watch.is_hung(self.page, True):
                return True
        return False


@pytest.fixture
def watched(page, clock):
    return Watched(page, clock)


@pytest.mark.parametrize("activity", [Activity.BLOCKED, Activity.STOPPED])
def test_process_that_stands_still_hangs_after_the_limit_of_its_step(watched, activity):
    assert not watched.hangs_within(STEP_LIMIT_S, activity)
    assert watched.hangs_within(0.6, activity)
    assert watched.watch.exceeded == "0.5 s, the limit of its step"


def test_process_that_uses_the_machine_hangs_after_the_iteration_timeout(watched):
    assert not watched.hangs_within(LIMIT_S - 1, Activity.ACTIVE)
    assert watched.hangs_within(2.0, Activity.ACTIVE)
    assert watched.watch.exceeded == "60 s"


def test_activity_begins_the_count_again(watched):
    for _ in range(20):
        assert not watched.hangs_within(STEP_LIMIT_S - 0.1, Activity.BLOCKED)
        assert not watched.hangs_within(0.1, Activity.ACTIVE)


def test_step_of_unknown_limit_may_stand_still_until_the_iteration_timeout(watched, page):
    page.begin_step(2, NO_REQUESTS, 2048, 0)
    assert not watched.hangs_within(LIMIT_S - 1, Activity.BLOCKED)
    assert watched.hangs_within(2.0, Activity.BLOCKED)


def test_core_whose_steps_wait_for_a_device_hangs_early_only_if_it_is_stopped(watched, page):
    page.note_waits()
    assert not watched.hangs_within(LIMIT_S - 5, Activity.BLOCKED)
    page.begin_step(2, NO_REQUESTS, 1, int(1e9 * STEP_LIMIT_S))
    assert watched.hangs_within(3.0, Activity.STOPPED)


def test_core_between_two_steps_hangs_early_only_if_it_is_stopped(watched, page):
    assert not watched.hangs_within(0.2, Activity.ACTIVE)
    page.end_step(1, 0, 5, 10)
    assert not watched.hangs_within(LIMIT_S - 1, Activity.BLOCKED)
    page.end_step(1, 0, 5, 10)
    assert watched.hangs_within(3.0, Activity.STOPPED)


@pytest.mark.parametrize("activity", [Activity.BLOCKED, Activity.STOPPED])
def test_time_of_a_suspended_machine_or_group_of_processes_does_not_count(watched, clock, activity):
    for _ in range(20):
        assert not watched.hangs_within(STEP_LIMIT_S - 0.1, activity)
        clock[0] += 1000.0  # neither the core nor the watch was running
        watched.page.beat()
        watched.watch.is_hung(watched.page, True)
        clock[0] += 1000.0
        assert not watched.watch.is_hung(watched.page, True)


def test_starved_watch_does_not_blame_the_core(watched, clock):
    watched.activity = Activity.BLOCKED
    assert not watched.hangs_within(0.2, Activity.BLOCKED)
    for _ in range(5):
        clock[0] += 1.0  # each look comes late
        assert not watched.watch.is_hung(watched.page, True)


def test_without_work_nothing_hangs(watched, clock):
    watched.activity = Activity.STOPPED
    for _ in range(1000):
        clock[0] += watched.watch.interval_s
        assert not watched.watch.is_hung(watched.page, False)


@pytest.fixture
def child():
    """Return a function that starts a Python process with a second thread and waits for its first output."""
    processes = []

    def start(code):
        code = f"import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()\nprint()\n{code}"
        process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()


def seen(activity, expected, elapsed=0.02):
    """Return whether a process is seen in the expected activity before a deadline."""
    for _ in range(500):
        health.time.sleep(elapsed)
        if activity.look(elapsed) is expected:
            return True
    return False


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel does not count run delays")
def test_activity_of_a_process_is_what_its_threads_do(child):
    sleeping, spinning = child("time.sleep(99)"), child("while True: pass")
    assert seen(ProcessActivity(sleeping.pid), Activity.BLOCKED)
    activity = ProcessActivity(spinning.pid)
    for _ in range(10):
        health.time.sleep(0.02)
        assert activity.look(0.02) is Activity.ACTIVE
    assert "runs" in describe_activity(spinning.pid)
    os.kill(sleeping.pid, signal.SIGSTOP)
    assert seen(ProcessActivity(sleeping.pid), Activity.STOPPED)
    assert is_stopped(sleeping.pid)
    assert "state T: stopped by a signal" in describe_activity(sleeping.pid)
    os.kill(sleeping.pid, signal.SIGCONT)
    assert seen(ProcessActivity(sleeping.pid), Activity.BLOCKED)


def test_process_that_is_gone_counts_as_active():
    assert ProcessActivity(2**22 + 1).look(1.0) is Activity.ACTIVE
    assert not is_stopped(2**22 + 1)
