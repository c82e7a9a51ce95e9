"""Finds out whether Triton can be used, without importing it."""

import functools
import importlib.util
import logging
import os
from types import ModuleType

from vllm_mp.kernels.cpu.library import TRITON, check_interpreter
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE

logger = logging.getLogger(__name__)


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
        logger.warning("triton is not installed, so torch computes, several times slower; install vllm-mp[cuda]")
        return None
    from vllm_mp.kernels.triton import operations as computed

    return computed
