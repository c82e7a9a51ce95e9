"""The parts of torch that a core can do without; this module does not import torch."""

from typing import Final

from vllm_mp.config import VllmConfig
from vllm_mp.machine.deferred_modules import defer_modules
from vllm_mp.model_config.architecture import NativeArchitecture

_RARE_PARTS_OF_TORCH: Final = (
    "torch._meta_registrations",
    "torch._native",
    "torch.distributed._meta_registrations",
    *("torch.distributions", "torch.export", "torch.masked", "torch.nn.intrinsic", "torch.nn.qat"),
    *("torch.quantization", "torch.utils.data"),
)
"""The first three register what operations do on the device "meta" and in traced programs, and other kernels for GPUs.
The others are for training and for exports. They and what they import are a quarter of `import torch`, and native
models on a CPU use nothing of them."""


def defer_rare_parts_of_torch() -> None:
    """Call this before `import torch`, and `load_deferred_modules` after it if `needs_all_of_torch`."""
    defer_modules(_RARE_PARTS_OF_TORCH)


def needs_all_of_torch(config: VllmConfig, device_type: str) -> bool:
    """Return whether a core runs more than native models on CPUs of one machine: code of the operator, or transformers.

    Models whose weights are random count as others, because they need torch's generators.
    """
    is_native = all(
        isinstance(model.architecture, NativeArchitecture) and model.load_format != "dummy" for model in config.models
    )
    is_plain = is_native and config.images is None and not config.model_config.logits_processors
    return device_type != "cpu" or config.parallel_config.nnodes > 1 or not is_plain
