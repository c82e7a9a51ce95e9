"""The resolved configuration of an engine, in the parts that vLLM's users know.

Everything here is plain data that crosses to the core process as JSON; it is made by
`EngineArgs.create_engine_config`, which validates it.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.pooling import PoolingConfig
from vllm_mp.model_config.registry import read_architecture


class ModelConfig(msgspec.Struct, kw_only=True, dict=True):
    """The model, where it lies, and how it is loaded."""

    model: str
    """As the user named it."""
    path: str
    """The local folder that holds config.json, weights and tokenizer."""
    tokenizer: str
    """The local folder that holds the tokenizer."""
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    served_model_name: str
    chat_template: str | None
    load_format: str
    dtype: str
    """"auto" until the core has chosen for its device; then "float32", "float16" or "bfloat16"."""
    quantization: str | None = None
    """"int8", "fp8" (in the checkpoint, or made at load), or None for weights of `dtype`."""
    seed: int
    max_model_len: int
    """Most tokens, prompt and answer together, that one request may have."""
    enforce_eager: bool
    hf_config: dict[str, Any]
    """config.json, as it is."""
    eos_token_ids: list[int]
    max_logprobs: int = 20
    """Most log-probabilities a position that a request may ask for; -1: the whole vocabulary."""
    default_sampling_params: dict[str, Any] = {}
    """Fields of `SamplingParams` that the model's generation_config.json sets, for requests that give none."""
    pooling: PoolingConfig
    """What pooling requests get that do not say."""

    @cached_property
    def architecture(self) -> Architecture:
        """What `hf_config` means, in this engine's terms, with what `quantization` makes of the weights."""
        architecture = read_architecture(self.hf_config)
        if self.quantization == "fp8" and isinstance(architecture, NativeArchitecture) and architecture.fp8 is None:
            return msgspec.structs.replace(architecture, fp8="channel")
        return architecture

    @property
    def folder(self) -> Path:
        return Path(self.path)

    def get_vocab_size(self) -> int:
        return self.architecture.vocab_size

    def get_hidden_size(self) -> int:
        return self.architecture.hidden_size


class CacheConfig(msgspec.Struct, kw_only=True):
    """The paged KV cache. Sizes in tokens and bytes; `num_blocks` is 0 until the core has sized it.

    An encoder's blocks take no memory, and each is as long as the context, so that a request needs just one.
    """

    block_size: int
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    cache_dtype: str
    """"fp8", or "auto" for keys and values of the model's dtype."""
    enable_prefix_caching: bool
    num_blocks: int = 0


class SchedulerConfig(msgspec.Struct, kw_only=True):
    """Limits of one step; `max_num_batched_tokens` is 0 until the core has chosen, unless it was given."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_partial_prefills: int
    enable_chunked_prefill: bool
    policy: str
    stream_interval: int
    """Tokens between two outputs of a stream; the first and the last come at once."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the one before is computed; None until the core has chosen for its device."""
    check_invariants: bool = False
    """Check after each step that no block, row or request is lost or used twice; slow, and ends the core if one is."""


class ParallelConfig(msgspec.Struct, kw_only=True):
    """How many devices work on the model."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str = "mp"

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


class DeviceConfig(msgspec.Struct, kw_only=True):
    """`device` is "auto" until the core has chosen; then "cpu" or "cuda"."""

    device: str
    num_threads: int
    """Threads of the core's CPU kernels; 0 means one for each core that the process may use."""


class AttentionConfig(msgspec.Struct, kw_only=True):
    """`backend` is "auto" until the core has chosen; then "triton", "flash_attn", "torch", or "cpu" for C++ kernels."""

    backend: str = "auto"


class LoRAConfig(msgspec.Struct, kw_only=True):
    """Adapters; none are served by this version."""

    max_loras: int
    max_lora_rank: int


class DecodingConfig(msgspec.Struct, kw_only=True):
    """Structured output; none is served by this version."""

    backend: str = "none"


class ObservabilityConfig(msgspec.Struct, kw_only=True):
    """What the client writes to its log."""

    disable_log_stats: bool
    disable_log_requests: bool
    max_log_len: int | None


class LivenessConfig(msgspec.Struct, kw_only=True):
    """How the client judges whether the core lives, and what it does when it does not. Times in seconds."""

    engine_iteration_timeout_s: float
    start_timeout_s: float
    recovery: bool = True
    max_core_restarts: int = 10
    core_restart_window_s: float = 300.0
    warm_standby: bool = False
    fault_injection: str = ""
    """Faults that the core brings about itself, for tests; empty: none."""


class VllmConfig(msgspec.Struct, kw_only=True):
    """Everything that client and core agree on."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig
    decoding_config: DecodingConfig
    observability_config: ObservabilityConfig
    liveness_config: LivenessConfig
    attention_config: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    lora_config: LoRAConfig | None = None
