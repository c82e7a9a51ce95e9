"""All that a core imports, for a template process."""

import contextlib
import gc

from vllm_mp.core.worker.rare_parts_of_torch import defer_rare_parts_of_torch


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
