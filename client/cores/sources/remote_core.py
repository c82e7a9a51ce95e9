"""The source of a shared core at an address, which another process starts."""

import math
import secrets
import time
from pathlib import Path

import zmq

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection, is_engine_running
from vllm_mp.client.cores.socket_owner import check_socket_file
from vllm_mp.client.cores.sources.core_source import Check, Core, load_progress
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.errors import EngineStartError
from vllm_mp.machine.file_owner import trusted_owners, user_id

_RETRY_S = 0.2
"""Pause before the next attempt to reach a shared core; it doubles for each further attempt."""
_LONGEST_RETRY_S = 3.0
_LOOK_S = 0.05
"""Pause before the next look for the socket of a shared core."""


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
        self._core: Core | None = None
        """The latest core that was reached; None before."""

    def begin(self) -> None:
        """No-op: a shared core is started by its operator."""

    def finish(self, check: Check) -> Core:
        """Wait until a core serves at the address; without a limit of time, unless it is the first core.

        Raises what `check` raises, and EngineStartError if the first core refuses, or if there is none for `timeout`
        seconds in which no core got on with its load, or if a later core has another model.
        """
        is_first, pause = self._core is None, _RETRY_S
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
        core = Core(connection, welcome.client, config, self._open_page(), None, welcome)
        former = self._core
        if former and (changes := core.model_of_former(former).changes(core.model, with_tokenizer=True)):
            connection.close()
            raise EngineStartError(
                f"the core that now serves {self.address} has another model ({config.model_config.model}): "
                f"{', '.join(changes)}; connect to it again"
            )
        self._core = core
        return core

    def check_same_model(self, other: "RemoteCore") -> None:
        """Raise EngineStartError unless the core that `other` has reached has the same model; call after `finish`."""
        assert self._core is not None
        assert other._core is not None
        if changes := other._core.model.changes(self._core.model, with_tokenizer=True):
            raise EngineStartError(
                f"the cores at {other.address} and {self.address} have different models: {', '.join(changes)}; "
                "connect to cores of one model"
            )

    def load_progress(self) -> object:
        """Return a value that changes while a core gets on with its load; None if this process sees no such core."""
        return load_progress(self._open_page())

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

    def prepare_template(self) -> None:
        """No-op: the parent of a shared core keeps the template."""

    def discard(self, process: CoreProcess) -> None:
        """No-op: the files of a shared core are not this client's."""

    def close(self, timeout: float | None, core: Core | None) -> None:
        """No-op: a shared core serves on."""


def _wait(seconds: float, check: Check) -> None:
    """Wait while `check`, which is called repeatedly, does not raise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        check()
        time.sleep(_LOOK_S)
