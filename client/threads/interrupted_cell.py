"""A cell that Ctrl-C interrupts in IPython's terminal ends, and with it the requests whose outputs it awaits."""

import asyncio
import sys
from typing import Any

_CELL = "InteractiveShell.run_cell_async"
"""Qualified name of the coroutine in which IPython runs a cell."""


def end_interrupted_cells() -> None:
    """Cancel a cell of IPython's terminal when Ctrl-C interrupts it; idempotent, no-op in any other program.

    IPython leaves the coroutine of an interrupted cell suspended: its requests would go on in the core, and the cell
    itself in the next cell that awaits. Jupyter and `asyncio.run` cancel on their own.
    """
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        shell.events.register("post_run_cell", _end_if_interrupted)


def _end_if_interrupted(result: Any) -> None:
    """Cancel the cell whose `result` is an interrupt, and run its event loop until it has ended."""
    if not isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt):
        return
    loop = sys.modules["IPython.core.async_helpers"].get_asyncio_loop()
    if loop.is_running():  # a kernel's loop: the kernel has cancelled the cell
        return
    cells = [task for task in asyncio.all_tasks(loop) if getattr(task.get_coro(), "__qualname__", "") == _CELL]
    for cell in cells:
        cell.cancel()
    if cells:
        loop.run_until_complete(asyncio.wait(cells))
