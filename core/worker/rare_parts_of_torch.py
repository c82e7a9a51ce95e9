"""The parts of torch that a core can do without; this module does not import torch."""

from typing import Final

from vllm_mp.machine.deferred_modules import defer_modules

_RARE_PARTS_OF_TORCH: Final = (
    "torch._meta_registrations",
    "torch._native",
    "torch.distributed._meta_registrations",
)
"""Register what operations do on the device "meta" and in traced programs, and other kernels for GPUs. They and what
they import are a third of `import torch`, and native models on a CPU use nothing of them."""


def defer_rare_parts_of_torch() -> None:
    """Call this before `import torch`; all that is not a native model on a CPU needs `load_deferred_modules` then."""
    defer_modules(_RARE_PARTS_OF_TORCH)
