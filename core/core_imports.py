"""All that a core imports, for a template process; and the parts of torch that a core can do without."""

import contextlib
import gc
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


def import_core() -> None:
    """Import the modules of a core, without any operation that would start threads or touch a device."""
    gc.disable()
    defer_rare_parts_of_torch()
    import vllm_mp.core.engine_core
    import vllm_mp.core.lora.adapter
    import vllm_mp.core.model_template
    import vllm_mp.core.parallel.followers
    import vllm_mp.core.process
    import vllm_mp.core.weights.digest
    import vllm_mp.core.worker.memory.plan
    import vllm_mp.core.worker.model_runner
    import vllm_mp.core.worker.sampling.registered_processors
    from vllm_mp.core.models import import_native_models

    import_native_models()
    with contextlib.suppress(ImportError):  # not compiled
        import vllm_mp.core._signal_sender  # noqa: F401
    gc.freeze()  # a collection in a fork would copy all pages
