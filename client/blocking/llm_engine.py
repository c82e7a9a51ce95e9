"""The engine inside `LLM` as vLLM's class shows it."""

from typing import Any

from vllm_mp.arguments.unserved_names import refuse_attributes
from vllm_mp.client.async_llm import AsyncLLM


class LLMEngine:
    """The attributes of the inner engine of vLLM's `LLM` that programs read."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.vllm_config = engine.vllm_config
        self.model_config = engine.vllm_config.model_config

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; None with skip_tokenizer_init."""
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer. Raises ValueError if the engine has none."""
        return self._engine.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what requests may ask of the model, as `AsyncLLM.get_supported_tasks` does."""
        return tuple(self.model_config.supported_tasks)

    __getattr__ = refuse_attributes(
        {
            **dict.fromkeys(
                ("abort_request", "add_request", "engine_core", "has_unfinished_requests", "model_executor", "step"),
                "the core runs its own steps; use generate() of LLM, or AsyncLLM for single requests",
            ),
            **dict.fromkeys(
                ("collective_rpc", "reset_prefix_cache", "sleep", "start_profile", "stop_profile", "wake_up"),
                "call the method of this name of LLM",
            ),
        }
    )
