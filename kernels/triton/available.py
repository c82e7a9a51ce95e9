"""Finds out whether Triton can be used, without importing it."""

import contextlib
import functools
import importlib.util
import logging
import os
import threading
from types import ModuleType
from typing import Any

from vllm_mp.kernels.cpu.library import TRITON, check_interpreter
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE
from vllm_mp.model_store import cache_root

logger = logging.getLogger(__name__)

_CACHE_CLASS = "vllm_mp.kernels.triton.kernel_cache:KernelCache"


class KernelCounts:
    """Counts the kernels that this process has compiled, and those that it has found compiled."""

    def __init__(self) -> None:
        self.num_compiled = self.num_found = 0
        self.seconds = 0.0
        """Spent in the compiler, without that of C which Triton before 3.8 calls for the first launch."""

    def note(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        """Note a kernel, as `triton.knobs.compilation.listener`."""
        if cache_hit:
            self.num_found += 1
        else:
            self.num_compiled += 1
            self.seconds += times.total / 1e6

    def __str__(self) -> str:
        """Return the end of a sentence; empty if no kernel was needed."""
        if not (self.num_compiled or self.num_found):
            return ""
        return (
            f"; {self.num_compiled} kernels were compiled in {self.seconds:.1f} s and {self.num_found} found compiled"
        )


kernel_counts = KernelCounts()


@functools.cache
def operations(device_type: str) -> ModuleType | None:
    """Return kernels/triton/operations.py for tensors on that type of device; None if Triton is not used there.

    Raises ValueError if the environment asks for Triton on the CPU without its interpreter.
    """
    if device_type == "cpu":
        if os.environ.get(KERNELS_VARIABLE) != TRITON:
            return None
        check_interpreter()
    elif device_type != "cuda":
        return None
    elif importlib.util.find_spec("triton") is None:
        logger.warning("triton is not installed, so torch computes, several times slower; run `pip install triton`")
        return None
    # Products and sums are fused except where a kernel asks for exact roundings; Triton 3.9 warns where nothing is set.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if device_type == "cuda":
        keep_compiled_kernels()
    from triton import knobs

    from vllm_mp.kernels.triton import operations as computed

    knobs.compilation.listener = knobs.compilation.listener or kernel_counts.note
    return computed


def keep_compiled_kernels() -> None:
    """Have Triton keep compiled kernels in the folder "kernels" of the cache folder, unless its variables say where.

    Of each kernel only what runs is kept, without the stages of its compilation.
    """
    if not ("TRITON_CACHE_DIR" in os.environ or "TRITON_HOME" in os.environ):
        with contextlib.suppress(OSError):  # no home folder: Triton's own place is as good
            os.environ["TRITON_CACHE_DIR"] = str(cache_root() / "kernels")
    os.environ.setdefault("TRITON_CACHE_MANAGER", _CACHE_CLASS)
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")


def prepare(device_type: str) -> threading.Thread | None:
    """Import the kernels for a GPU and return a thread that does what their first launch would wait for.

    Return None if no kernel is launched on that type of device.

    Triton looks for a compiled kernel by a hash of all its own files, which are 500 MB. That takes half a second, in
    which other threads can run.
    """
    if device_type != "cuda" or operations(device_type) is None:
        return None
    from triton.runtime.cache import triton_key

    thread = threading.Thread(target=triton_key, name="triton-key", daemon=True)
    thread.start()
    return thread
