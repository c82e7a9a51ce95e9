"""The sources of a client's cores: its own processes, or a shared core at an address.

A third source, nodes of a Ray cluster, is in `client/ray/ray_core.py`.
"""

import contextlib
import logging
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import zmq

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection, is_engine_running
from vllm_mp.client.cores.health import HangWatch
from vllm_mp.client.cores.held_address import HeldAddress
from vllm_mp.client.cores.process import CoreProcess
from vllm_mp.client.cores.socket_owner import check_socket_file
from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import is_missing_node, prepare_node_0
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import NOT_SUSPENDED, CoreState, TriedConstraint
from vllm_mp.core_link.status_page import MAX_TRIED, StatusPage
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.operator_key import new_operator_key
from vllm_mp.machine.file_owner import trusted_owners, user_id
from vllm_mp.model_store.gguf import gguf_place
from vllm_mp.requests.lora_request import AdapterRecord

if TYPE_CHECKING:
    from vllm_mp.client.ray import RayCore

logger = logging.getLogger(__name__)


class Core(NamedTuple):
    """A core that serves."""

    connection: CoreConnection
    client: int
    """The core's number for this client."""
    config: VllmConfig
    """The configuration as the core has completed it."""
    page: StatusPage | None
    """The core's status page; None if this process cannot see it, as over TCP."""
    process: CoreProcess | None
    """The core's process; None for the core of another process."""
    welcome: wire.Welcome

    @property
    def num_restarts(self) -> int:
        """Number of restarts by the core's parent before this core served."""
        death = self.welcome.last_death
        return 0 if death is None else death.num_restarts

    @property
    def last_cause(self) -> str | None:
        """Why the predecessor died; None for the first core of the parent."""
        death = self.welcome.last_death
        return None if death is None else death.cause


_RETRY_S = 0.2
"""Pause before the next attempt to reach a shared core; it doubles for each further attempt."""
_LONGEST_RETRY_S = 3.0
_LOOK_S = 0.05
"""Pause before the next look for the socket of a shared core."""

Check = Callable[[], None]
"""Called repeatedly while a core starts; raises when the wait must end."""


