"""Where a client's cores come from: processes of its own, or one that others run at an address."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import zmq

from vllm_mp.client.engine.connection import CoreConnection
from vllm_mp.client.engine.health import HangWatch
from vllm_mp.client.engine.process import CoreProcess
from vllm_mp.config import VllmConfig
from vllm_mp.errors import EngineStartError
from vllm_mp.status_page import StatusPage


class Core(NamedTuple):
    """A core that serves."""

    connection: CoreConnection
    client: int
    """The number that the core knows this client by."""
    config: VllmConfig
    """As the core has resolved it."""
    page: StatusPage | None
    """None where it cannot be seen."""
    process: CoreProcess | None
    """None for a core that others run."""


_RETRY_S = 0.2

Check = Callable[[], None]
"""Called now and then while a core comes up; raises when nobody waits for it any more."""


class CoreLauncher:
    """Starts cores, each with its files in one private folder, which `close` removes."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._limits = config.liveness_config
        self._owner = os.getpid()
        self.folder = Path(tempfile.mkdtemp(prefix="vllm_mp-", dir=_socket_root()))
        self._num_started = 0
        self._process: CoreProcess | None = None
        self._connection: CoreConnection | None = None
        self._standby: CoreProcess | None = None

    @property
    def standby_pid(self) -> int | None:
        """The process that would be the next core; None while there is none."""
        return self._standby.pid if self._standby is not None else None

    def begin(self) -> None:
        """Start a core, which `finish` waits for."""
        self._num_started += 1
        self._process, self._standby = self._standby, None
        if self._process is not None and not self._process.is_alive():
            self._process.stop()
            self._process = None
        if self._process is None:
            self._process = CoreProcess(self.folder, self._num_started)
        self._process.launch(self._config)
        self._connection = CoreConnection(self._process.address)

    def finish(self, check: Check) -> Core:
        """Wait until the core that was begun serves.

        Raises EngineStartError, with the cause, when it does not come up, and what `check` raises; nothing of it is
        left then but its log.
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
                raise EngineStartError(f"the engine did not start: its process {process.pid} was stopped by a signal")

        try:
            welcome, config = connection.greet(self._limits.start_timeout_s, look)
        except BaseException:
            connection.close()
            process.kill()
            self.discard(process)
            raise
        self._process = self._connection = None
        return Core(connection, welcome.client, config, process.status_page(), process)

    def prepare_standby(self) -> None:
        """See to it that the process of the next core has imported everything before it is needed."""
        if self._limits.warm_standby and (self._standby is None or not self._standby.is_alive()):
            if self._standby is not None:
                self._standby.stop()
            self._standby = CoreProcess(self.folder, self._num_started + 1, standby=True)

    def discard(self, process: CoreProcess) -> None:
        """Remove what is left of a core that has ended, but the log of the latest."""
        process.stop()
        process.remove_files(keep_log=True)
        for log in self.folder.glob("core-*.log"):
            number = int(log.stem.removeprefix("core-"))
            if number < process.incarnation:
                with contextlib.suppress(OSError):
                    log.unlink()

    def close(self, timeout: float | None, core: Core | None) -> None:
        """End `core` and whatever else runs, by force after `timeout` seconds, and remove the folder."""
        if os.getpid() != self._owner:
            return
        if self._connection is not None:
            self._connection.close()
        for process in (self._process, self._standby, core and core.process):
            if process is not None:
                process.stop(timeout)
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteCore:
    """The core at an address, whichever process it is, as long as it serves the same model."""

    def __init__(self, address: str, key_file: str | None, timeout: float) -> None:
        """`timeout`: seconds to wait for the core to answer."""
        self.address = address
        self.timeout = timeout
        self.standby_pid: int | None = None
        self._key_file = key_file
        self._model: object = None

    def begin(self) -> None:
        """Nothing: whoever runs the core starts it."""

    def finish(self, check: Check) -> Core:
        """Wait until there is a core that serves; raises EngineStartError after `timeout` seconds, and as `check`.

        At once when the first one refuses, or a later one has another model.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            connection = CoreConnection(self.address, self._key_file)
            try:
                welcome, config = connection.greet(max(0.0, deadline - time.monotonic()), check)
                break
            except EngineStartError:
                connection.close()
                if self._model is None or time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_S)  # it could not load, and is about to end: perhaps another one can
            except BaseException:
                connection.close()
                raise
        model = (config.model_config.hf_config, config.model_config.dtype)
        if self._model not in (None, model):
            connection.close()
            raise EngineStartError(
                f"the core that now serves {self.address} has another model or dtype "
                f"({config.model_config.model} in {config.model_config.dtype}); connect to it anew"
            )
        self._model = model
        page = None
        if self.address.startswith("ipc://"):
            page = StatusPage.open(Path(self.address.removeprefix("ipc://") + ".status"))
        return Core(connection, welcome.client, config, page, None)

    def prepare_standby(self) -> None:
        """Nothing, as above."""

    def discard(self, process: CoreProcess) -> None:
        """Nothing, as above."""

    def close(self, timeout: float | None, core: Core | None) -> None:
        """Nothing, as above."""


CoreSource = CoreLauncher | RemoteCore


def _socket_root() -> str | None:
    """The usual folder for temporary files, or /tmp where a socket below that would have too long a path."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/vllm_mp-xxxxxxxx/core-99999.sock.lock")
    return None if longest <= zmq.IPC_PATH_MAX_LEN else "/tmp"
