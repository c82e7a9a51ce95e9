"""How a core process tells that its parent has died, and how signals stop it."""

import os
import signal
import subprocess
import sys
import types

import pytest

from vllm_mp.core.start import core_start
from vllm_mp.core.stop_signal import StopSignal

BLOCKED_SIGNALS = """
import signal
from vllm_mp.core.stop_signal import StopSignal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
for number in (signal.SIGTERM, signal.SIGINT):
    stop = StopSignal()
    stop.listen(drains=False)
    signal.raise_signal(number)
    print(stop.signal, stop.is_set)
"""
LAUNCH = types.SimpleNamespace(parent_pid=7)


@pytest.fixture
def stop():
    stop = StopSignal()
    yield stop
    os.close(stop.fd)


def test_parent_that_dies_just_after_its_pipe_ended_counts_as_dead(monkeypatch, stop):
    pids = iter([7, 7, 7, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(pids))
    stop.set()  # as the thread does that watches the pipe

    assert core_start.parent_has_died(LAUNCH, stop)


def test_parent_that_sends_a_signal_after_its_pipe_ended_is_alive(monkeypatch, stop):
    def getppid():
        stop.signal = signal.SIGTERM
        return 7

    monkeypatch.setattr(os, "getppid", getppid)
    monkeypatch.setattr(core_start, "_PARENT_END_S", 600)
    stop.set()

    assert not core_start.parent_has_died(LAUNCH, stop)


def test_core_that_nothing_told_to_stop_does_not_wait_for_the_end_of_its_parent(monkeypatch, stop):
    monkeypatch.setattr(os, "getppid", lambda: 7)
    monkeypatch.setattr(core_start, "_PARENT_END_S", 600)

    assert not core_start.parent_has_died(LAUNCH, stop)


def test_core_of_an_app_that_blocks_signals_can_be_told_to_stop():
    found = subprocess.run([sys.executable, "-c", BLOCKED_SIGNALS], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"{number:d} True" for number in (signal.SIGTERM, signal.SIGINT)]
