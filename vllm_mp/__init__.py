"""An LLM inference engine in two processes: the client keeps every stream if the core dies.

The public names are imported when they are first used, so that `import vllm_mp` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vllm_mp.arguments.unserved_names import refuse, refuse_modules
from vllm_mp.version import __version__ as __version__

if TYPE_CHECKING:
    from vllm_mp.arguments.usage_context import UsageContext
    from vllm_mp.client.async_llm import AsyncLLM, AsyncLLMEngine
    from vllm_mp.client.compat.request_manager import RequestManager, RequestStatus, StreamingRequest
    from vllm_mp.client.compat.text_stream import stream_generate
    from vllm_mp.client.engine.input_preprocessor import InputPreprocessor
    from vllm_mp.client.engine.stream_group import StreamGroup
    from vllm_mp.client.engine_client import EngineClient
    from vllm_mp.client.llm import LLM
    from vllm_mp.client.prompts.microbatch_tokenizer import AsyncMicrobatchTokenizer
    from vllm_mp.client.prompts.prompt import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from vllm_mp.client.stat_loggers import LoggingStatLogger, StatLoggerBase
    from vllm_mp.client.stat_loggers.prometheus import PrometheusStatLogger
    from vllm_mp.client.stats import IterationStats, SchedulerStats
    from vllm_mp.config import (
        AttentionConfig,
        CacheConfig,
        DecodingConfig,
        DeviceConfig,
        LivenessConfig,
        LoRAConfig,
        ModelConfig,
        ObservabilityConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm_mp.config.engine_args import AsyncEngineArgs, EngineArgs
    from vllm_mp.errors import (
        AsyncEngineDeadError,
        BatchDeadError,
        ConstraintError,
        DuplicateRequestIdError,
        EngineDeadError,
        EngineError,
        EngineGenerateError,
        EngineStartError,
        NotOperatorError,
        RequestInterruptedError,
        TooManyConstraintsError,
    )
    from vllm_mp.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
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
    from vllm_mp.requests.lora_request import LoRARequest
    from vllm_mp.requests.pooling_params import PoolingParams
    from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams
    from vllm_mp.requests.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__path__.append(f"{__path__[0]}/vllm_names")  # modules that programs import under the names that they have in vLLM

# Public name: its module in this package.
_MODULE_OF = {
    "AsyncEngineArgs": "config.engine_args",
    "AsyncEngineDeadError": "errors",
    "AsyncLLM": "client.async_llm",
    "AsyncLLMEngine": "client.async_llm",
    "AsyncMicrobatchTokenizer": "client.prompts.microbatch_tokenizer",
    "AttentionConfig": "config",
    "BatchDeadError": "errors",
    "CacheConfig": "config",
    "ClassificationOutput": "outputs",
    "ClassificationRequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "ConstraintError": "errors",
    "DecodingConfig": "config",
    "DeviceConfig": "config",
    "DuplicateRequestIdError": "errors",
    "EmbeddingOutput": "outputs",
    "EmbeddingRequestOutput": "outputs",
    "EmbedsPrompt": "client.prompts.prompt",
    "EngineArgs": "config.engine_args",
    "EngineClient": "client.engine_client",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineGenerateError": "errors",
    "EngineStartError": "errors",
    "GuidedDecodingParams": "requests.structured_outputs",
    "InputPreprocessor": "client.engine.input_preprocessor",
    "IterationStats": "client.stats",
    "LLM": "client.llm",
    "LivenessConfig": "config",
    "LoRAConfig": "config",
    "LoRARequest": "requests.lora_request",
    "LoggingStatLogger": "client.stat_loggers",
    "Logprob": "outputs",
    "ModelConfig": "config",
    "NotOperatorError": "errors",
    "ObservabilityConfig": "config",
    "ParallelConfig": "config",
    "PoolingOutput": "outputs",
    "PoolingParams": "requests.pooling_params",
    "PoolingRequestOutput": "outputs",
    "PrometheusStatLogger": "client.stat_loggers.prometheus",
    "PromptType": "client.prompts.prompt",
    "RequestFailure": "outputs",
    "RequestInterruptedError": "errors",
    "RequestManager": "client.compat.request_manager",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "requests.sampling_params",
    "RequestStatus": "client.compat.request_manager",
    "SamplingParams": "requests.sampling_params",
    "SchedulerConfig": "config",
    "SchedulerStats": "client.stats",
    "ScoringOutput": "outputs",
    "ScoringRequestOutput": "outputs",
    "StatLoggerBase": "client.stat_loggers",
    "StreamGroup": "client.engine.stream_group",
    "StreamingRequest": "client.compat.request_manager",
    "StructuredOutputsParams": "requests.structured_outputs",
    "TextPrompt": "client.prompts.prompt",
    "TokensPrompt": "client.prompts.prompt",
    "TooManyConstraintsError": "errors",
    "UsageContext": "arguments.usage_context",
    "VllmConfig": "config",
    "stream_generate": "client.compat.text_stream",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncEngineDeadError",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AsyncMicrobatchTokenizer",
    "AttentionConfig",
    "BatchDeadError",
    "CacheConfig",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConstraintError",
    "DecodingConfig",
    "DeviceConfig",
    "DuplicateRequestIdError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "EngineClient",
    "EngineDeadError",
    "EngineError",
    "EngineGenerateError",
    "EngineStartError",
    "GuidedDecodingParams",
    "InputPreprocessor",
    "IterationStats",
    "LivenessConfig",
    "LoRAConfig",
    "LoRARequest",
    "LoggingStatLogger",
    "Logprob",
    "ModelConfig",
    "NotOperatorError",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PrometheusStatLogger",
    "PromptType",
    "RequestFailure",
    "RequestInterruptedError",
    "RequestManager",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLoggerBase",
    "StreamGroup",
    "StreamingRequest",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "TooManyConstraintsError",
    "UsageContext",
    "VllmConfig",
    "stream_generate",
]


_refuse = refuse(
    __name__,
    {
        "LLMEngine": "use LLM in a script, or AsyncLLM",
        "StreamingInput": "give the whole prompt, or start the next request when more of it is known",
        "ModelRegistry": "docs/internals/adding_a_model.md says how a model is added",
        "initialize_ray_cluster": "an engine connects to Ray by itself; give data_parallel_backend='ray'",
    },
)
refuse_modules()


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        return _refuse(name)
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
