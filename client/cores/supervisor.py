"""The supervisor: a thread that watches the core, ends it when it hangs, and starts its successor."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import zmq

from vllm_mp import wire
from vllm_mp.client.cores.health import HangWatch, OomKills
from vllm_mp.client.cores.hung_core import end_hung_core
from vllm_mp.client.cores.pings import Pings
from vllm_mp.client.cores.recovery.news import Absence, Death, End, News
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.replacement import Replacement, end_between_steps
from vllm_mp.client.cores.sources.core_source import AwaitedSource, Core
from vllm_mp.client.cores.sources.handover import Heir
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.stats.restart_counter import REPLACED
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import CoreStatus
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.errors import EngineDeadError, EngineStartError

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 1.0
"""Time that a process gets to end after its connection broke, which usually announces the end."""
_BYE_LINGER_MS = 500
"""Time that the last message to a shared core gets to be sent."""
_TEMPLATE_DELAY_S = 2.0
"""Time after a restart before a template is started: the new core first continues the requests of its predecessor."""
_TEMPLATE_RETRY_S = 30.0
"""Time before the next attempt to start a template."""
_PARENT_MARGIN_S = 2.0
"""Time that the parent of a shared core gets to end a core that hangs, before a client gives the core up by itself."""
_MAX_STEPS_IN_FLIGHT = 2
"""A core of one stage that has begun more steps has completed one."""
_MAX_EARLIER_DEATHS = 16
"""Deaths before the latest death for which a client may name a culprit: as many as a search by halves takes."""
_ABSENCE_INTERVAL_S = 0.25
"""Time between two looks at the requests that wait too long for a shared core."""


CoreSource: TypeAlias = CoreLauncher | AwaitedSource


class RestartTimes(NamedTuple):
    """When the parts of a restart were over, in seconds of `time.monotonic()`."""

    seen: float
    """The death was seen."""
    started: float
    """The process of the next core was there, and had its launch line."""
    serves: float
    """The next core had greeted its parent."""


class CoreSupervisor:
    """Watches the core in a thread, so that a busy or blocked event loop delays no restart.

    News for the event loop is queued in order; `news_fd` is readable while the queue is not empty.
    """

    def __init__(self, source: CoreSource, core: Core, restarts: RestartLimit | None) -> None:
        """`core` is the first core of `source`; with `restarts` None, `source` starts no successor.

        Watching begins with `watch`.
        """
        self.core = core
        """The latest core."""
        self.end: str | None = None
        """Why the core is gone for good; None while it is not."""
        self.last_restart: RestartTimes | None = None
        """The latest restart by this process; None before."""
        self._source = source
        self._limits = core.config.liveness_config
        self._restarts = restarts
        self._news: deque[News] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self.news_fd = self._reader
        self._wake_reader, self._wake_writer = os.pipe()
        self._owner = os.getpid()
        self._stops = threading.Event()
        self._is_closed = False
        self._connections = [core.connection]
        """The open connections: to the latest core, and to its predecessors until `release`."""
        self._oom_kills = OomKills()
        self._has_work: Callable[[], bool] = lambda: False
        self._pings: Pings | None = None
        self._previous_death = 0.0
        self._cores_work = True
        """A core has completed a step since deaths were last forgiven; else the limit of restarts ends the engine."""
        self._end_signal: int | None = None
        """The signal with which this process ends the core, which gets no successor then."""
        self._told_end: tuple[str, bool] | None = None
        """What `give_up` was told; None before."""
        self._end_lock = threading.Lock()
        """Held while `core` or `_end_signal` is set, so that a core that has just started gets the signal too."""
        self._replacement: Replacement | None = None
        """None if this process does not start the cores."""
        if isinstance(source, CoreLauncher):
            self._replacement = Replacement(source, self._limits)
        self._thread = threading.Thread(target=self._run, name="core-supervisor", daemon=True)

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the core by its parent, which for a core of this process is this process."""
        return self.core.num_restarts

    def watch(self, has_work: Callable[[], bool], pings: Pings | None = None) -> None:
        """Start the thread. `has_work` is called in it, and returns whether this client waits for the core.

        `pings` tell whether a shared core hangs whose status page is not visible.
        """
        self._has_work, self._pings = has_work, pings
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """`take_news` would return something."""
        return bool(self._news)

    def take_news(self) -> list[News]:
        """Return the news since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def forgive(self, times: Collection[float]) -> None:
        """Count no longer the deaths seen at `times` against the limit of restarts, because their cause is gone."""
        if self._restarts is not None:
            self._restarts.forgive(times)

    def release(self, core: Core) -> None:
        """Close the connection of a core that has been replaced."""
        self._connections.remove(core.connection)
        core.connection.close()

    def status(self) -> CoreStatus | None:
        """Return a reading of the latest core's status page; None if it is not visible."""
        page = self.core.page  # read once: the core may be replaced in another thread
        return page.read() if page else None

    @property
    def standby_pid(self) -> int | None:
        """The process id of the standby; None if there is none."""
        return self._source.standby_pid

    @property
    def node(self) -> str | None:
        """The node of a Ray cluster on which the core runs, and what it has reserved there; None without Ray."""
        return self._source.node

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """Note a call that the core has carried out, for a core elsewhere that must have the same state."""
        self._source.note_call(name, args)

    def end_core(self, number: int) -> None:
        """Send the core of this process a signal that ends it; it gets no successor, and `End` follows."""
        with self._end_lock:
            self._end_signal, process = number, self.core.process
        if process is not None:
            process.send_signal(number)

    def replace_core(self) -> "Future[None]":
        """Let a new process take over from the core once it has loaded the model; from any thread.

        The result says that the new core serves; see `Replacement.ask`. Raises ValueError, with the remedy, if this
        process does not start the cores, or may not restart them, and if the core is on several machines.
        """
        if self._replacement is None:
            address = self.core.connection.address
            raise ValueError(f"this process has not started the core at {address}: replace it where it was started")
        if self._restarts is None:
            raise ValueError("recovery=False: a core that is replaced needs recovery; leave the option out")
        if (num_nodes := self.core.config.parallel_config.nnodes) > 1:
            raise ValueError(
                f"nnodes={num_nodes}: the other machines serve one core at a time, and no other can load beside it; "
                "shut the engine down and start it again"
            )
        return self._replacement.ask()

    def hand_over_to(self, heir: Heir) -> bool:
        """Let another process take over the core, and all that follows; return False if that is not possible now."""
        return self._replacement is not None and self._restarts is not None and self._replacement.hand_over_to(heir)

    @property
    def taken_by(self) -> int | None:
        """The process id of the process that has taken over; None: none has. `End` says so too."""
        return None if self._replacement is None else self._replacement.taken_by

    def give_up(self, cause: str, is_from_outside: bool) -> None:
        """Wait for no further core at the address of a shared core, because its parent says that it is gone for good.

        `cause` and `is_from_outside`, as in `Death`, are what the parent knows. `End` follows the death.
        """
        self._told_end = cause, is_from_outside

    def stop(self, timeout: float | None = None) -> None:
        """End the thread, every connection and every process of the source, by force after `timeout` seconds.

        Idempotent, no-op in a forked child. A shared core is told that this client leaves.
        """
        if self._is_closed or os.getpid() != self._owner:
            return  # a forked child has neither the thread nor the core
        self._is_closed = True
        self._stops.set()
        os.write(self._wake_writer, b"\0")
        # The garbage collector may call this in the thread itself, which then ends on return.
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        if self.core.process is None:
            with contextlib.suppress(Exception):
                self.core.connection.send(wire.Bye(self.core.connection.incarnation))
        for connection in self._connections:
            connection.close(0 if self.core.process else _BYE_LINGER_MS)
        self._source.close(timeout, self.core)
        self._end_replacement(EngineDeadError("the engine has been shut down"), for_good=True)
        for descriptor in (self._reader, self._writer, self._wake_reader, self._wake_writer):
            os.close(descriptor)

    def _run(self) -> None:
        """Watch each core until its death and replace it, until told to stop or no successor can start."""
        try:
            core: Core | None = self.core
            while core is not None:
                death = self._watch(core)
                if death is None:
                    return
                core = self._replace(core, death)
        except Exception as error:  # a defect here must not let streams wait for ever
            if not self._stops.is_set():
                logger.exception("the supervisor failed")
                self._tell(End(f"the supervisor of the core failed: {error!r}"))

    def _tell(self, news: News) -> None:
        """Queue `news` for the event loop and wake it."""
        if isinstance(news, End):
            self.end = news.cause
            self._end_replacement(EngineDeadError(news.cause), for_good=True)
        elif isinstance(news, Core):
            self._connections.append(news.connection)
            with self._end_lock:
                self.core, number = news, self._end_signal
            if number is not None and news.process is not None:
                news.process.send_signal(number)
        self._news.append(news)
        with contextlib.suppress(BlockingIOError):  # the pipe is full: the loop has unread news anyway
            os.write(self._writer, b"\0")

    def _watch(self, core: Core) -> Death | None:
        """Wait for the death of `core`, ending it if it hangs; return None when told to stop."""
        process = core.process
        if process is None:
            return self._watch_shared(core)
        limits = self._limits
        hang = HangWatch(limits.engine_iteration_timeout_s, process.pid, limits.start_timeout_s)
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(core.connection.monitor, zmq.POLLIN)
        poller.register(process.pid_fd, zmq.POLLIN)
        broken_since: float | None = None
        template_at = time.monotonic() + (_TEMPLATE_DELAY_S if self.num_restarts else 0.0)
        while True:
            poller.poll(int(1000 * hang.interval_s))
            if self._stops.is_set():
                return None
            if not process.is_alive():
                return self._death(core, process.describe_end(), "signal" if process.ended_by_signal else "exit")
            self._oom_kills.look(process.pid)
            if core.connection.is_broken():
                broken_since = broken_since or time.monotonic()
                poller.unregister(core.connection.monitor)
            if broken_since and time.monotonic() > broken_since + _EXIT_GRACE_S:
                process.kill()
                return self._death(core, f"the connection to it broke, and {process.describe_end()}", "connection")
            if core.page is not None and hang.is_hung(core.page, self._has_work()):
                cause, was_stopped = end_hung_core(process, core.page, hang.exceeded)
                return self._death(core, cause, "hang", was_hung=not was_stopped)
            if self._replacement is not None and self._replacement.is_asked_for:
                if self._replacement.is_ready(core):
                    return self._end_replaced(core)
            elif time.monotonic() > template_at:
                try:
                    self._source.prepare_template()
                except OSError as error:  # such as no memory for another process; the core does not need a template
                    logger.warning("cannot start a template process: %s", error)
                    template_at = time.monotonic() + _TEMPLATE_RETRY_S

    def _end_replaced(self, core: Core) -> Death:
        """End `core`, from which another process takes over, and return its death."""
        assert core.process is not None
        assert isinstance(self._source, CoreLauncher)
        leaves_memory = self._source.is_outlived_by_cache(core)
        if end_between_steps(core, self._limits.engine_iteration_timeout_s, leaves_memory):
            return self._death(core, f"the core process {core.process.pid} is replaced", REPLACED)
        return self._death(core, core.process.describe_end(), "signal" if core.process.ended_by_signal else "exit")

    def _end_replacement(self, error: Exception | None, *, for_good: bool = False) -> None:
        if self._replacement is not None:
            self._replacement.end(error, for_good=for_good)

    def _watch_shared(self, core: Core) -> Death | None:
        """Wait until the connection to a shared core breaks or the core hangs; return None when told to stop."""
        limits, address = self._limits, core.connection.address
        limit_s = limits.engine_iteration_timeout_s + _PARENT_MARGIN_S
        hang = HangWatch(limit_s, None, limits.start_timeout_s + _PARENT_MARGIN_S)
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(core.connection.monitor, zmq.POLLIN)
        if self._pings is not None:
            self._pings.reset()
        while True:
            poller.poll(int(1000 * hang.interval_s))
            if self._stops.is_set():
                return None
            if core.connection.is_broken():
                return self._death(core, f"the connection to the core at {address} broke", "connection")
            has_work = self._has_work()
            if core.page is not None:
                if hang.is_hung(core.page, has_work):
                    cause = f"the core at {address} made no progress for {limit_s:g} s: {core.page.read()}"
                    return self._death(core, cause, "hang")
            elif self._pings is not None:
                silent_s = self._pings.look(core.connection.loop, has_work) * hang.interval_s
                if silent_s > limit_s:
                    return self._death(core, f"the core at {address} has not answered for {limit_s:g} s", "hang")

    def _death(self, core: Core, cause: str, kind: str, was_hung: bool = False) -> Death:
        """Return the death of `core`, with what its status page says. `was_hung`: it was killed for a hang."""
        if core.page is not None and core.process is not None and not core.process.is_alive():
            core.page.note_end_of_writer()
        status = core.page.read() if core.page else None
        in_step, calls = (status.requests, status.calls) if status else ([], [])
        lacked_memory = self._oom_kills.note_death()
        outside_signal = status.outside_signal if status is not None and kind in ("signal", "exit") else 0
        was_killed = core.process is not None and core.process.was_killed and not was_hung
        was_killed |= outside_signal == signal.SIGKILL  # another rank of the core, which then ends by itself
        if was_killed and lacked_memory:
            cause = f"{cause}\n(the system was out of memory at that time and killed a process)"
            was_killed, kind = False, "out_of_memory"
        own = {slot: progress for client, slot, progress in in_step if client == core.client}
        was_told_to_stop = core.process is not None and core.process.was_told_to_stop
        was_sent = outside_signal not in (0, signal.SIGKILL)
        is_from_outside = was_killed or core.process is None or was_told_to_stop or was_sent or kind == REPLACED
        return Death(
            cause,
            own,
            len(in_step) + len(calls),
            is_from_outside,
            kind,
            time.monotonic(),
            is_step_known=status is not None,
            incarnation=core.connection.incarnation,
            calls=tuple(call_id for client, call_id in calls if client == core.client),
        )

    def _replace(self, core: Core, death: Death) -> Core | None:
        """Start the successor of `core`; return None if there is none."""
        if not isinstance(self._source, CoreLauncher):
            return self._rejoin(self._source, death)
        if core.page is not None and self._restarts is not None:
            self._forgive_convicted(core.page, core.config.parallel_config.pipeline_parallel_size, self._restarts)
        is_replaced = death.kind == REPLACED and self._end_signal is None
        delay = 0.0 if is_replaced else self._delay_or_end(death.cause, death.time, core)
        if isinstance(delay, End):
            self._tell(End(delay.cause, death._replace(num_restarts_left=-1)))
        else:
            assert self._restarts is not None
            self._tell(death._replace(num_restarts_left=self._restarts.num_left))
        # This takes time, so the news comes first: other cores go on with the streams.
        self._source.predecessor = self._predecessor(self._source, core, death)
        if core.process is not None:
            self._source.discard(core.process)
        if is_replaced and self._replacement is not None and self._replacement.is_handed_over():
            self._tell(End(f"process {self.taken_by} has taken over"))
            return None
        cause = death.cause
        while not isinstance(delay, End):
            if self._stops.wait(delay):
                return None
            try:
                self._source.begin()
                started = time.monotonic()
                successor = self._source.finish(self._raise_if_stopped)
            except _Stopped:
                if self._stops.is_set():
                    return None
            except (EngineStartError, OSError, ValueError, zmq.ZMQError) as error:
                logger.warning("%s", str(error).partition(";")[0])
                cause = str(error)
                # Where no process could start, the model is not at fault, and short of descriptors not even readable.
                was_started = not isinstance(error, OSError | zmq.ZMQError)
                if was_started and (lasting := self._source.lasting_error(cause)) is not None:
                    self._tell(End(f"{death.cause}, and {lasting}"))
                    return None
            else:
                self.last_restart = RestartTimes(death.time, started, time.monotonic())
                self._tell(successor)
                self._source.clear_up()
                self._end_replacement(None)
                return successor
            delay = self._delay_or_end(cause, time.monotonic(), None)
            if isinstance(delay, End):
                self._tell(delay)
        return None

    def _delay_or_end(self, cause: str, died_at: float, served: Core | None) -> float | End:
        """Return the seconds to wait before the next core is started, or why there is none.

        `served` is the core that died at `died_at` of `cause`; None: a core that has not served.
        """
        if self._restarts is None or self._end_signal is not None:
            return End(cause)
        incarnation = 0 if served is None else served.connection.incarnation
        delay = self._restarts.delay_after(died_at, served is not None, incarnation)
        if delay is not None:
            return delay
        limits = self._limits
        return End(
            f"the core has died more than max_core_restarts={limits.max_core_restarts} times within "
            f"core_restart_window_s={limits.core_restart_window_s:g}; the last time, {cause}"
        )

    def _forgive_convicted(self, page: StatusPage, num_stages: int, restarts: RestartLimit) -> None:
        """Forgive the deaths for which clients have found a culprit, unless no core computes anything any more.

        `page` is that of a shared core of `num_stages` which has died.
        """
        self._cores_work = self._cores_work or page.read().step > max(_MAX_STEPS_IN_FLIGHT, num_stages)
        if self._cores_work and restarts.forgive_cores(page.convicted()):
            self._cores_work = False

    def _predecessor(self, source: CoreLauncher, core: Core, death: Death) -> Predecessor:
        """Return what the successor of `core` must be told of its death."""
        status = core.page.read() if core.page else None
        in_step, calls = (status.requests, status.calls) if status else ([], [])
        tokens = core.page.tokens() if core.page else {}
        former = source.predecessor
        is_recent = death.time < self._previous_death + self._limits.core_restart_window_s
        self._previous_death = death.time
        earlier = former.suspects() if former is not None and is_recent else {}
        earlier_clients = former.clients if former is not None and is_recent else []
        earlier_deaths = former.deaths[:_MAX_EARLIER_DEATHS] if former is not None and is_recent else []
        return Predecessor(
            incarnation=core.connection.incarnation,
            cause=death.cause,
            kind=death.kind,
            is_from_outside=death.is_from_outside,
            in_step=[(tokens.get(client, b""), slot, progress) for client, slot, progress in in_step],
            in_earlier_steps=[(token, slot, progress) for (token, slot), progress in earlier.items()],
            num_restarts=core.num_restarts + 1,
            clients=[*dict.fromkeys(filter(None, [*tokens.values(), *earlier_clients]))][: wire.MAX_CLIENTS],
            earlier_deaths=earlier_deaths,
            calls=[(tokens.get(client, b""), call_id) for client, call_id in calls],
            model=core.digest,
        )

    def _rejoin(self, source: AwaitedSource, death: Death) -> Core | None:
        """Wait for the next core that another process starts, for as long as it takes.

        Return None when told to stop or to give up, or if there will be none that serves the model.
        """
        self._tell(death)
        next_report = death.time + source.reconnect_timeout
        progress: object = None

        def look() -> None:
            nonlocal next_report, progress
            self._raise_if_stopped()
            last, progress = progress, source.load_progress()
            if progress not in (None, last):
                next_report = time.monotonic() + source.reconnect_timeout
            if time.monotonic() >= next_report:
                if not self._news:  # else no event loop takes news, and reports must not pile up
                    cause = f"{death.cause}, and {source.trouble} for {source.reconnect_timeout:g} s"
                    self._tell(Absence(cause, source.reconnect_timeout))
                next_report = time.monotonic() + _ABSENCE_INTERVAL_S

        try:
            successor = source.finish(look)
        except _Stopped:
            if self._told_end is not None:
                cause, is_from_outside = self._told_end
                known = death._replace(cause=cause, is_from_outside=is_from_outside, num_restarts_left=-1)
                self._tell(End(cause, known))
            return None
        except EngineStartError as error:
            self._tell(End(f"{death.cause}, and {error}"))
            return None
        self._tell(successor)
        return successor

    def _raise_if_stopped(self) -> None:
        if self._stops.is_set() or self._end_signal is not None or self._told_end is not None:
            raise _Stopped


class _Stopped(Exception):
    """The supervisor was told to stop, or to start no successor, while a core started."""
