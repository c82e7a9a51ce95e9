"""The client's end of its driver process, which talks to Ray."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from vllm_mp.client.cores.lasting_calls import LastingCalls
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.ray.messages import Connected, Launch, Lost, StartCore, State, StopCore, Stopped
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_environment import package_path
from vllm_mp.keys.operator_key import new_operator_key
from vllm_mp.machine.exit_status import describe_exit

_STOP_TIMEOUT_S = 30.0
"""Time that the driver gets to end a core, and to end itself, before it is killed."""
_LOG_NAME = "driver.log"


class DriverProcess:
    """Starts, watches and ends the cores of an engine on a Ray cluster; several threads may use it.

    Ray ends the actors of a driver that has ended. The driver is a process of its own because Ray also ends a driver
    that has lost its cluster.
    """

    def __init__(self, config: VllmConfig) -> None:
        """The process starts with the first core. Raises ValueError, with the remedy, if Ray is not installed."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError(
                "data_parallel_backend='ray' needs Ray; install it here and on all nodes with `pip install ray`"
            )
        self.config = config
        self.operator_key = new_operator_key()
        self.lasting_calls = LastingCalls()
        """Calls that a core on another node must carry out before it serves."""
        self.core: Core | None = None
        """The core that was reached last, whose model a further core must have; None before the first."""
        self._folder = Path(tempfile.mkdtemp(prefix="vllm_mp-ray-"))
        self._owner = os.getpid()
        self._address = _address_in_use()
        self._popen: subprocess.Popen[bytes] | None = None
        self._is_connected = False
        self._states: dict[int, State | None] = {}
        """What the driver said last of each core that was asked for, by slot."""
        self._changed = threading.Condition()

    def start_core(self, slot: int) -> None:
        """Start a core, whose `state` will follow; also start the process if there is none.

        Raises OSError if the system cannot.
        """
        with self._changed:
            self._states[slot] = None
            if self._popen is None or self._popen.poll() is not None:
                self._popen = self._start()
            _send(self._popen, StartCore(slot))

    def state(self, slot: int, timeout: float = 0.0) -> State | None:
        """Return what is known of a core, waiting for a change up to `timeout` seconds; None: nothing yet."""
        with self._changed:
            if timeout:
                self._changed.wait(timeout)
            return self._states.get(slot)

    def stop_core(self, slot: int, timeout: float | None) -> None:
        """End a core, by force after `timeout` seconds (30 by default), and with the last core the process.

        No-op if the slot has no core, and in a forked child.
        """
        if os.getpid() != self._owner:
            return
        with self._changed:
            if slot in self._states and self._popen is not None:
                _send(self._popen, StopCore(slot))
                self._changed.wait_for(
                    lambda: isinstance(self._states[slot], Stopped) or not self._is_connected,
                    _STOP_TIMEOUT_S if timeout is None else timeout,
                )
            self._states.pop(slot, None)
            if self._states:
                return
        self._end(timeout)

    def _start(self) -> "subprocess.Popen[bytes]":
        """Start the process, and a thread that reads what it says."""
        self._folder.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        with open(self._folder / _LOG_NAME, "wb") as log:
            popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_mp.client.ray.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | package_path(),
                process_group=0,  # Ctrl-C reaches this process alone
            )
        launch = Launch(
            config=self.config,
            folder=str(self._folder),
            operator_key=self.operator_key,
            address=self._address,
            parent_pid=os.getpid(),
        )
        _send(popen, launch)
        threading.Thread(target=self._read, args=(popen,), name="ray-driver", daemon=True).start()
        return popen

    def _read(self, popen: "subprocess.Popen[bytes]") -> None:
        """Record what the process says until it has ended; its cores are lost then."""
        assert popen.stdout is not None
        with popen.stdout as output:
            for line in output:
                message = msgspec.json.decode(line, type=Connected | State)
                with self._changed:
                    if isinstance(message, Connected):
                        self._is_connected, self._address = True, message.address
                    elif message.slot in self._states:
                        self._states[message.slot] = message
                    self._changed.notify_all()
        end = describe_exit(popen.wait())
        with self._changed:
            cause = f"the driver process {popen.pid} of the Ray cluster ended with {end}: {self._last_line()}"
            if not self._is_connected:
                address = self._address or os.environ.get("RAY_ADDRESS") or "this machine"
                cause = f"no Ray cluster answers at {address}; check it with `ray status`, and RAY_ADDRESS: {cause}"
            for slot in self._states:
                self._states[slot] = Lost(slot, cause, is_final=not self._is_connected)
            self._is_connected = False
            self._changed.notify_all()

    def _last_line(self) -> str:
        try:
            lines = (self._folder / _LOG_NAME).read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip()), "")

    def _end(self, timeout: float | None) -> None:
        """End the process, by force after `timeout` seconds (30 by default), and remove the private folder."""
        if self._popen is not None:
            assert self._popen.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
            if not self._is_connected:  # it has no actors, and does not listen while it connects
                timeout = 0.0
            try:
                self._popen.wait(_STOP_TIMEOUT_S if timeout is None else timeout)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _send(popen: "subprocess.Popen[bytes]", message: Launch | StartCore | StopCore) -> None:
    """Send a line to the process; no-op if it has ended, which `_read` notices."""
    assert popen.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        popen.stdin.write(msgspec.json.encode(message) + b"\n")
        popen.stdin.flush()


def _address_in_use() -> str | None:
    """Return the address of the cluster to which this process is connected; None if it is to none."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    address: str = ray.get_runtime_context().gcs_address
    return address