class CoreLauncher:
    """Starts cores as processes of this client, with their files in one private folder, which `close` removes."""

    node = None
    """Only a core on Ray has a node."""

    def __init__(
        self,
        config: VllmConfig,
        operator_key: bytes | None = None,
        has_log_files: bool = True,
        folder: Path | None = None,
    ) -> None:
        """Clients with `operator_key` are operators of the cores; None: only this process is, empty: there are none.

        Without `has_log_files` the cores write their logs to the standard error of this process. `folder` is a result
        of `make_folder`; None: another one. Raises ValueError if the ranks are on several machines, and the core is not
        on this one or no keys can be made.
        """
        if config.parallel_config.nnodes > 1 and config.parallel_config.data_parallel_backend != "ray":
            logger.info("the core needs its other machines: %s", prepare_node_0(config))
        self._config = config
        self._has_log_files = has_log_files
        self._limits = config.liveness_config
        self._owner = os.getpid()
        self.folder = folder or make_folder()
        self._public: HeldAddress | None = None
        self._first_incarnation = 1
        self._num_started = 0
        self.predecessor: Predecessor | None = None
        """The latest core that has served, if it died; the next core is told of it."""
        self._operator_key = new_operator_key() if operator_key is None else operator_key
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._suspension = NOT_SUSPENDED
        """The pause and the sleep that the next core must enter."""
        self._adapters: list[AdapterRecord] | None = None
        """The LoRA adapters that the next core must know; None before a core has known any."""
        self._tried: dict[TriedConstraint, None] = {}
        """The constraints that the next core compiles without a trial, the earliest first."""
        self._process: CoreProcess | None = None
        self._connection: CoreConnection | None = None
        self._standby: CoreProcess | None = None

    @property
    def standby_pid(self) -> int | None:
        """The process id of the standby; None if there is none."""
        return self._standby.pid if self._standby is not None else None

    def share(self, address: str | None, key_file: str | None) -> str:
        """Let other clients connect to all cores at `address`, by default in the private folder; return the address.

        Call this before the first core starts. Raises ValueError as `HeldAddress` does.
        """
        self._public = HeldAddress(address or f"ipc://{self.folder}/core.sock", key_file)
        # Clients may know a core of another parent at the address.
        self._first_incarnation = int(1000 * time.time())
        return self._public.address

    def begin(self) -> None:
        """Start a core, or make the standby the core; `finish` waits for it.

        Raises OSError if no process can start, and ValueError if the cores' address was taken away.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        if self._public is not None and self._public.restore() and self._standby is not None:
            self._standby.stop()  # it has inherited the socket that was removed
        self._num_started += 1
        self._process, self._standby = self._standby, None
        if self._process is not None and not self._process.is_alive():
            self._process.stop()
            self._process = None
        if self._process is None:
            self._process = self._start(standby=False)
        self._process.launch(
            self._config,
            self._operator_key,
            self._num_started,
            self._suspension,
            self.predecessor,
            self._adapters,
            list(self._tried),
        )
        self._connection = CoreConnection(self._process.address, None, self._operator_key, self._token)

    def finish(self, check: Check) -> Core:
        """Wait until the core that `begin` started serves.

        Raises EngineStartError, with the cause, if it does not start, and what `check` raises. In both cases the core
        is ended, and of its files only the log is left.
        """
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        hang = HangWatch(self._limits.engine_iteration_timeout_s, process.pid)

        def look() -> None:
            check()
            if not process.is_alive():
                raise EngineStartError(f"the engine did not start: {process.describe_end(log_stays=False)}")
            if hang.is_stopped_for_too_long():
                raise EngineStartError(
                    f"the engine did not start: a signal stopped its process {process.pid}; start it again"
                )

        try:
            timeout = self._limits.start_timeout_s
            welcome, config = connection.greet(timeout, look, lambda: _load_progress(process.status_page()))
        except BaseException as error:
            if isinstance(error, EngineStartError) and (core := self._core_that_served(process, connection)):
                self._process = self._connection = None
                return core
            connection.close()
            process.kill()
            self.discard(process)
            raise
        self._process = self._connection = None
        if self._public is not None:
            connection.send(wire.Bye(welcome.incarnation))  # the parent of a shared core is no client
        return Core(connection, welcome.client, config, process.status_page(), process, welcome)

    def _core_that_served(self, process: CoreProcess, connection: CoreConnection) -> Core | None:
        """Return a shared core that died before it greeted its parent, but when clients could find it; else None.

        Its successor must know what it was computing for them.
        """
        page = None if self._public is None or process.is_alive() else process.status_page()
        if page is None:
            return None
        if page.read().state not in (CoreState.IDLE, CoreState.STEPPING):
            return None
        connection.incarnation = process.incarnation
        last_death = None if self.predecessor is None else self.predecessor.last_death(b"")
        welcome = wire.welcome(process.incarnation, -1, process.pid, b"", last_death)
        return Core(connection, -1, self._config, page, process, welcome)

    def prepare_standby(self) -> None:
        """Start a standby, if `warm_standby` is set and none is alive. Raises OSError if no process can start."""
        if self._limits.warm_standby and (self._standby is None or not self._standby.is_alive()):
            if self._standby is not None:
                self._standby.stop()
            self._standby = self._start(standby=True)

    def _start(self, standby: bool) -> CoreProcess:
        """Start the process of the next core. Raises OSError if the system cannot."""
        incarnation = self._first_incarnation + self._num_started - (not standby)
        return CoreProcess(self.folder, incarnation, standby, self._public, self._has_log_files)

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """No-op: the status page says what the next core must know."""

    def lasting_error(self, error: str) -> str | None:
        """Return why no further core can serve, after a core did not start because of `error`; None if one may.

        The model's GGUF file is missing, changed or damaged, or a machine has not come back in time.
        """
        try:
            place = gguf_place(self._config.model_config.folder)
            if place is not None:
                place.read()
        except ValueError as model_error:
            return f"no further core can load the model: {model_error}"
        return f"the next core cannot start: {error}" if is_missing_node(error) else None

    def inherit(self, page: StatusPage) -> None:
        """Let the first core enter the pause and the sleep of the core of `page`, and know the same adapters."""
        self._suspension = page.read().suspension._replace(num_draining=0)
        self._adapters = page.adapters()

    def discard(self, process: CoreProcess) -> None:
        """Remove the files of a core that has ended, except its log; also remove the logs of its predecessors.

        The next core will enter the pause and the sleep that were in force, and know the same adapters and tried
        constraints.
        """
        process.stop()
        page = process.status_page()
        if page is not None:
            suspension = page.read().suspension
            if suspension.generation >= self._suspension.generation:  # else the core died before it had entered any
                self._suspension = suspension
            adapters = page.adapters()
            if adapters is not None:
                self._adapters = adapters
            tried = [*self._tried, *page.tried()]
            self._tried = dict.fromkeys(tried[-MAX_TRIED:])
        process.remove_files()
        for log in self.folder.glob("core-*.log"):
            number = int(log.stem.removeprefix("core-"))
            if number < process.incarnation:
                with contextlib.suppress(OSError):
                    log.unlink()

    def close(self, timeout: float | None, core: Core | None) -> None:
        """End `core`, a core that starts and the standby, by force after `timeout` seconds; remove the folder."""
        if os.getpid() != self._owner:
            return
        if self._connection is not None:
            self._connection.close()
        for process in (self._process, self._standby, core and core.process):
            if process is not None:
                process.stop(timeout)
                process.remove_files()
        if self._public is not None:
            self._public.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteCore:
    """The shared core at an address, and after its death the next core there that serves the same model."""

    node = None
    """Only a core on Ray has a node."""

    def __init__(
        self,
        address: str,
        key_file: str | None,
        timeout: float,
        operator_key: bytes = b"",
        owner: str | None = None,
        reconnect_timeout: float = math.inf,
    ) -> None:
        """`timeout`: seconds that `finish` waits for the first core to answer.

        With `operator_key`, the core's, this client is an operator. `owner`: a user beside this one and root whose core
        is trusted, if it is behind a Unix socket. `reconnect_timeout`: seconds that requests wait while there is no
        core. Raises ValueError if there is no such user.
        """
        self.address = address
        self.reconnect_timeout = reconnect_timeout
        self.trouble = "no core answers there"
        """Why there is no core, as far as this client knows."""
        self._timeout = timeout
        self.standby_pid: int | None = None
        self._key_file = key_file
        self._owners = trusted_owners() | ({user_id(owner)} if owner is not None else set())
        self._path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        """The socket file; None over TCP."""
        self._operator_key = operator_key
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._model: dict[str, object] | None = None
        """What the first core served; None before."""

    def begin(self) -> None:
        """No-op: a shared core is started by its operator."""

    def finish(self, check: Check) -> Core:
        """Wait until a core serves at the address; without a limit of time, unless it is the first core.

        Raises what `check` raises, and EngineStartError if the first core refuses, or if there is none for `timeout`
        seconds in which no core got on with its load, or if a later core has another model.
        """
        is_first, pause = self._model is None, _RETRY_S
        deadline = time.monotonic() + self._timeout if is_first else math.inf
        self.trouble = "no core answers there"
        while True:
            connection = None
            try:
                self._wait_for_socket(check, deadline)
                connection = CoreConnection(self.address, self._key_file, self._operator_key, self._token, self._owners)
                timeout = max(0.0, deadline - time.monotonic())
                welcome, config = connection.greet(timeout, check, self.load_progress)
                break
            except (EngineStartError, OSError, ValueError, zmq.ZMQError) as error:
                if connection is not None:
                    connection.close()
                if is_first:
                    raise
                # Such as a core that could not load or has no room for another client, or no descriptor that is free.
                self.trouble = str(error)
                _wait(pause, check)
                pause = min(_LONGEST_RETRY_S, 2 * pause)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
        model = served_model(welcome, config)
        if differing := differences(self._model or model, model):
            connection.close()
            raise EngineStartError(
                f"the core that now serves {self.address} has another model ({config.model_config.model}): "
                f"{', '.join(differing)}; connect to it again"
            )
        self._model = model
        return Core(connection, welcome.client, config, self._open_page(), None, welcome)

    def check_same_model(self, other: "RemoteCore") -> None:
        """Raise EngineStartError unless the core that `other` found first has the same model; call after `finish`."""
        assert self._model is not None
        assert other._model is not None
        if differing := differences(other._model, self._model):
            raise EngineStartError(
                f"the cores at {other.address} and {self.address} have different models: {', '.join(differing)}; "
                "connect to cores of one model"
            )

    def load_progress(self) -> object:
        """Return a value that changes while a core gets on with its load; None if this process sees no such core."""
        return _load_progress(self._open_page())

    def _wait_for_socket(self, check: Check, deadline: float) -> None:
        """Return once there is a socket file whose owner is trusted; at once over TCP.

        Raises what `check` raises, and EngineStartError if the owner is not trusted or after the deadline.
        """
        while self._path is not None and not check_socket_file(self._path, self._owners):
            check()
            if time.monotonic() > deadline:
                raise EngineStartError(f"there is no core at {self.address}; {is_engine_running(self.address)}")
            time.sleep(_LOOK_S)

    def _open_page(self) -> StatusPage | None:
        """Return the status page beside the socket; None if there is none that this process may read."""
        if self._path is None:
            return None
        return StatusPage.open(self._path.with_name(f"{self._path.name}.status"))

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """No-op: the state of a shared core is kept by its parent."""

    def prepare_standby(self) -> None:
        """No-op: a shared core has no standby."""

    def discard(self, process: CoreProcess) -> None:
        """No-op: the files of a shared core are not this client's."""

    def close(self, timeout: float | None, core: Core | None) -> None:
        """No-op: a shared core serves on."""


