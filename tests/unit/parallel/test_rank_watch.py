"""A core whose main thread waits for a device ends soon after another rank has ended."""

import queue
import subprocess
import threading

import pytest

from vllm_mp.core.parallel.rank_watch import watch_ranks


@pytest.fixture
def ranks():
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_core_ends_after_a_rank(ranks, caplog):
    codes = queue.Queue()
    pids = {1: ranks[0].pid, 2: ranks[1].pid}
    thread = watch_ranks(pids, threading.Event(), codes.put, grace_s=0.0)
    ranks[1].kill()
    assert codes.get(timeout=30) == 1
    thread.join()
    assert f"rank 2 (process {ranks[1].pid}) has ended, and with it the core" in caplog.text


def test_core_that_closes_ends_by_itself(ranks):
    codes, stopped = queue.Queue(), threading.Event()
    thread = watch_ranks({1: ranks[0].pid}, stopped, codes.put)
    stopped.set()
    ranks[0].kill()
    thread.join()
    assert codes.empty()
