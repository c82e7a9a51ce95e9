"""The progress of a benchmark, on standard error."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(parts: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar with the remaining time while the block runs, if standard error is a terminal, and then remove it.

    The work has `total` of the named `parts`; the yielded function counts the end of a part. Lines of the log appear
    above the bar.
    """
    from tqdm.contrib.logging import logging_redirect_tqdm

    from vllm_mp.machine.fitted_bar import FittedBar

    with FittedBar(total=total, desc=parts, leave=False, disable=None) as bar, logging_redirect_tqdm():

        def count() -> None:
            bar.update()

        yield count
