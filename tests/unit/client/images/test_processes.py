"""Image processes: what they answer, and what their end costs."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.image_models import TILED, file_of, picture

from vllm_mp.client.images import process_pool
from vllm_mp.client.images.messages import ImageJob, ProcessorSettings
from vllm_mp.client.images.process_pool import ImageProcess, ImageProcessError, ImageProcesses

pytestmark = pytest.mark.extended
SETTINGS = ProcessorSettings("SmolVLMImageProcessorPil", json.dumps(TILED).encode())
JOB = ImageJob(file_of(picture(50, 40)), b"{}")


@pytest.fixture(scope="module")
def processes():
    processes = ImageProcesses(SETTINGS)
    yield processes
    processes.close()


def one(processes, job=JOB):
    """Return the answer to a job that is not shared."""
    return processes.run(job, os.urandom(8), 0)


def run(processes, *jobs):
    async def answers():
        return await asyncio.gather(*[one(processes, job) for job in jobs], return_exceptions=True)

    return asyncio.run(answers())


def test_bad_images_and_options_are_answered_by_name_and_the_process_lives_on(processes):
    [first] = run(processes, JOB)
    assert [array.name for array in first.arrays] == ["pixel_values", "pixel_attention_mask"]
    assert first.arrays[0].shape == [1, 5, 3, 32, 32]
    pids = processes.pids
    unknown, huge, broken, truncated = run(
        processes,
        ImageJob(JOB.data, b'{"crop": true}'),
        ImageJob(JOB.data, b'{"size": {"longest_edge": 100000}}'),
        ImageJob(b"x", b"{}"),
        ImageJob(file_of(picture(50, 40), "JPEG")[:400], b"{}"),
    )
    assert "unexpected keyword argument 'crop'; correct mm_processor_kwargs" in unknown.error
    assert "the limit is 58720256" in huge.error or "too much memory" in huge.error
    assert "no image in the format" in broken.error
    assert "its pixels cannot be decoded: Truncated File Read; save it again" in truncated.error
    assert set(pids) <= set(processes.pids)
    assert run(processes, JOB) == [first]


def test_digest_covers_pixels_and_options(processes):
    same = ImageJob(picture(50, 40).tobytes(), b"{}", 50, 40)
    other = ImageJob(picture(50, 40, seed=1).tobytes(), b"{}", 50, 40)
    unsplit = ImageJob(JOB.data, b'{"do_image_splitting":false}')
    digests = [result.digest for result in run(processes, JOB, same, other, unsplit)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


async def answers_while_processes_are_killed(processes, number):
    """Return the answers to as many jobs as there are processes, while the process of each is killed `number` times."""
    former = set(processes.pids)
    for pid in former:
        os.kill(pid, signal.SIGSTOP)  # so that the job does not end first
    jobs = asyncio.gather(*[one(processes) for _ in former], return_exceptions=True)
    await asyncio.sleep(0)
    while processes._waiting:  # noqa: ASYNC110, one that waits would be processed by the next process
        await asyncio.sleep(0.01)
    terminated, *killed = former
    os.kill(terminated, signal.SIGTERM)
    os.kill(terminated, signal.SIGCONT)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    if number > 1:
        while len(set(processes.pids) - former) < len(former):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for pid in processes.pids:
            os.kill(pid, signal.SIGKILL)
    return await jobs


@pytest.mark.parametrize("number", [1, 2])
def test_killed_process_is_replaced_and_costs_its_image_an_error_only_the_second_time(processes, number, monkeypatch):
    while len(processes.pids) < process_pool._NUM_PROCESSES:
        run(processes, *[JOB] * process_pool._NUM_PROCESSES)
    pids, run_job = processes.pids, ImageProcess.run

    def stop_and_run(process, job):
        os.kill(process.pid, signal.SIGSTOP)
        return run_job(process, job)

    if number > 1:  # the second process must not be done before it is killed
        monkeypatch.setattr(ImageProcess, "run", stop_and_run)
    for answer in asyncio.run(answers_while_processes_are_killed(processes, number)):
        if number == 1:
            assert not answer.error
        else:
            assert isinstance(answer, ImageProcessError)
            assert "SIGKILL" in str(answer)
    monkeypatch.undo()
    [result] = run(processes, JOB)
    assert not result.error
    assert not set(pids) & set(processes.pids)


def test_image_of_a_caller_that_has_left_keeps_neither_memory_nor_a_place(monkeypatch):
    monkeypatch.setattr(process_pool, "_NUM_PROCESSES", 0)
    processes = ImageProcesses(SETTINGS)

    async def leave():
        callers = [asyncio.create_task(one(processes)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(processes._waiting) == 3
        callers[1].cancel()
        await asyncio.wait(callers[1:2])
        assert len(processes._waiting) == 2
        processes.close()
        return await asyncio.gather(*callers, return_exceptions=True)

    assert [type(error) for error in asyncio.run(leave())] == [RuntimeError, asyncio.CancelledError, RuntimeError]


def test_equal_images_at_a_time_are_processed_once_for_each_tenant(monkeypatch):
    monkeypatch.setattr(process_pool, "_NUM_PROCESSES", 0)
    processes, unheard = ImageProcesses(SETTINGS), []

    async def callers_of(*tenants):
        callers = [asyncio.create_task(processes.run(JOB, b"key", tenant)) for tenant in tenants]
        await asyncio.sleep(0)
        return callers

    async def share():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        callers = await callers_of(1, 1, 1, 2)
        assert len(processes._waiting) == 2
        for caller in (callers[0], callers[3]):
            caller.cancel()
        await asyncio.wait([callers[0], callers[3]])
        assert len(processes._waiting) == 1
        future, job = processes._waiting.take()
        assert job == JOB
        future.set_running_or_notify_cancel()
        callers += await callers_of(1)
        future.set_exception(ImageProcessError("it failed"))
        answers = await asyncio.gather(*callers, return_exceptions=True)
        # An answer is kept neither when the job has failed nor when all callers have left.
        (caller,) = await callers_of(1)
        assert len(processes._waiting) == 1
        caller.cancel()
        await asyncio.wait([caller])
        assert not processes._waiting
        assert not processes._shared
        return answers

    cancelled, first, second, other, late = asyncio.run(share())
    assert type(cancelled) is type(other) is asyncio.CancelledError
    assert first is second is late
    assert str(first) == "it failed"
    del cancelled, first, second, other, late
    gc.collect()  # asyncio reports an error that no caller has got when its future is deleted
    assert not unheard


def test_image_that_takes_too_long_ends_its_process():
    process = ImageProcess(SETTINGS)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ImageProcessError, match=r"within 0\.1 s; make it smaller"):
            process.run(JOB, time_limit=0.1)
        with pytest.raises(ImageProcessError, match="SIGKILL"):
            process.run(JOB)
    finally:
        process.close()


def test_processor_that_cannot_be_loaded_is_named():
    with pytest.raises(ImageProcessError, match=r"cannot be loaded: .*nosuch"):
        ImageProcess(ProcessorSettings("NoSuchImageProcessor", b"{}"))


def test_end_of_the_engine_ends_processes_and_jobs(monkeypatch):
    monkeypatch.setattr(process_pool, "_NUM_PROCESSES", 1)
    processes = ImageProcesses(SETTINGS)

    async def closed():
        await one(processes)
        os.kill(processes.pids[0], signal.SIGSTOP)
        jobs = asyncio.gather(one(processes), one(processes), return_exceptions=True)
        await asyncio.sleep(0)
        processes.close()
        return await jobs

    for error in asyncio.run(closed()):
        assert isinstance(error, RuntimeError)
        assert "shut down" in str(error)
    with pytest.raises(RuntimeError, match="shut down"):
        asyncio.run(one(processes))


START_AND_END = """
import subprocess, sys, time, psutil
process = subprocess.Popen([sys.executable, "-m", "vllm_mp.client.images.image_process"], stdout=subprocess.DEVNULL)
while psutil.Process(process.pid).num_threads() == 1:  # it does not watch its parent yet
    time.sleep(0.01)
print(process.pid)
"""


def test_process_whose_standard_input_stays_open_ends_soon_after_its_parent():
    reading, writing = os.pipe()
    try:
        command = [sys.executable, "-c", START_AND_END]
        pid = int(subprocess.run(command, stdin=reading, capture_output=True, text=True, check=True).stdout)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(60)
    finally:
        os.close(reading)
        os.close(writing)
