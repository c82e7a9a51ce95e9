"""Calls between an event loop and other threads."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_mp.utils.async_utils import cancel_task_threadsafe, in_loop, make_async, run_in_loop


def divide(dividend, divisor=1):
    """Return the quotient, and the thread that computed it."""
    return dividend / divisor, threading.current_thread()


def test_made_async_function_runs_in_a_thread_with_its_arguments():
    async def run():
        return await make_async(divide)(6, divisor=3)

    quotient, thread = asyncio.run(run())
    assert quotient == 2
    assert thread is not threading.current_thread()


def test_made_async_function_runs_in_the_given_executor():
    with ThreadPoolExecutor(1, thread_name_prefix="own") as executor:

        async def run():
            return await make_async(divide, executor)(6)

        assert asyncio.run(run())[1].name.startswith("own")


def test_made_async_function_raises_what_the_function_raises():
    async def run():
        await make_async(divide)(1, 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


def test_made_async_function_keeps_name_and_docstring():
    assert make_async(divide).__name__ == "divide"
    assert make_async(divide).__doc__ == divide.__doc__


def test_in_loop_is_true_only_inside_that_loop():
    other = asyncio.new_event_loop()

    async def run():
        return in_loop(asyncio.get_running_loop()), in_loop(other)

    assert asyncio.run(run()) == (True, False)
    assert not in_loop(other)
    other.close()


def test_call_inside_the_loop_runs_at_once():
    async def run():
        calls = []
        run_in_loop(asyncio.get_running_loop(), calls.append, 1)
        return calls

    assert asyncio.run(run()) == [1]


def test_call_from_another_thread_runs_in_the_loop():
    async def run():
        loop = asyncio.get_running_loop()
        called = loop.create_future()
        call = make_async(run_in_loop)(loop, lambda: called.set_result(threading.current_thread()))
        await call
        return await called

    assert asyncio.run(run()) is threading.current_thread()


def test_call_into_a_closed_loop_does_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    calls = []
    run_in_loop(loop, calls.append, 1)
    assert calls == []


@pytest.mark.parametrize("from_thread", [False, True])
def test_task_is_cancelled_from_any_thread(from_thread):
    async def run():
        task = asyncio.create_task(asyncio.sleep(3600))
        await asyncio.sleep(0)
        if from_thread:
            await make_async(cancel_task_threadsafe)(task)
        else:
            cancel_task_threadsafe(task)
        with pytest.raises(asyncio.CancelledError):
            await task
        cancel_task_threadsafe(task)  # no-op for a task that is done

    asyncio.run(run())


def test_no_task_is_cancelled_if_there_is_none():
    cancel_task_threadsafe(None)
