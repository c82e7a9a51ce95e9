"""The actor that is the parent of a core on a node of a Ray cluster."""

import asyncio
import shutil
import socket

import ray

import vllm_mp
from vllm_mp.client.cores.shared_core import SharedCore
from vllm_mp.client.cores.sources.runtime_folder import make_folder
from vllm_mp.client.ray.node_config import config_on_node
from vllm_mp.errors import EngineStartError
from vllm_mp.keys.authorized_clients import AuthorizedClients
from vllm_mp.keys.curve_keys import make_server_key


class CoreActor:
    """Keeps a core alive as `vllm-mp engine` does, on a free TCP port of its node.

    The core ends with the actor's process, however that ends.
    """

    def __init__(self) -> None:
        self._folder = make_folder()
        """The core has it too, and removes it if this process is killed."""
        self._key_file = f"{self._folder}/server.key"
        self._node_key_file = ""
        """The core's key for rank hosts; empty if it has all its ranks."""
        self._held = socket.socket()
        self._core: SharedCore | None = None
        self._keeping: asyncio.Future[None] | None = None

    async def prepare(self) -> tuple[str, bytes]:
        """Return the version of the package on this node, and the core's public key.

        The driver calls this before it knows that the versions are equal: it must stay as it is.
        """
        return vllm_mp.__version__, make_server_key(self._key_file).public

    async def prepare_nodes(self) -> tuple[str, int, bytes]:
        """Return the address and the port of this node where rank hosts connect, and the core's public key for them.

        The actor keeps the port with a bound socket that does not listen: other programs cannot bind it, but its cores
        can, because both sockets have SO_REUSEADDR.
        """
        self._node_key_file = f"{self._folder}/nodes.key"
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((ray.util.get_node_ip_address(), 0))
        host, port = self._held.getsockname()
        return host, port, make_server_key(self._node_key_file).public

    async def start(self, config: bytes, client_key: bytes, operator_key: bytes, host_keys: list[bytes]) -> str:
        """Start a core with the JSON of its configuration, and return its address once it serves.

        The client with the public key `client_key` may connect, and rank hosts with `host_keys`. Raises
        EngineStartError, with the cause, if the core does not start.
        """
        AuthorizedClients(self._key_file).allow("client", client_key)
        for number, key in enumerate(host_keys, 1):
            AuthorizedClients(self._node_key_file).allow(f"node-{number}", key)
        try:
            on_node = config_on_node(config, self._node_key_file)
            address = f"tcp://{ray.util.get_node_ip_address()}:0"
            self._core = SharedCore(
                on_node, address, self._key_file, operator_key, has_log_files=False, folder=self._folder
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineStartError(str(error)) from error
        self._keeping = asyncio.ensure_future(self._core.keep())
        serving = asyncio.ensure_future(self._core.serves.wait())
        try:
            await asyncio.wait({self._keeping, serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
        if self._keeping.done():
            self._keeping.result()
        return self._core.address

    async def keep(self) -> None:
        """Return after `close`. Raises EngineDeadError once the core is gone for good."""
        assert self._keeping is not None
        await asyncio.shield(self._keeping)

    async def close(self) -> None:
        """End the core and remove its files."""
        if self._core is not None:
            await self._core.close()
        if self._keeping is not None:
            self._keeping.cancel()
        self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)
