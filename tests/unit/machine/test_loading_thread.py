"""The thread in which a core imports and loads: its result, its errors and its priority."""

import os
import threading

import pytest

from vllm_mp.machine.loading_thread import run_in_thread


def test_error_of_a_load_is_raised_where_the_load_was_asked_for():
    def fail():
        raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        run_in_thread(fail)


def test_main_thread_looks_around_while_another_one_loads():
    looked = threading.Event()
    assert run_in_thread(lambda: looked.wait(30), looked.set)


def test_load_beside_a_core_has_a_low_priority_and_leaves_none_behind():
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def load():
        found.append(niceness())
        thread = threading.Thread(target=lambda: found.append(niceness()))
        thread.start()
        thread.join()

    before, found = niceness(), []
    run_in_thread(load, niceness=15)
    assert found == [min(19, before + 15)] * 2, "the threads that a load starts have its priority"
    assert niceness() == before
    assert run_in_thread(niceness) == before
