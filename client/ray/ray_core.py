"""The source of a core that runs on a node of a Ray cluster."""

import contextlib
import logging
import secrets
import time

import zmq

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.sources.core_source import Check, Core
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.client.ray.driver_process import DriverProcess
from vllm_mp.client.ray.messages import Lost, Serves, Waits
from vllm_mp.client.ray.resources import describe_bundle
from vllm_mp.errors import EngineStartError

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 30.0
"""Time within which a core that serves on its node must answer this client."""
_LOOK_S = 0.05
_RETRY_S = 1.0
"""Pause before the next attempt to reach a core that refused, such as one that could not load again."""


class RayCore:
    """A core of an engine: on one node, where its actor restarts it, and on another when that node is lost.

    With `nnodes` its ranks are on several nodes, and Ray starts it again on other nodes when one of them is lost.
    """

    standby_pid = None
    """Its standby, if any, belongs to the actor."""

    def __init__(self, driver: DriverProcess, slot: int) -> None:
        self.node: str | None = None
        """The names of the nodes and the resources reserved there; None before there are any."""
        self.trouble = "Ray has not started it"
        """Why there is no core."""
        self._driver = driver
        self._slot = slot
        limits = driver.config.liveness_config
        self.reconnect_timeout = limits.start_timeout_s
        """Seconds that requests wait while there is no core."""
        self._restarts = (
            RestartLimit(limits.max_core_restarts, limits.core_restart_window_s) if limits.recovery else None
        )
        self._token = secrets.token_bytes(wire.TOKEN_BYTES)
        self._has_served = False
        self._served: Serves | None = None
        """Where the core is that this client has reached last; None once it is lost."""
        self._core: Core | None = None
        """That core; None before the first."""

    def begin(self) -> None:
        """Ask Ray for the core. Raises OSError if the driver process cannot start."""
        self._driver.start_core(self._slot)

    def finish(self, check: Check) -> Core:
        """Wait until a core serves: that of the same actor, or of another if the actor was lost.

        Raises what `check` raises, and EngineStartError if the first core does not start, if the limit of restarts is
        reached, if another attempt would fail too, or if the core has another model.
        """
        while True:
            serves = self._wait_for_core(check)
            try:
                core = self._connect(serves, check)
            except _Lost:
                continue
            except (EngineStartError, OSError, ValueError, zmq.ZMQError) as error:
                self.trouble = f"the core on {serves.node} refuses: {error}"
                if not self._has_served:
                    raise EngineStartError(self.trouble) from error
                with contextlib.suppress(_Lost):
                    self._wait(_RETRY_S, check, serves)
                continue
            self._check_model(core, serves)
            self._has_served, self._served, self._core = True, serves, core
            return core

    def _check_model(self, core: Core, serves: Serves) -> None:
        """Raise EngineStartError, and leave the core, unless it has the model of the core before, or of another."""
        latest = self._driver.core
        former = core.model_of_former(self._core) if self._core else latest and latest.model
        if former and (changes := former.changes(core.model, with_tokenizer=True)):
            core.connection.close()
            raise EngineStartError(
                f"the core on {serves.node} has another model: {', '.join(changes)}; copy the same files to all nodes"
            )
        self._driver.core = core

    def _wait_for_core(self, check: Check) -> Serves:
        """Return the core once it serves, and ask for another when one is lost. Raises as `finish` does."""
        reported: Waits | None = None
        while True:
            check()
            state = self._driver.state(self._slot, _LOOK_S)
            if isinstance(state, Serves):
                return state
            if isinstance(state, Waits) and state != reported:
                reported, self.trouble = state, state.why
                logger.warning("core %d: %s; it starts once there is room", self._slot, state.why)
            elif isinstance(state, Lost):
                self._replace(state, check)

    def _replace(self, lost: Lost, check: Check) -> None:
        """Ask for a core to replace one that was lost. Raises EngineStartError if no other core may start."""
        self.trouble = lost.cause
        limit = self._restarts
        if not self._has_served or lost.is_final or limit is None:
            raise EngineStartError(lost.cause)
        delay = limit.delay_after(time.monotonic(), has_served=self._served is not None)
        self._served = None
        if delay is None:
            limits = self._driver.config.liveness_config
            raise EngineStartError(
                f"Ray has replaced it more than max_core_restarts={limits.max_core_restarts} times within "
                f"core_restart_window_s={limits.core_restart_window_s:g}; the last time, {lost.cause}"
            )
        logger.warning("%s; another one is asked for", lost.cause)
        self._wait(delay, check)
        self._driver.start_core(self._slot)

    def _connect(self, serves: Serves, check: Check) -> Core:
        """Return the core that serves. Raises what `check` raises, _Lost, and EngineStartError if it refuses."""

        def look() -> None:
            check()
            if self._driver.state(self._slot) is not serves:
                raise _Lost

        # A core that this client has reached may be loading again: its actor says when it is lost.
        is_known = serves is self._served
        limits = self._driver.config.liveness_config
        connection = CoreConnection(serves.address, serves.key_file, self._driver.operator_key, self._token)
        try:
            welcome, config = connection.greet(float("inf") if is_known else _ANSWER_TIMEOUT_S, look)
            if not is_known:  # a restart on the same node keeps its state
                for name, args in self._driver.lasting_calls.calls():
                    connection.ask(limits.start_timeout_s, name, *args)
        except BaseException:
            connection.close()
            raise
        self.node = f"{serves.node}: {describe_bundle(serves.resources)}{' each' * (len(serves.nodes) > 1)}"
        if not is_known:
            logger.info("core %d serves %s on %s", self._slot, serves.address, self.node)
        config.parallel_config.data_parallel_rank = self._slot
        return Core(connection, welcome.client, config, None, None, welcome)

    def _wait(self, seconds: float, check: Check, serves: Serves | None = None) -> None:
        """Wait while `check` does not raise; raise _Lost once the core `serves` is lost."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check()
            if self._driver.state(self._slot, _LOOK_S) is not serves and serves is not None:
                raise _Lost

    def load_progress(self) -> None:
        """Return None: the actor watches the load."""

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """Note a call for the cores that Ray starts later."""
        self._driver.lasting_calls.note(name, args)

    def prepare_template(self) -> None:
        """No-op: the actor keeps the template."""

    def discard(self, process: CoreProcess) -> None:
        """No-op: the actor removes the files of its cores."""

    def close(self, timeout: float | None, core: Core | None) -> None:
        """End the core, by force after `timeout` seconds, and what is reserved for it; end the actor."""
        if core is not None:
            core.connection.close()
        self._driver.stop_core(self._slot, timeout)


class _Lost(Exception):
    """The core was lost while this client waited for its answer."""
