"""The actor that is the parent of a core on a node of a Ray cluster."""

import asyncio
import shutil
from pathlib import Path

import msgspec
import ray

import vllm_mp
from vllm_mp.authorized_clients import AuthorizedClients
from vllm_mp.client.engine.launcher import make_folder
from vllm_mp.client.engine.shared_core import SharedCore
from vllm_mp.config import VllmConfig
from vllm_mp.curve_keys import make_server_key
from vllm_mp.errors import EngineStartError
from vllm_mp.model_store import resolve_model


class CoreActor:
    """Keeps a core alive as `vllm-mp engine` does, on a free TCP port of its node.

    The core ends with the actor's process, in whatever way that ends.
    """

    def __init__(self) -> None:
        self._folder = make_folder()
        """The core's too: it removes the folder if this process is killed."""
        self._key_file = f"{self._folder}/server.key"
        self._core: SharedCore | None = None
        self._keeping: asyncio.Future[None] | None = None

    async def prepare(self) -> tuple[str, bytes]:
        """Return the version of the package on this node, and the core's public key.

        The driver calls this before it knows that the versions are equal: it must stay as it is.
        """
        return vllm_mp.__version__, make_server_key(self._key_file).public

    async def start(self, config: bytes, client_key: bytes, operator_key: bytes) -> str:
        """Start a core with the JSON of its configuration, and return its address once it serves.

        The client with the public key `client_key` may connect. Raises EngineStartError, with the cause, if the core
        does not start.
        """
        AuthorizedClients(self._key_file).allow("client", client_key)
        try:
            on_node = _config_on_node(msgspec.json.decode(config, type=VllmConfig))
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
        shutil.rmtree(self._folder, ignore_errors=True)


def _config_on_node(config: VllmConfig) -> VllmConfig:
    """Return `config` with the model's folder on this node, fetched if need be, and with the devices that Ray chose.

    Raises ValueError if this node cannot have the model or the tokenizer, and what `resolve_model` raises.
    """
    model = config.model_config
    if not Path(model.path).exists():
        path = str(
            resolve_model(
                model.model, revision=model.revision, download_dir=model.download_dir, load_format=model.load_format
            )
        )
        tokenizer = path if model.tokenizer == model.path else model.tokenizer
        model = msgspec.structs.replace(model, path=path, tokenizer=tokenizer)
    if not Path(model.tokenizer).exists():
        raise ValueError(f"the tokenizer's folder {model.tokenizer} does not exist here; copy it to each node")
    # Ray shows a process only its own GPUs, so that each core has the first ones.
    parallel = msgspec.structs.replace(config.parallel_config, data_parallel_rank=0)
    return msgspec.structs.replace(config, model_config=model, parallel_config=parallel)
