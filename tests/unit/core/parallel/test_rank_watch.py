"""A core whose main thread waits for a device ends soon after another rank has ended."""

import queue
import threading

import pytest

from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.parallel.rank_watch import watch_ranks


@pytest.mark.parametrize("kind", [WorkerFailedError, ValueError])
def test_core_ends_after_a_rank(kind, caplog):
    looks, codes = iter([None, kind("rank 2 (node 1, b, process 7) ended with signal SIGKILL")]), queue.Queue()

    def look():
        if error := next(looks):
            raise error

    thread = watch_ranks(look, threading.Event(), codes.put, look_s=0.01, grace_s=0.0)
    assert codes.get(timeout=30) == 1
    thread.join()
    assert "rank 2 (node 1, b, process 7) ended with signal SIGKILL, and with it the core" in caplog.text


def test_core_that_closes_ends_by_itself():
    codes, stopped = queue.Queue(), threading.Event()

    def look():
        stopped.set()
        raise WorkerFailedError("rank 1 ended with exit code 0")

    watch_ranks(look, stopped, codes.put, look_s=0.01).join()
    assert codes.empty()
