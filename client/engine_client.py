"""The interface of an engine, for type hints and for stand-ins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mp.client.prompts.prompt import PromptType
    from vllm_mp.config import ModelConfig, VllmConfig
    from vllm_mp.outputs import PoolingRequestOutput, RequestOutput
    from vllm_mp.requests.lora_request import LoRARequest
    from vllm_mp.requests.pooling_params import PoolingParams
    from vllm_mp.requests.sampling_params import SamplingParams


class EngineClient(ABC):
    """What an engine offers to code that does not start it; `AsyncLLM` is the engine that fulfils it.

    vLLM's class of this name has the same names and arguments. `AsyncLLM` documents them.
    """

    vllm_config: VllmConfig
    model_config: ModelConfig

    @property
    @abstractmethod
    def is_running(self) -> bool: ...

    @property
    @abstractmethod
    def is_stopped(self) -> bool: ...

    @property
    @abstractmethod
    def errored(self) -> bool: ...

    @property
    @abstractmethod
    def dead_error(self) -> BaseException | None: ...

    @abstractmethod
    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    @abstractmethod
    def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]: ...

    @abstractmethod
    async def abort(self, request_id: str | Iterable[str]) -> None: ...

    @abstractmethod
    def get_tokenizer(self) -> Any:
        """Return the tokenizer; `AsyncLLM`'s can be awaited too, and a stand-in may make this a coroutine."""

    @abstractmethod
    async def is_tracing_enabled(self) -> bool: ...

    @abstractmethod
    async def do_log_stats(self) -> None: ...

    @abstractmethod
    async def check_health(self) -> None: ...

    @abstractmethod
    async def start_profile(self) -> None: ...

    @abstractmethod
    async def stop_profile(self) -> str | None: ...

    @abstractmethod
    async def reset_mm_cache(self) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self) -> Any: ...

    @abstractmethod
    async def sleep(self, level: int = 1) -> None: ...

    @abstractmethod
    async def wake_up(self, tags: list[str] | None = None) -> bool: ...

    @abstractmethod
    async def is_sleeping(self) -> bool: ...

    @abstractmethod
    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    @abstractmethod
    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None: ...

    @abstractmethod
    async def resume_generation(self) -> None: ...

    @abstractmethod
    async def is_paused(self) -> bool: ...
