"""The end of an engine: what it holds is released once, by the caller or by a thread beside the event loop."""

import asyncio
import os
import threading
import weakref
from concurrent.futures import Future

from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.prompt_images import PromptImages
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.stat_loggers import StatLoggers
from vllm_mp.client.stats.tracing import RequestTracer


class EngineEnd:
    """Releases the cores, the tokenizer's threads, the image processes, the tracer and the stat loggers of an engine.

    It happens at the latest when the engine is garbage-collected or when the interpreter exits; never in a forked
    child, which holds none of them.
    """

    def __init__(
        self,
        engine: object,
        supervisors: list[CoreSupervisor],
        prompt_tokenizer: PromptTokenizer | None,
        images: PromptImages,
        tracer: RequestTracer | None,
        stat_loggers: StatLoggers,
    ) -> None:
        """`supervisors` may change until the end."""
        self._held = (os.getpid(), supervisors, prompt_tokenizer, images, tracer, stat_loggers)
        self._finalizer = weakref.finalize(engine, _release, *self._held)
        self._outcome: Future[None] = Future()
        self._thread: threading.Thread | None = None
        """The thread in which `begin` releases everything."""

    def run(self, timeout: float | None) -> None:
        """Release everything, each core by force after `timeout` seconds. Call this or `begin`, once."""
        self._finalizer.detach()
        self._run(timeout)
        self._outcome.result()

    def begin(self, timeout: float | None) -> None:
        """Do what `run` does in a thread, for which the interpreter waits when it exits."""
        self._finalizer.detach()
        self._thread = threading.Thread(target=self._run, args=(timeout,), name="engine-end")
        self._thread.start()

    def wait(self) -> None:
        """Block until the thread that `begin` started has ended; no-op without one."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    async def done(self) -> None:
        """Return when everything has been released. Cancelling the call does not end that."""
        await asyncio.shield(asyncio.wrap_future(self._outcome))

    def _run(self, timeout: float | None) -> None:
        try:
            _release(*self._held, timeout)
        except BaseException as error:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(None)


def _release(
    owner: int,
    supervisors: list[CoreSupervisor],
    prompt_tokenizer: PromptTokenizer | None,
    images: PromptImages,
    tracer: RequestTracer | None,
    stat_loggers: StatLoggers,
    timeout: float | None = None,
) -> None:
    """End everything that an engine of the process `owner` holds; no-op in another process."""
    if os.getpid() != owner:
        return
    if prompt_tokenizer is not None:
        prompt_tokenizer.close()
    images.close()
    for supervisor in supervisors:
        supervisor.stop(timeout)
    if tracer is not None:
        tracer.close()
    stat_loggers.close()
