"""Triton's interpreter, which prepares Triton's language once for each launch of a kernel.

Without this, it searches the modules of the language again at each call of a device function, which takes a third of
the time of the kernels' tests.
"""

import functools
from typing import Any

from triton.runtime import interpreter


@functools.cache
def prepare_once_for_each_launch() -> None:
    """Let a device function use the language as it is prepared if its module was prepared during this launch."""
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in prepared:
            return None
        prepared.add(module)
        return prepare(function)

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()  # the end of a launch restores the language
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang = prepare_once
    interpreter.GridExecutor.__call__ = launch_afresh
