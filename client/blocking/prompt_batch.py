"""Many requests of a blocking caller; a limited number is live at a time."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from vllm_mp.client.blocking.progress_bar import ProgressBar
from vllm_mp.client.threads.loop_thread import LoopThread
from vllm_mp.errors import BatchDeadError, EngineDeadError, NoRoomError
from vllm_mp.outputs import PoolingRequestOutput, RequestFailure, RequestOutput

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
"""Seconds after which a caller that waits looks whether the thread still runs."""

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput)


class BatchRequest(NamedTuple, Generic[Output]):
    """A request that has not begun."""

    prompt_index: int
    """Index of its prompt in the batch."""
    request_id: str
    num_completions: int
    start: Callable[[], AsyncGenerator[Output, None]]
    """Returns the outputs of the request, which begins when the first output is awaited."""


class _Ended(NamedTuple, Generic[Output]):
    """A request that has ended, and its last output."""

    request: BatchRequest[Output]
    output: Output | RequestFailure


class Batch(Generic[Output]):
    """Requests that run in the loop of another thread, for one blocking caller.

    Requests are taken from their iterable, in the caller's thread, while the live ones have fewer than `max_live`
    completions. So the batch needs memory for these and for the outputs, however many requests there are. A request for
    which the core has no room, because of the others, starts again when one of them has ended.
    """

    def __init__(self, thread: LoopThread, max_live: int, bar: ProgressBar, total: int | None) -> None:
        """`total` is the number of requests; None if it is not known."""
        self._thread = thread
        self._total = total
        self._max_live = max_live
        self._bar = bar
        self._tasks: set[asyncio.Task[Output]] = set()
        """The live requests; only the loop's thread uses them."""
        self._ended: SimpleQueue[_Ended[Output]] = SimpleQueue()
        self._num_live = 0
        """Completions of live requests; only the caller's thread uses this and the fields below."""
        self._refused: deque[BatchRequest[Output]] = deque()
        """Requests that there was no room for."""
        self._outputs: dict[int, Output | RequestFailure] = {}
        self._death: EngineDeadError | None = None

    def run(self, requests: Iterable[BatchRequest[Output]]) -> list[Output | RequestFailure]:
        """Run all requests, and return the last output of each by its index; a failed request has a failure there.

        An error of the iterable and an interrupt abort the live requests and are raised. Raises BatchDeadError, with
        the outputs, if the core is gone for good.
        """
        try:
            for request in requests:
                self._launch(request)
                if self._death is not None:
                    break
            while self._num_live or self._refused:
                if self._refused:
                    self._launch(self._refused.popleft())
                else:
                    self._take()
        except BaseException as error:
            if self._thread.close.alive:
                self._thread.run(self._abort())
                raise
            if not isinstance(error, EngineDeadError):
                raise
            self._death = error  # another thread has shut the engine down
            while not self._ended.empty():
                self._take()
        finally:
            self._bar.close()
        return self._result()

    def _launch(self, request: BatchRequest[Output]) -> None:
        """Start a request as soon as few enough are live; it fails if the engine has ended."""
        while self._num_live and self._num_live + request.num_completions > self._max_live:
            self._take()
        if self._death is not None:
            self._outputs[request.prompt_index] = RequestFailure(request.request_id, self._death)
            return
        self._thread.call_soon(self._start, request)
        self._num_live += request.num_completions

    def _take(self) -> None:
        """Wait for the end of a request, and keep its output; return without one if it takes long."""
        try:
            ended = self._ended.get(timeout=_CHECK_INTERVAL_S)
        except Empty:
            self._thread.check()
            return
        self._num_live -= ended.request.num_completions
        if self._num_live and isinstance(ended.output, RequestFailure) and isinstance(ended.output.error, NoRoomError):
            self._max_live = min(self._max_live, self._num_live)
            self._refused.append(ended.request)
            return
        self._outputs[ended.request.prompt_index] = ended.output
        if isinstance(ended.output, RequestFailure) and isinstance(ended.output.error, EngineDeadError):
            self._death = ended.output.error
        self._bar.add(ended.output)

    def _result(self) -> list[Output | RequestFailure]:
        outputs = self._outputs
        if self._death is not None:
            length = max(outputs, default=-1) + 1 if self._total is None else self._total
            missing = RequestFailure("", self._death)
            results = [outputs.get(index, missing) for index in range(length)]
            num_done = sum(not isinstance(output, RequestFailure) for output in results)
            raise BatchDeadError(
                f"{num_done} prompts were finished when the engine ended, and are in `outputs` of this error; the "
                f"others have failed: {self._death}",
                results,
            ) from self._death
        failures = [index for index, output in sorted(outputs.items()) if isinstance(output, RequestFailure)]
        if failures:
            first = outputs[failures[0]]
            assert isinstance(first, RequestFailure)
            logger.warning(
                "%d of %d prompts failed; the first is prompt %d: %s",
                len(failures),
                len(outputs),
                failures[0],
                first.error,
            )
        return [outputs[index] for index in range(len(outputs))]

    def _start(self, request: BatchRequest[Output]) -> None:
        task = asyncio.get_running_loop().create_task(_last_output(request))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._announce(request, task))

    def _announce(self, request: BatchRequest[Output], task: "asyncio.Task[Output]") -> None:
        """Pass the end of a request to the caller's thread."""
        self._tasks.discard(task)
        output: Output | RequestFailure
        if task.cancelled():  # the loop ends, or the caller no longer waits
            output = RequestFailure(request.request_id, EngineDeadError("the engine was shut down"))
        elif isinstance(error := task.exception(), Exception):
            output = RequestFailure(request.request_id, error)
        else:
            output = task.result()
        self._ended.put(_Ended(request, output))

    async def _abort(self) -> None:
        """Abort the live requests; return when the core has been told."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last_output(request: BatchRequest[Output]) -> Output:
    async for output in request.start():
        last = output
    return last
