"""Several front processes that share a port and one or several cores, and their parent, which keeps all of them alive.

The parent imports neither torch nor a tokenizer. It holds the listening sockets, so a connection that arrives while a
front process is restarted waits for it.
"""

import asyncio
import contextlib
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from vllm_mp.client.cores.placement import config_of_place
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.shared_core import SharedCore
from vllm_mp.client.stats import RestartCounter
from vllm_mp.config import VllmConfig
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.core_link.core_environment import package_path
from vllm_mp.errors import EngineDeadError, EngineError
from vllm_mp.machine.exit_status import describe_exit
from vllm_mp.server.front.launch import READY_LINE, AllGone, CoreGone, FrontLaunch
from vllm_mp.server.http.console import drain_line, say
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.shared_state import SharedState, make_shared_memory
from vllm_mp.server.http.tenants import new_secret, num_tenants

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 10
"""Restarts of each front process within `_RESTART_WINDOW_S`."""
_RESTART_WINDOW_S = 300.0
_START_RETRY_S = 1.0
"""Time before the next attempt to start a front process for which the system had no room."""
_END_GRACE_S = 10.0
"""Time that front processes get to end beyond the time of the drain."""
_CONNECT_TIMEOUT_S = 30.0
"""Time that a core that the server did not start gets to answer."""
_INTERRUPTED = 130


