"""The configuration of an engine: its options, how they are resolved, and the result in sections."""

from vllm_mp.arguments.unserved_names import NEW_WEIGHTS, refuse
from vllm_mp.config.sections import (
    AttentionConfig,
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LivenessConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
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
    "MultiModalConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "VllmConfig",
]

__getattr__ = refuse(
    __name__,
    {
        "CompilationConfig": "nothing is compiled; max_cudagraph_capture_size bounds what is captured",
        "CUDAGraphMode": "nothing is compiled; max_cudagraph_capture_size bounds what is captured",
        "CompilationMode": "nothing is compiled; max_cudagraph_capture_size bounds what is captured",
        "KVEventsConfig": "a core keeps its KV cache to itself",
        "KVTransferConfig": "a core keeps its KV cache to itself",
        "LoadConfig": "the options load_format and download_dir say how weights are loaded",
        "PoolerConfig": "give pooling_type and normalize in PoolingParams",
        "ProfilerConfig": "VLLM_TORCH_PROFILER_DIR names the folder of traces",
        "get_current_vllm_config": "vllm_config of AsyncLLM is the configuration of that engine",
        "set_current_vllm_config": "each engine has its own configuration: give options to EngineArgs",
        "StructuredOutputsConfig": "the options guided_decoding_backend and its neighbours are those of the engine",
        "WeightTransferConfig": NEW_WEIGHTS,
    },
)
