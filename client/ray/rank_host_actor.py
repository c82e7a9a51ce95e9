"""The actor that is the parent of a rank host on a node of a Ray cluster."""

import asyncio
import contextlib
import logging
import shutil
import subprocess
import sys

import msgspec

import vllm_mp
from vllm_mp.client.cores.sources.runtime_folder import make_folder
from vllm_mp.client.ray.node_config import config_on_node
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.core_link.core_environment import core_environment, package_path
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.curve_keys import make_client_key
from vllm_mp.machine.exit_status import describe_exit

logger = logging.getLogger(__name__)

_RESTART_S = 1.0
"""Pause before the next rank host, such as after no core has accepted the last one for `start_timeout_s`."""
_STOP_TIMEOUT_S = 5.0


class RankHostActor:
    """Keeps a rank host alive, which runs the ranks of its node for a core on another.

    The rank host ends with the actor's process, however that ends.
    """

    def __init__(self) -> None:
        self._folder = make_folder()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeping: asyncio.Future[None] | None = None

    async def version(self) -> str:
        """Return the version of the package on this node; as with `CoreActor.prepare`, it must stay as it is."""
        return vllm_mp.__version__

    async def start(self, config: bytes, core_key: bytes) -> bytes:
        """Start a rank host with the JSON of its configuration, and return its public key.

        `core_key` is the public key that the core has for rank hosts. Raises EngineStartError, with the cause, if this
        node cannot have the model.
        """
        key_file = f"{self._folder}/rank-host.key"
        key = make_client_key(key_file, core_key)
        try:
            on_node = config_on_node(config, key_file)
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineStartError(str(error)) from error
        self._keeping = asyncio.ensure_future(self._keep(msgspec.json.encode(on_node) + b"\n"))
        return key.public

    async def keep(self) -> None:
        """Return after `close`. Raises OSError if no rank host can start."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def close(self) -> None:
        """End the rank host and remove its files."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._process is not None:
            self._process.terminate()
            await call_in_thread(self._wait_or_kill)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _keep(self, config: bytes) -> None:
        """Start a rank host, and another one each time it ends."""
        while True:
            self._process = _start(config)
            code = await call_in_thread(self._process.wait)
            logger.warning("the rank host ended with %s; the next one is started", describe_exit(code))
            await asyncio.sleep(_RESTART_S)

    def _wait_or_kill(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(config: bytes) -> "subprocess.Popen[bytes]":
    """Start a rank host, which ends when its standard input does. Raises OSError if the system cannot."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vllm_mp.core", "--rank-host", "--follow-parent"],
        stdin=subprocess.PIPE,
        env=core_environment() | package_path(),
        process_group=0,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(config)
        process.stdin.flush()
    return process
