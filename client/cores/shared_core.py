"""A core that other processes use, kept alive by this process at one address."""

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_mp.client.cores.recovery.news import Death, End
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.cores.sources.handover import Heir, Inheritance, listen_for_heirs
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.config import VllmConfig
from vllm_mp.errors import EngineDeadError

logger = logging.getLogger(__name__)


class SharedCore:
    """A core that is started, watched, and started again at the same address when it dies or hangs."""

    def __init__(
        self,
        config: VllmConfig,
        address: str | None = None,
        key_file: str | None = None,
        operator_key: bytes = b"",
        has_log_files: bool = True,
        on_restart: Callable[[str], None] = lambda kind: None,
        folder: Path | None = None,
        inheritance: Inheritance | None = None,
        *,
        can_be_taken_over: bool = False,
    ) -> None:
        """Hold `address`, by default a Unix socket in the private folder, until `close`.

        TCP needs `key_file`. Clients with `operator_key` are operators; empty: there are none. Without `has_log_files`
        the core writes its log to the standard error of this process. `on_restart` is called with the kind of each
        death once the successor serves. `folder` is as for `CoreLauncher`. With `inheritance` the address and its core
        are taken over from another process, once the model is loaded; with `can_be_taken_over` another process may do
        the same with this one. Raises ValueError, with the remedy, if the address cannot be used.
        """
        self.config = config
        """Completed by the core once it serves."""
        self._limits = config.liveness_config
        self._launcher = CoreLauncher(config, operator_key, has_log_files, folder)
        try:
            if inheritance is None:
                self.address = self._launcher.share(address, key_file)
            else:
                self.address = self._launcher.inherit_from(inheritance, key_file)
        except BaseException:
            if inheritance is not None:
                inheritance.close()
            self._launcher.close(None, None)
            raise
        self.folder = self._launcher.folder
        """The private folder, which exists until `close`."""
        self.end: End | None = None
        """Why the core is gone for good; None while it is not."""
        self._on_restart = on_restart
        self._can_be_taken_over = can_be_taken_over
        self._supervisor: CoreSupervisor | None = None
        self._door: socket.socket | None = None
        """Where other processes ask to take over; None if they may not, or cannot yet."""
        self.taken_by: int | None = None
        """The process that has taken over; None: none has."""
        self._starting: asyncio.Future[Core] | None = None
        self.serves = asyncio.Event()
        """Set once the first core serves."""
        self._is_stopping = threading.Event()
        """The core drains or is being ended."""

    async def keep(self) -> None:
        """Start the core and keep it alive; return after `drain` when it has finished its requests, or after `close`.

        Also return when another process has taken over; `taken_by` is its id then.

        Raises EngineStartError if the first core does not start, and EngineDeadError once it is gone for good.
        """

        def check() -> None:
            if self._is_stopping.is_set():
                raise _Stopping

        def start() -> Core:
            self._launcher.take_over(check)
            self._launcher.begin()
            core = self._launcher.finish(check)
            self._launcher.confirm(core, check)
            return core

        self._starting = call_in_thread(start)
        try:
            core = await asyncio.shield(self._starting)
        except _Stopping:
            return
        self.config = core.config
        self.serves.set()
        limits = self._limits
        restarts = RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None
        supervisor = self._supervisor = CoreSupervisor(self._launcher, core, restarts)
        # A core beats also while it has no work, so it is watched always.
        supervisor.watch(lambda: True)
        if self._is_stopping.is_set():
            supervisor.end_core(signal.SIGINT)
        kind, died_at = "", 0.0
        has_news = asyncio.Event()
        asyncio.get_running_loop().add_reader(supervisor.news_fd, has_news.set)
        while True:
            if self._can_be_taken_over and self._door is None and (door := listen_for_heirs(self.address)):
                self._door = door
                asyncio.get_running_loop().add_reader(door, self._let_in, supervisor)
            with contextlib.suppress(TimeoutError):
                # The process from which this one has taken over may hold the door for a moment.
                await asyncio.wait_for(has_news.wait(), 1.0 if self._can_be_taken_over and not self._door else None)
            has_news.clear()
            for news in supervisor.take_news():
                if isinstance(news, End):
                    if supervisor.taken_by is not None:
                        self.taken_by = supervisor.taken_by
                        return
                    process = supervisor.core.process
                    if self._is_stopping.is_set() and process is not None and process.was_drained:
                        return
                    self.end = news
                    raise EngineDeadError(news.cause)
                if isinstance(news, Death):
                    kind, died_at = news.kind, news.time
                    logger.warning("%s; its successor is being started", news.cause.partition(";")[0])
                elif isinstance(news, Core):
                    supervisor.release(core)
                    core = news
                    seconds = time.monotonic() - died_at
                    logger.warning("core %d serves again after %.1f s", 1 + core.num_restarts, seconds)
                    self._on_restart(kind)

    @property
    def num_requests(self) -> int:
        """Requests that `drain` lets the core finish; a paused or sleeping core keeps back the others."""
        status = None if self._supervisor is None else self._supervisor.status()
        if status is None:
            return 0
        suspension = status.suspension
        if suspension.pause or suspension.sleep.missing:
            return suspension.num_draining
        return status.num_running + status.num_waiting

    def _let_in(self, supervisor: CoreSupervisor) -> None:
        """Offer the core to a process that asks for it."""
        assert self._door is not None
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._door.accept()
            try:
                heir = Heir(connection, *self._launcher.offer(supervisor.core))
            except OSError as error:
                logger.warning("the core goes on: %s", error)
                connection.close()
                return
            if not supervisor.hand_over_to(heir):
                heir.close()
            else:
                logger.info("process %d loads the model to take over", heir.pid)

    def drain(self) -> None:
        """Let the core finish its requests and end; a core that still loads ends at once. `keep` then returns."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """End the core at once, also while it drains or `close` waits for it."""
        self._end(signal.SIGKILL)

    async def close(self) -> None:
        """End the core, free the address and remove all files; call this once, after the end of `keep`."""
        self._is_stopping.set()
        supervisor = self._supervisor
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)
            self._door.close()
        if supervisor is None and self._starting is not None:
            with contextlib.suppress(Exception):
                core = await self._starting
                supervisor = self._supervisor = CoreSupervisor(self._launcher, core, None)
        if supervisor is None:
            self._launcher.close(None, None)
        else:
            asyncio.get_running_loop().remove_reader(supervisor.news_fd)
            await call_in_thread(supervisor.stop)

    def _end(self, number: int) -> None:
        """End the core with a signal, without a successor."""
        self._is_stopping.set()
        if self._supervisor is not None:
            self._supervisor.end_core(number)


class _Stopping(Exception):
    """The core was told to end while it started."""
