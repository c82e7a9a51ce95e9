"""The source of cores that are processes of this client."""

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import zmq

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.health import HangWatch
from vllm_mp.client.cores.sources.core_source import Check, Core, load_progress
from vllm_mp.client.cores.sources.held_address import HeldAddress
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import is_missing_node, prepare_node_0
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.core_link.core_status import NOT_SUSPENDED, CoreState, TriedConstraint
from vllm_mp.core_link.status_page import MAX_TRIED, StatusPage
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.operator_key import new_operator_key
from vllm_mp.model_store.gguf import gguf_place
from vllm_mp.requests.lora_request import AdapterRecord

logger = logging.getLogger(__name__)


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
            welcome, config = connection.greet(timeout, look, lambda: load_progress(process.status_page()))
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


def make_folder() -> Path:
    """Make a private folder for the files of cores, and return its path."""
    return Path(tempfile.mkdtemp(prefix="vllm_mp-", dir=_socket_root()))


def _socket_root() -> str | None:
    """Return None for the usual folder of temporary files, or /tmp if the path of a socket there would be too long."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/vllm_mp-xxxxxxxx/core-9999999999999.sock")
    return None if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp"
