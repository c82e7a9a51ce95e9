"""The life of a server process: listen, load, serve, drain, end."""

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.errors import EngineDeadError
from vllm_mp.machine.descriptor_limit import raise_descriptor_limit
from vllm_mp.server.app import build_app
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.console import drain_line, say
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.server.http.protocol import ConnectionLimits, LimitedHttpProtocol
from vllm_mp.server.http.shared_state import SharedState
from vllm_mp.server.http.tenants import num_tenants
from vllm_mp.server.watching.health import loading_app
from vllm_mp.server.watching.metrics import metrics_app

logger = logging.getLogger(__name__)

_DEAD_CHECK_S = 1.0
"""Time between two looks whether the core is gone for good; requests hear of it at once."""
_TICK_S = 1.0
"""Time between two updates of the date in the headers of responses."""
_END_GRACE_S = 2.0
"""Time that requests get to send their errors when the server ends."""
_RESERVED_DESCRIPTORS = 256
"""Open files of a server that are no connections of clients."""
_INTERRUPTED = 130

Load = Callable[[], Awaitable[AsyncLLM]]


class ServerProcess:
    """A server from its first to its last moment. It listens while the engine loads, and answers what it can."""

    def __init__(
        self,
        options: ServerOptions,
        tls: ssl.SSLContext | None,
        listener: socket.socket,
        load: Load,
        shared: SharedState | None = None,
        listens_early: bool = True,
        metrics_listener: socket.socket | None = None,
    ) -> None:
        """`load` starts the engine or connects to it; it may be cancelled. `shared`: this is one of several fronts.

        `listens_early` False: clients wait, instead of being refused, until the engine has loaded. `metrics_listener`
        has metrics and probes alone.
        """
        self._listens_early = listens_early
        self._options = options
        self._tls = tls
        self._listener = listener
        self._metrics_listener = metrics_listener
        self._metrics_app: ASGIApp = loading_app()
        self._load = load
        self._shared = shared
        self._app: ASGIApp = loading_app()
        self._end: EngineDeadError | None = None
        self._num_signals = 0
        self._signalled = asyncio.Event()
        """Set by each signal; cleared by its reader."""

    async def run(self, on_listening: Callable[[], None], on_ready: Callable[[AsyncLLM], None]) -> int:
        """Serve until a signal or the end of the core, and return the exit code.

        0: ended or drained after a signal; 130: a second signal cut that short. Raises EngineDeadError if the core is
        gone for good, and what `load` raises.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # Malformed requests are no events for the operator; uvicorn warns of each.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        http = _HttpServer(self._options, self._tls, self._serve)
        metrics_http = _HttpServer(self._options, None, self._serve_metrics)
        engine = None
        try:
            if self._metrics_listener is not None:
                await metrics_http.begin(self._metrics_listener)
            if self._listens_early:
                await http.begin(self._listener)
                on_listening()
            engine = await self._start_engine()
            if engine is None:
                return _INTERRUPTED if self._num_signals > 1 else 0
            limit = self._options.max_live_requests(engine.vllm_config.scheduler_config.max_num_seqs)
            shared = self._shared
            tenants = num_tenants(self._options)
            admission = (
                Admission(limit, num_tenants=tenants)
                if shared is None
                else Admission(limit, shared.live_counts, shared.index, tenants)
            )
            self._app = app = build_app(engine, self._options, admission, self._shared)
            self._metrics_app = metrics_app(app)
            # The objects of the start live as long as the server. Collections that look through them delay streams.
            gc.collect()
            gc.freeze()
            if shared is not None:
                try:
                    engine.stats.share(Path(shared.metrics_folder), f"front-{shared.index}")
                except OSError as error:  # such as a full disk, which must not end the server
                    logger.warning("cannot share the statistics of this server process: %s; free space there", error)
                shared.has_loaded[shared.index] = 1
            if not self._listens_early:
                await http.begin(self._listener)
                on_listening()
            on_ready(engine)
            return await self._serve_until_end(engine, admission)
        finally:
            await http.end(at_once=self._num_signals > 1)
            await metrics_http.end(at_once=True)
            if engine is not None:
                await engine.aclose()

    def end(self, cause: str) -> None:
        """Fail all requests and make `run` raise EngineDeadError, because another process has seen the core's end."""
        self._end = EngineDeadError(cause)
        self._signalled.set()

    async def _start_engine(self) -> AsyncLLM | None:
        """Return the engine once it has loaded; None if a signal came first. A second signal leaves the start alone."""
        loading = asyncio.ensure_future(self._load())
        await self._unless_signalled(loading)
        if loading.done():
            return loading.result()
        self._signalled.clear()
        loading.cancel()  # the start ends what it has begun, which can take as long as one of its parts
        await self._unless_signalled(loading)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        if self._end is not None:
            raise self._end
        return None

    async def _unless_signalled(self, future: asyncio.Future[AsyncLLM]) -> None:
        """Wait for the end of `future`, or for a signal."""
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait((future, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()

    async def _serve_until_end(self, engine: AsyncLLM, admission: Admission) -> int:
        """Serve until a signal, then drain; return the exit code. Raises EngineDeadError if the core dies for good."""
        while not self._signalled.is_set():
            if (error := engine.dead_error) is not None:
                admission.refuse("has no core any more")
                await _wait(admission.wait_until_idle(), _END_GRACE_S)  # the streams raise the same error
                raise error
            await _wait(self._signalled.wait(), _DEAD_CHECK_S)
        if self._end is not None:
            await self._end_all(admission, f"has no core any more: {self._end}")
            raise self._end
        admission.refuse("is shutting down")
        self._signalled.clear()
        say(drain_line(admission.num_live, self._options))
        idle = asyncio.ensure_future(admission.wait_until_idle())
        signalled = asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait((idle, signalled), timeout=self._options.drain_timeout, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not idle.done():
            await self._end_all(admission, "is shutting down")
        if (end := self._end or engine.dead_error) is not None:
            raise end
        return _INTERRUPTED if self._num_signals > 1 else 0

    async def _end_all(self, admission: Admission, reason: str) -> None:
        """End all live requests with an error, and give them time to send it."""
        admission.end_all(reason)
        await _wait(admission.wait_until_idle(), _END_GRACE_S)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._signalled.set()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _serve_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._metrics_app(scope, receive, send)


class _HttpServer(uvicorn.Server):
    """uvicorn's server, which leaves signals to `ServerProcess`."""

    def __init__(self, options: ServerOptions, tls: ssl.SSLContext | None, app: ASGIApp) -> None:
        limits = ConnectionLimits.of(options, max(1, raise_descriptor_limit() - _RESERVED_DESCRIPTORS))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=cast("type[asyncio.Protocol]", functools.partial(LimitedHttpProtocol, limits=limits)),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[("X-Content-Type-Options", "nosniff")],
            timeout_keep_alive=cast("int", options.keep_alive_timeout),
            timeout_graceful_shutdown=int(_END_GRACE_S),
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._is_listening = asyncio.Event()
        self._ends = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def begin(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._serving = asyncio.create_task(self.serve(sockets=[listener]))
        listening = asyncio.ensure_future(self._is_listening.wait())
        await asyncio.wait((self._serving, listening), return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()  # raises why it cannot listen

    async def end(self, at_once: bool) -> None:
        """Close all connections after their responses, or `at_once`; no-op before `begin`."""
        if self._serving is None:
            return
        self.should_exit = True
        self._ends.set()
        if at_once:
            self.force_exit = True
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        """Keep the date of the responses until the end; uvicorn's own loop wakes ten times as often."""
        while not await self.on_tick(0):
            await _wait(self._ends.wait(), _TICK_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._is_listening.set()


async def _wait(awaitable: Awaitable[object], timeout: float) -> None:
    """Wait for `awaitable` up to `timeout` seconds, then cancel it."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(awaitable, timeout)