class FrontProcesses:
    """The parent of the front processes."""

    def __init__(
        self,
        options: ServerOptions,
        engine_args: AsyncEngineArgs,
        listeners: list[socket.socket],
        metrics_listeners: list[socket.socket],
        config: VllmConfig | None,
    ) -> None:
        """`listeners` holds a socket for each front process; `metrics_listeners` too, or is empty.

        `config` is what `engine_args` resolve to; None: the core is at `options.connect`.
        """
        self._options = options
        self._engine_args = engine_args
        self._listeners = listeners
        self._metrics_listeners = metrics_listeners
        num_restarts = RestartCounter()
        size = 0 if config is None else config.parallel_config.data_parallel_size
        self._cores: list[SharedCore] = []
        """The cores of this server; none: they are at `options.connect`."""
        for rank in range(size):
            assert config is not None
            self._cores.append(SharedCore(config_of_place(config, rank), on_restart=num_restarts.add))
        self._client_options = engine_args.client_options()
        if config is not None and not config.model_config.skip_tokenizer_init:
            self._client_options["tokenizer"] = config.model_config.tokenizer
        self._start_timeout_s = _CONNECT_TIMEOUT_S if config is None else config.liveness_config.start_timeout_s
        count = len(listeners)
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        """The running front processes by index."""
        self._not_ready = set(range(count))
        """Indices of the front processes that have not served yet."""
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        """Set once no front process is started again."""
        self._num_signals = 0
        self._signalled = asyncio.Event()
        self._own_folder: Path | None = None
        """A folder that this process removes; None if the core's folder holds the metrics."""
        if not self._cores:
            self._own_folder = Path(tempfile.mkdtemp(prefix="vllm_mp-"))
            self._metrics_folder = str(self._own_folder)
        else:
            folder = self._cores[0].folder / "metrics"
            folder.mkdir(mode=0o700)
            num_restarts.share_as_parent(folder)
            self._metrics_folder = str(folder)
        tenants = num_tenants(options)
        self._memory = make_shared_memory(count, tenants, new_secret(options))
        self._shared = SharedState(self._memory, count, 0, self._metrics_folder, tenants)

    async def run(self, on_ready: Callable[[VllmConfig | None], None]) -> int:
        """Serve until a signal, and return the exit code as `ServerProcess.run` does.

        `on_ready` is called once with the configuration of the first core of this server, or None if it has no core.
        Raises EngineStartError or EngineDeadError if there is no core, and EngineError if a front process dies too
        often.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        fronts = [asyncio.create_task(self._keep_front(index)) for index in range(len(self._listeners))]
        tasks: list[asyncio.Task[object]] = [*fronts, asyncio.create_task(self._tell_when_ready(on_ready))]
        tasks.append(asyncio.create_task(self._signalled.wait()))
        if self._cores:
            tasks.append(asyncio.create_task(self._keep_cores()))
        try:
            while not self._stopping.is_set():
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises the error that ended it
                    tasks.remove(task)
            return await self._drain(fronts, tasks)
        except EngineError as error:
            await self._end_fronts(fronts, error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            for core in self._cores:
                await core.close()
            if self._own_folder is not None:
                shutil.rmtree(self._own_folder, ignore_errors=True)

    async def _keep_cores(self) -> None:
        """Keep all cores alive until they are closed. Raises EngineStartError if one does not start.

        The front processes hear of a core that is gone for good. Raises EngineDeadError once the last one is.
        """
        core_of = {asyncio.create_task(core.keep()): core for core in self._cores}
        keeping = set(core_of)
        try:
            while keeping:
                done, keeping = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    try:
                        task.result()
                    except EngineDeadError as error:
                        if not keeping:
                            raise
                        logger.error("%s; %d of the cores are left", str(error).partition(";")[0], len(keeping))
                        for process in self._processes.values():
                            _send(process, _gone(core_of[task], str(error)))
        finally:
            for task in keeping:
                task.cancel()

    async def _tell_when_ready(self, on_ready: Callable[[VllmConfig | None], None]) -> None:
        await self._all_ready.wait()
        on_ready(self._cores[0].config if self._cores else None)

    async def _keep_front(self, index: int) -> None:
        """Run a front process until the server stops, and start it again when it dies.

        Raises EngineError if it dies too often, or before it has ever served.
        """
        restarts = RestartLimit(_MAX_RESTARTS, _RESTART_WINDOW_S)
        while not self._stopping.is_set():
            try:
                process = await self._start_front(index)
            except OSError as error:  # such as no memory for another process; the other front processes serve on
                if index in self._not_ready:
                    raise EngineError(f"cannot start a front process: {error}; free memory or processes") from error
                logger.warning("cannot start a front process: %s; another attempt follows", error)
                await asyncio.sleep(_START_RETRY_S)
                continue
            assert process.stdout is not None
            is_ready = False
            while line := await process.stdout.readline():
                if line == READY_LINE:
                    is_ready = True
                    self._not_ready.discard(index)
                    if not self._not_ready:
                        self._all_ready.set()
            code = await process.wait()
            del self._processes[index]
            self._shared.forget_live(index)
            if self._stopping.is_set():
                return
            end = f"front process {process.pid} ended with {describe_exit(code)}"
            if index in self._not_ready:
                raise EngineError(f"{end} before it served; its messages say why")
            delay = restarts.delay_after(time.monotonic(), is_ready)
            if delay is None:
                raise EngineError(f"{end}, more than {_MAX_RESTARTS} times within {_RESTART_WINDOW_S:g} s")
            logger.warning("%s; it is started again", end)
            await asyncio.sleep(delay)

    async def _start_front(self, index: int) -> asyncio.subprocess.Process:
        """Start a front process and send it its launch line."""
        listener = self._listeners[index].fileno()
        metrics_listener = self._metrics_listeners[index].fileno() if self._metrics_listeners else None
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "vllm_mp.server.front.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | package_path(),
            pass_fds=[fd for fd in (listener, metrics_listener, self._memory) if fd is not None],
            process_group=0,  # Ctrl-C reaches the parent alone, which then tells the front processes
        )
        self._processes[index] = process
        if not self._cores:
            address, reconnect_timeout = self._options.connect or "", 300.0
        else:
            # The parent knows when the core is gone for good, and tells.
            address, reconnect_timeout = ",".join(core.address for core in self._cores if core.end is None), math.inf
        seed = self._client_options["seed"]
        launch = FrontLaunch(
            options=self._options,
            address=address,
            # Equal requests to several front processes have different answers.
            client_options=self._client_options | {"seed": None if seed is None else seed + index},
            connect_timeout=self._start_timeout_s,
            reconnect_timeout=min(reconnect_timeout, 1e9),
            listener=listener,
            metrics_listener=metrics_listener,
            index=index,
            count=len(self._listeners),
            is_restart=self._all_ready.is_set(),
            memory=self._memory,
            metrics_folder=self._metrics_folder,
        )
        _send(process, launch)
        if self._stopping.is_set():  # the signal came before this process was known
            process.terminate()
        return process

    async def _drain(self, fronts: "list[asyncio.Task[None]]", tasks: "list[asyncio.Task[object]]") -> int:
        """Let the front processes drain, and return the exit code; a second signal stops them at once.

        Raises EngineDeadError if the core ends for good meanwhile.
        """
        say(drain_line(sum(self._shared.live_counts), self._options))
        for listener in (*self._listeners, *self._metrics_listeners):
            listener.close()  # so that no connection waits for a front process that has ended
        num_forwarded = 0
        watched = {task for task in tasks if not task.done()}
        deadline = time.monotonic() + self._options.drain_timeout + _END_GRACE_S
        while (left := [task for task in fronts if not task.done()]) and time.monotonic() < deadline:
            if self._num_signals > num_forwarded:
                self._signal_fronts(signal.SIGTERM)
                num_forwarded += 1
                if num_forwarded > 1:
                    deadline = min(deadline, time.monotonic() + _END_GRACE_S)
                continue
            self._signalled.clear()
            signalled = asyncio.create_task(self._signalled.wait())
            done, _ = await asyncio.wait(
                {*left, *watched, signalled}, timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED
            )
            signalled.cancel()
            watched -= done
            for task in done:
                task.result()
        return _INTERRUPTED if self._num_signals > 1 else 0

    async def _end_fronts(self, fronts: "list[asyncio.Task[None]]", error: EngineError) -> None:
        """Tell the front processes why they end, so that they tell their clients, and wait for their ends."""
        self._stopping.set()
        for process in self._processes.values():
            _send(process, AllGone(str(error)))
        left = [task for task in fronts if not task.done()]
        if left:
            await asyncio.wait(left, timeout=_END_GRACE_S)

    def _signal_fronts(self, number: int) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stopping.set()
        self._signalled.set()


def _gone(core: SharedCore, cause: str) -> CoreGone:
    """Return what the front processes must know of a core that is gone for good."""
    death = None if core.end is None else core.end.death
    return CoreGone(core.address, cause, is_from_outside=death is None or death.is_from_outside)


def _send(process: asyncio.subprocess.Process, message: FrontLaunch | CoreGone | AllGone) -> None:
    """Send a line to a front process; no-op if it has died."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(msgspec.json.encode(message) + b"\n")
