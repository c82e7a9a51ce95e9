"""An LLM inference engine in two processes: the client keeps every stream if the core dies.

The public names are imported when they are first used, so that `import vllm_mp` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM, AsyncLLMEngine
    from vllm_mp.client.llm import LLM
    from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
    from vllm_mp.client.stream_group import StreamGroup
    from vllm_mp.config import VllmConfig
    from vllm_mp.engine_args import AsyncEngineArgs, EngineArgs
    from vllm_mp.errors import (
        AsyncEngineDeadError,
        BatchDeadError,
        EngineDeadError,
        EngineError,
        EngineGenerateError,
        EngineStartError,
        NotOperatorError,
    )
    from vllm_mp.lora_request import LoRARequest
    from vllm_mp.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingOutput,
        PoolingRequestOutput,
        RequestFailure,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from vllm_mp.pooling_params import PoolingParams
    from vllm_mp.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

# Public name: its module in this package.
_MODULE_OF = {
    "AsyncEngineArgs": "engine_args",
    "AsyncEngineDeadError": "errors",
    "AsyncLLM": "client.async_llm",
    "AsyncLLMEngine": "client.async_llm",
    "AsyncMicrobatchTokenizer": "client.microbatch_tokenizer",
    "BatchDeadError": "errors",
    "ClassificationOutput": "outputs",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EngineArgs": "engine_args",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineGenerateError": "errors",
    "EngineStartError": "errors",
    "LLM": "client.llm",
    "LoRARequest": "lora_request",
    "Logprob": "outputs",
    "NotOperatorError": "errors",
    "PoolingOutput": "outputs",
    "PoolingParams": "pooling_params",
    "PoolingRequestOutput": "outputs",
    "RequestFailure": "outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "StreamGroup": "client.stream_group",
    "VllmConfig": "config",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncEngineDeadError",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AsyncMicrobatchTokenizer",
    "BatchDeadError",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineDeadError",
    "EngineError",
    "EngineGenerateError",
    "EngineStartError",
    "LoRARequest",
    "Logprob",
    "NotOperatorError",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestFailure",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamGroup",
    "VllmConfig",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
