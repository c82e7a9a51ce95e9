"""What a user whose weights take 16 or 32 bits is told once: smaller ones are faster on a CPU."""

from vllm_mp.config.sections import VllmConfig
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_store.gguf import mapped_gguf


def int8_hint(config: VllmConfig) -> str | None:
    """Return that `--quantization int8` exists, for an engine that could use it and does not; otherwise None.

    `config` is that of an engine whose core has started. Raises ValueError as `mapped_gguf` does.
    """
    model = config.model_config
    architecture = model.architecture
    if (
        config.device_config.device != "cpu"
        or model.quantization is not None
        or not isinstance(architecture, NativeArchitecture)
        or architecture.is_encoder
        or architecture.fp8 is not None
        or architecture.blocks is not None
        or mapped_gguf(model.folder) is not None
    ):
        return None
    return f"The weights are in {model.dtype}; --quantization int8 is faster and a little less accurate."
