"""All that a core imports, for a template process."""

import contextlib
import ctypes
import gc
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from vllm_mp.core.worker.rare_parts_of_torch import defer_rare_parts_of_torch

_TORCH_LIBRARIES: Final = {
    "libtorch_global_deps.so": os.RTLD_NOW | os.RTLD_GLOBAL,
    "libtorch_cpu.so": os.RTLD_NOW,
}
"""The libraries that take `import torch` the longest, in its order and with its flags."""
_GPU_LIBRARIES: Final = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def import_core() -> None:
    """Import the modules of a core, without any operation that would start threads or touch a device."""
    gc.disable()
    # A library that another import loads would wait for the thread, so these imports come before it.
    import msgspec  # noqa: F401
    import numpy as np  # noqa: F401
    import zmq  # noqa: F401

    library = threading.Thread(target=load_torch_library, name="torch-library")
    library.start()
    # These import no torch.
    import vllm_mp.core.activity_log
    import vllm_mp.core.process

    library.join()
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


def load_torch_library() -> None:
    """Load the largest library of a build of torch for CPUs, so that `import torch` finds it loaded.

    An import holds the interpreter's lock while it loads a library; this function does not. No-op for other builds,
    which load libraries of GPUs first, and if a library cannot be loaded: `import torch` will say why.
    """
    with contextlib.suppress(ImportError, ValueError, AttributeError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return
        folder = Path(spec.submodule_search_locations[0], "lib")
        if any((folder / name).exists() for name in _GPU_LIBRARIES):
            return
        libc = ctypes.CDLL(None)
        libc.dlopen.argtypes = [ctypes.c_char_p, ctypes.c_int]
        libc.dlopen.restype = ctypes.c_void_p
        for name, flags in _TORCH_LIBRARIES.items():
            libc.dlopen(os.fsencode(folder / name), flags)


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
