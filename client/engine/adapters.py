"""The LoRA adapters of an engine: load, list, pin and remove them."""

from typing import Any

import msgspec

from vllm_mp.client.engine.engine import Engine
from vllm_mp.config import VllmConfig
from vllm_mp.requests.lora_request import LoRARequest


class Adapters:
    """The LoRA adapters that the cores of an engine know. Its calls are those of `AsyncLLM`, which documents them.

    All raise ValueError if LoRA is not enabled.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def add(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, as `AsyncLLM.add_lora` does."""
        lora = self._checked(lora_request)
        arguments = (lora.lora_name, lora.lora_int_id, lora.lora_path, lora.load_inplace)
        return any(await self._engine.call("add_lora", *arguments))

    async def remove(self, lora_id: int) -> bool:
        """Forget an adapter, as `AsyncLLM.remove_lora` does."""
        return any(await self._engine.ask("remove_lora", self._checked_id(lora_id)))

    async def ids(self) -> set[int]:
        """Return the ids of the adapters that are added or loaded."""
        self._check_enabled()
        return set().union(*await self._engine.ask("list_loras"))

    async def pin(self, lora_id: int) -> bool:
        """Keep an adapter in memory, as `AsyncLLM.pin_lora` does."""
        return all(await self._engine.ask("pin_lora", self._checked_id(lora_id)))

    async def prepare(self, lora_request: LoRARequest | None) -> LoRARequest | None:
        """Return the adapter of a new request, which is read again before, with `load_inplace`.

        Raises what `checked_adapter` and `add` raise.
        """
        lora = checked_adapter(lora_request, self._engine.vllm_config)
        if lora is not None and lora.load_inplace:
            await self.add(lora)
            lora.load_inplace = False
        return lora

    def _check_enabled(self) -> None:
        self._engine.check_process()
        if self._engine.vllm_config.lora_config is None:
            raise ValueError("LoRA is not enabled; start the engine with enable_lora=True")

    def _checked(self, lora_request: Any) -> LoRARequest:
        self._check_enabled()
        lora = checked_adapter(lora_request, self._engine.vllm_config)
        if lora is None:
            raise TypeError("lora_request must be a LoRARequest, got None")
        return lora

    def _checked_id(self, lora_id: Any) -> int:
        self._check_enabled()
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
