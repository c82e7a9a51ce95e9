"""The image processes of an engine: started when there are images, replaced if they die, ended with the engine."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import msgspec

from vllm_mp.client.images.messages import HEADER, MAX_FRAME_BYTES, ImageJob, ImageResult, ProcessorSettings
from vllm_mp.client.images.waiting_jobs import WaitingJobs
from vllm_mp.core_link.core_environment import package_path

_NUM_PROCESSES: Final = 2
"""So that a slow image does not hold up all others."""
_TIME_LIMIT_S: Final = 30.0
"""Longest time for one image."""
_START_LIMIT_S: Final = 120.0
"""Longest time for the start of a process, which imports transformers."""
_CHUNK_BYTES: Final = 2**20
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end a process and that no decoder causes."""


class ImageProcessError(ValueError):
    """An image process ended, or took too long, over an image; the message says so."""


class _ImageProcessKilled(ImageProcessError):
    """A signal of another process, or for want of memory, has ended an image process."""


class ImageProcess:
    """A child process that decodes and processes images, for one thread that waits for it."""

    def __init__(self, settings: ProcessorSettings) -> None:
        """Start the process, and return when it can work. Raises ImageProcessError, with the cause, if it cannot."""
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "vllm_mp.client.images.image_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **package_path(), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # an interrupt from the keyboard is for the client
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        try:
            result = self._ask(settings, _START_LIMIT_S)
            if result.error:
                raise ImageProcessError(result.error)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def run(self, job: ImageJob, time_limit: float = _TIME_LIMIT_S) -> ImageResult:
        """Return the answer to a job, within `time_limit` seconds.

        Raises ImageProcessError, and ends the process, if it dies or takes longer.
        """
        try:
            return self._ask(job, time_limit)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the process, if it lives; from any thread."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()

    def close(self) -> None:
        """Kill the process and release its pipes; only the thread that uses it may call this."""
        self.end()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _ask(self, message: ImageJob | ProcessorSettings, time_limit: float) -> ImageResult:
        deadline = time.monotonic() + time_limit
        frame = msgspec.msgpack.encode(message)
        try:
            self._write(HEADER.pack(len(frame)), deadline)
            self._write(frame, deadline)
            (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
            if length > MAX_FRAME_BYTES:
                raise ImageProcessError(f"the process of images sent {length} bytes; send the image again")
            return msgspec.msgpack.decode(self._read(length, deadline), type=ImageResult)
        except TimeoutError:
            raise ImageProcessError(
                f"it was not decoded and processed within {time_limit:g} s; make it smaller, or save it again"
            ) from None
        except (BrokenPipeError, EOFError):
            raise self._end_error() from None

    def _end_error(self) -> ImageProcessError:
        """Return the error that says how the process, whose pipe is closed, has ended."""
        remedy = "make the image smaller, or save it again"
        try:
            code = self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            return ImageProcessError(f"the process that decodes it closed its pipe; {remedy}")
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        kind = _ImageProcessKilled if -code in _FROM_OUTSIDE else ImageProcessError
        return kind(f"the process that decodes it ended {how}; {remedy}")

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                _wait_for(self._stdin, select.POLLOUT, deadline)

    def _read(self, length: int, deadline: float) -> bytearray:
        data = bytearray(length)
        view, position = memoryview(data), 0
        while position < length:
            try:
                count = os.readv(self._stdout, [view[position : position + _CHUNK_BYTES]])
            except BlockingIOError:
                _wait_for(self._stdout, select.POLLIN, deadline)
                continue
            if count == 0:
                raise EOFError
            position += count
        return data


def _wait_for(descriptor: int, event: int, deadline: float) -> None:
    """Return when `event` has come for a pipe, or its end. Raises TimeoutError at the `deadline`."""
    remaining = deadline - time.monotonic()
    poll = select.poll()
    poll.register(descriptor, event)
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise TimeoutError


@dataclass
class _SharedJob:
    """A job for all callers that ask for it until it has ended."""

    future: Future[ImageResult] = field(default_factory=Future)
    num_callers: int = 0


def _note_error(answer: asyncio.Future[ImageResult]) -> None:
    """Tell asyncio that the error of an answer whose caller has left, if there is one, needs no warning."""
    if not answer.cancelled():
        answer.exception()


class ImageProcesses:
    """Runs the image jobs of an engine, each on one of a few processes; tenants take turns.

    A process is started when there is a job and no process is free. One that dies, or takes too long over an image,
    fails this job alone, and is replaced at the next. If a signal `_FROM_OUTSIDE` has ended it, perhaps not because of
    the image, the job has another try.
    """

    def __init__(self, settings: ProcessorSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._waiting = WaitingJobs()
        self._shared: dict[tuple[int, bytes], _SharedJob] = {}
        """The jobs that callers wait for, by tenant and key."""
        self._num_free = 0
        """Threads that wait for a job."""
        self._num_threads = 0
        self._processes: set[ImageProcess] = set()
        self._is_closed = False
        self._owner = os.getpid()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        with self._changed:
            return [process.pid for process in self._processes]

    async def run(self, job: ImageJob, key: bytes, tenant: int) -> ImageResult:
        """Return the answer to a job of a tenant; calls at a time with the same tenant and `key` run one job.

        Equal jobs of different tenants are not shared, because each has the turn of its tenant. Raises
        ImageProcessError if the process died of the job or it took too long, NoRoomError if too many images wait, and
        RuntimeError after `close`.
        """
        with self._changed:
            if self._is_closed or os.getpid() != self._owner:
                raise RuntimeError("the engine was shut down")
            shared = self._shared.get((tenant, key))
            if shared is None:
                shared = _SharedJob()
                self._add(shared.future, job, tenant)
                self._shared[tenant, key] = shared
            shared.num_callers += 1
        try:
            answer = asyncio.wrap_future(shared.future)
            answer.add_done_callback(_note_error)
            await asyncio.wait([answer])  # a caller that is cancelled must not cancel the job of the others
            return answer.result()
        finally:
            with self._changed:
                shared.num_callers -= 1
                if not shared.num_callers:
                    self._waiting.remove(shared.future, tenant)
                    shared.future.cancel()
                is_over = shared.future.done() or not shared.num_callers
                if is_over and self._shared.get((tenant, key)) is shared:
                    del self._shared[tenant, key]

    def close(self) -> None:
        """End the processes; callers that wait get a RuntimeError. Idempotent; from any thread."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._is_closed = True
            futures = self._waiting.clear()
            for process in self._processes:
                process.end()
            self._changed.notify_all()
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the engine was shut down"))

    def _add(self, future: Future[ImageResult], job: ImageJob, tenant: int) -> None:
        """Let a job wait for a process, and start one if it may be needed."""
        self._waiting.add(future, job, tenant)
        if self._num_free < len(self._waiting) and self._num_threads < _NUM_PROCESSES:
            self._num_threads += 1
            threading.Thread(target=self._work, name="vllm-mp-images", daemon=True).start()
        self._changed.notify()

    def _work(self) -> None:
        """Run jobs until `close`, on a process of this thread's own."""
        process: ImageProcess | None = None
        while True:
            with self._changed:
                self._num_free += 1
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                self._num_free -= 1
                if self._is_closed:
                    break
                future, job = self._waiting.take()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                try:
                    process = process or self._start()
                    result = process.run(job)
                except _ImageProcessKilled:
                    self._drop(process)
                    process = None
                    if self._is_closed:
                        raise
                    process = self._start()
                    result = process.run(job)
            except BaseException as error:
                self._drop(process)
                process = None
                future.set_exception(RuntimeError("the engine was shut down") if self._is_closed else error)
            else:
                future.set_result(result)
            del job, future
        self._drop(process)

    def _start(self) -> ImageProcess:
        process = ImageProcess(self._settings)
        with self._changed:
            self._processes.add(process)
            if self._is_closed:  # `close` did not see it
                process.end()
        return process

    def _drop(self, process: ImageProcess | None) -> None:
        """Release a process that has ended, or is not needed any more."""
        if process is not None:
            with self._changed:
                self._processes.discard(process)
            process.close()