CoreSource: TypeAlias = "CoreLauncher | RemoteCore | RayCore"


def _wait(seconds: float, check: Check) -> None:
    """Wait while `check`, which is called repeatedly, does not raise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(_LOOK_S)


def _load_progress(page: StatusPage | None) -> object:
    """Return a value that changes while the core of `page` gets on with its load; None without such a core."""
    return page.progress() if page is not None and page.state in (CoreState.STARTING, CoreState.LOADING) else None


def served_model(welcome: wire.Welcome, config: VllmConfig) -> dict[str, object]:
    """Return, by name, all that a successor must have in common with the core, so that streams can continue there."""
    digest, model = welcome.model, config.model_config
    digests = {"weights": digest.weights, "config.json": digest.config, "tokenizer": digest.tokenizer}
    limits = {name: getattr(model, name) for name in ("dtype", "quantization", "max_model_len")}
    return digests | limits


def differences(old: dict[str, object], new: dict[str, object]) -> list[str]:
    """Return the names of what differs, with values where they mean something."""
    return [
        f"other {name}" if name in ("weights", "config.json", "tokenizer") else f"{name} {new[name]} instead of {was}"
        for name, was in old.items()
        if new[name] != was
    ]


def make_folder() -> Path:
    """Make a private folder for the files of cores, and return its path."""
    return Path(tempfile.mkdtemp(prefix="vllm_mp-", dir=_socket_root()))


def _socket_root() -> str | None:
    """Return None for the usual folder of temporary files, or /tmp if the path of a socket there would be too long."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/vllm_mp-xxxxxxxx/core-9999999999999.sock")
    return None if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp"
