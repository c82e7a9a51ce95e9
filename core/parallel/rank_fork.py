"""A rank as a fork of its core, which has imported what the rank would import."""

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Final

from vllm_mp.core.sibling_fork import ForkRefused, count_threads, reset_signals
from vllm_mp.core.template import close_all_but, show_arguments
from vllm_mp.machine.forked_process import ForkedProcess

_IMPORTED: Final = "vllm_mp.core.worker.model_runner"
"""A core that has this module has imported everything."""


def fork_rank(inherited: Sequence[int]) -> ForkedProcess | None:
    """Fork a process, a child, that runs the program of a rank and has the descriptors `inherited`, as a new one has.

    None: this process has imported too little, or has other threads, whose locks a fork would copy. Call this before
    anything touches a device.
    """
    try:
        if _IMPORTED not in sys.modules or count_threads() != 1:
            return None
    except ForkRefused:
        return None
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, which counts the threads by itself
        pid = os.fork()
    if pid == 0:
        _run_rank(reader, inherited)
    os.close(reader)
    return ForkedProcess(pid, os.fdopen(writer, "wb"))


def _run_rank(launch: int, inherited: Sequence[int]) -> None:
    """Run the program of a rank, above the frames of the core, and end this process."""
    reset_signals()
    os.dup2(launch, 0)
    close_all_but([0, 1, 2, *inherited])
    show_arguments(["--worker"])
    logging.getLogger().handlers.clear()  # the lines of a rank bear its name
    from vllm_mp.core.parallel.worker_main import main

    code = 1
    try:
        code = main()
        logging.shutdown()
    finally:
        os._exit(code)
