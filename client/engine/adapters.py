"""The LoRA adapters of an engine: load, list, pin and remove them."""

from typing import Any

import msgspec

from vllm_mp.client.engine.lifecycle import EngineLifecycle
from vllm_mp.config import VllmConfig
from vllm_mp.requests.lora_request import LoRARequest


class EngineAdapters(EngineLifecycle):
    """The part of `AsyncLLM` that concerns LoRA adapters.

    `add_lora`, `remove_lora` and `pin_lora` affect all clients of a shared core. They raise NotOperatorError, and
    change nothing, unless this client is an operator of it. All raise ValueError if LoRA is not enabled.
    """

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter into each core's host memory, where it is known until `remove_lora`, also by a next core.

        Return True if the adapter was not listed before, or with `load_inplace`. Other requests go on meanwhile. With
        `load_inplace`, later requests with the id use what the folder holds now; earlier ones keep their weights.

        Raises EngineError if the folder cannot be used, or if the id belongs to an adapter with another name or path;
        then nothing has changed.
        """
        lora = self._adapter(lora_request)
        return any(await self._call("add_lora", lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, pinned or not; return False if it is not listed.

        Requests that use it run to their ends; later ones load it again, if they may.
        """
        return any(await self._ask("remove_lora", self._adapter_id(lora_id)))

    async def list_loras(self) -> set[int]:
        """Return the ids of the adapters that are added or loaded."""
        self._check_lora()
        return set().union(*await self._ask("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in host memory and, once a request has used it, on the device; return True.

        `remove_lora` ends that. Raises EngineError if the adapter is not listed, or if there are not enough slots
        (`max_loras`) for it and the adapters that are pinned or in use.
        """
        return all(await self._ask("pin_lora", self._adapter_id(lora_id)))

    async def _prepare(self, lora_request: LoRARequest | None) -> LoRARequest | None:
        """Return the adapter of a new request, which is read again before, with `load_inplace`.

        Raises what `checked_adapter` and `add_lora` raise.
        """
        lora = checked_adapter(lora_request, self.vllm_config)
        if lora is not None and lora.load_inplace:
            await self.add_lora(lora)
            lora.load_inplace = False
        return lora

    def _check_lora(self) -> None:
        self._check_process()
        if self.vllm_config.lora_config is None:
            raise ValueError("LoRA is not enabled; start the engine with enable_lora=True")

    def _adapter(self, lora_request: Any) -> LoRARequest:
        self._check_lora()
        lora = checked_adapter(lora_request, self.vllm_config)
        if lora is None:
            raise TypeError("lora_request must be a LoRARequest, got None")
        return lora

    def _adapter_id(self, lora_id: Any) -> int:
        self._check_lora()
        if isinstance(lora_id, bool) or not isinstance(lora_id, int):
            raise TypeError(f"lora_id must be an int, got {lora_id!r}")
        if not -(2**63) <= lora_id < 2**63:
            raise ValueError(f"lora_id must be the id of an adapter, got {lora_id}")
        return lora_id


def checked_adapter(lora_request: Any, config: VllmConfig) -> LoRARequest | None:
    """Return a copy of the adapter for a request; None for the base model.

    Raises TypeError unless it is a LoRARequest, and ValueError if its fields are out of range or LoRA is not enabled.
    """
    if lora_request is None:
        return None
    if not isinstance(lora_request, LoRARequest):
        raise TypeError(f"lora_request must be a LoRARequest, got {type(lora_request).__name__}")
    if config.lora_config is None:
        raise ValueError(
            f"lora_request names {lora_request.lora_name!r}, but LoRA is not enabled; start the engine with "
            "enable_lora=True, or leave it None"
        )
    return msgspec.structs.replace(lora_request)
