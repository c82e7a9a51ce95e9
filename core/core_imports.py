"""All that a core imports, for a template process."""

import contextlib
import gc
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from vllm_mp.core.torch_import.torch_library import torch_library_beside


def import_core() -> None:
    """Import the modules of a core, without any operation that would start threads or touch a device."""
    gc.disable()
    with torch_library_beside():  # these import no torch
        import vllm_mp.core.activity_log
        import vllm_mp.core.process
    from vllm_mp.core.torch_import.rare_parts_of_torch import defer_rare_parts_of_torch

    defer_rare_parts_of_torch()
    with _modules_found_by_name():
        import torch  # noqa: F401
    import vllm_mp.core.engine_core
    import vllm_mp.core.lora.adapter
    import vllm_mp.core.model_template
    import vllm_mp.core.parallel.followers
    import vllm_mp.core.weights.digest
    import vllm_mp.core.worker.memory.plan
    import vllm_mp.core.worker.model_runner
    import vllm_mp.core.worker.sampling.registered_processors
    from vllm_mp.core.models import import_native_models

    import_native_models()
    with contextlib.suppress(ImportError):  # not compiled
        import vllm_mp.core._signal_sender  # noqa: F401
    gc.freeze()  # a collection in a fork would copy all pages


@contextlib.contextmanager
def _modules_found_by_name() -> Iterator[None]:
    """Let `inspect` find the module of a function or frame in this block by its name.

    `import torch` asks for the source of some functions. For the first one, `inspect.getmodule` resolves the paths of
    all modules, which takes a tenth of the whole import.
    """

    def module_of(thing: Any, _filename: str | None = None) -> ModuleType | None:
        if inspect.ismodule(thing):
            return thing
        name = thing.f_globals.get("__name__") if inspect.isframe(thing) else getattr(thing, "__module__", None)
        return sys.modules.get(str(name))

    usual = inspect.getmodule
    inspect.getmodule = module_of  # type: ignore[assignment]  # its parameters have other names
    try:
        yield
    finally:
        inspect.getmodule = usual
