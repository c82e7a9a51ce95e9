"""The supervisor of a core and the connection to it as a client sees them, without a process or a socket.

`tests/unit/client/test_stand_in_core.py` compares the methods with those of the real classes.
"""

import asyncio
import contextlib
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.pings import Pings
from vllm_mp.client.cores.recovery.news import News
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_status import CoreStatus

_CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(num_blocks=1000, block_size=16, enable_prefix_caching=True),
    parallel_config=SimpleNamespace(data_parallel_size=1),
    model_config=SimpleNamespace(dtype="float32", quantization=None, max_model_len=1000),
)


class StandInConnection:
    """Stands in for `CoreConnection`: its supervisor keeps what is sent, and says how calls are answered."""

    num_dropped: int = 0

    def __init__(self, supervisor: "StandInSupervisor", incarnation: int) -> None:
        self.incarnation = incarnation
        self.was_paused = supervisor.is_paused
        self.model = supervisor.model
        self.loop: asyncio.AbstractEventLoop | None = None
        """The running loop when the connection was attached; None also if there was none."""
        self._supervisor = supervisor

    def is_attached(self) -> bool:
        return asyncio.get_running_loop() is self.loop

    def attach(
        self,
        on_message: Callable[[wire.CoreMessage], None],
        news_fd: int,
        on_news: Callable[[], None],
    ) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop = asyncio.get_running_loop()
        self._supervisor.on_message = on_message

    def send(self, message: wire.ClientMessage) -> None:
        self._supervisor.sent.append(message)
        if isinstance(message, wire.Call) and (answer := self._supervisor.answers.get(message.name)) is not None:
            assert self.loop is not None
            reply = wire.Reply(self.incarnation, message.call_id, **answer)
            self.loop.call_soon(self._supervisor.on_message, reply)

    def detach(self) -> None:
        self.loop = None


class StandInSupervisor:
    """Stands in for `CoreSupervisor`: a test lets its core die, and starts the next one."""

    news_fd: int = -1
    end: str | None = None
    has_news: bool = False

    def __init__(self, is_shared: bool = False, client: int = 0) -> None:
        """`client` is the number that the core gives this client."""
        self.is_shared, self.client_number = is_shared, client
        self.is_paused = False
        """Whether the next core is in a pause when it greets the client."""
        self.model = wire.NO_DIGEST
        """What the next core has loaded."""
        self.num_deaths = 0
        self.sent: list[wire.ClientMessage] = []
        """The messages to all cores, in their order."""
        self.answers: dict[str, dict[str, Any]] = {}
        """By name of a call: the fields of the reply, which arrives at once. Other calls get none."""
        self.forgiven: list[float] = []
        self.on_message: Callable[[wire.CoreMessage], None] = lambda message: None
        self.core = self.start()

    def start(self, last_death: wire.LastDeath | None = None) -> Core:
        """Return the core that serves after `num_deaths` deaths."""
        return self.core_of(wire.welcome(self.num_deaths, self.client_number, 1, b"{}", last_death, model=self.model))

    def core_of(self, welcome: wire.Welcome) -> Core:
        """Return a core that greets the client with `welcome`."""
        return Core(
            connection=cast("CoreConnection", StandInConnection(self, welcome.incarnation)),
            client=self.client_number,
            config=cast("VllmConfig", _CONFIG),
            page=None,
            process=None if self.is_shared else cast("CoreProcess", object()),
            welcome=welcome,
        )

    def watch(self, has_work: Callable[[], bool], pings: Pings | None = None) -> None:
        pass

    def take_news(self) -> list[News]:
        return []

    def forgive(self, times: Collection[float]) -> None:
        self.forgiven += times

    def release(self, core: Core) -> None:
        pass

    def status(self) -> CoreStatus | None:
        return None

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        pass
