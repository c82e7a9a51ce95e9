"""The configuration of an engine: its options, how they are resolved, and the result in sections."""

from vllm_mp.config.sections import (
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

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DecodingConfig",
    "DeviceConfig",
    "LivenessConfig",
    "LoRAConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "VllmConfig",
]
