"""The progress bar of a batch of prompts."""

import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_mp.outputs import PoolingRequestOutput, RequestFailure, RequestOutput

UseTqdm = bool | Callable[..., Any]
"""True: a bar on stderr if it is a terminal; a callable, such as `functools.partial(tqdm, leave=False)`, makes the bar,
also where there is no terminal; False: no bar."""


class ProgressBar:
    """Counts the prompts that have ended, with the speed in tokens per second, as vLLM's bar does."""

    def __init__(self, use_tqdm: UseTqdm, total: int | None) -> None:
        """`total` is the number of prompts, None if it is not known."""
        self._bar: Any = None
        self._start = time.monotonic()
        self._num_in = self._num_out = 0
        if use_tqdm is True and sys.stderr.isatty():
            from tqdm import tqdm

            use_tqdm = tqdm
        if callable(use_tqdm):
            self._bar = use_tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed())

    def add(self, output: RequestOutput | PoolingRequestOutput | RequestFailure) -> None:
        """Count a prompt that has ended."""
        if self._bar is None:
            return
        if isinstance(output, RequestOutput):
            self._num_in += len(output.prompt_token_ids) * len(output.outputs)
            self._num_out += sum(len(completion.token_ids) for completion in output.outputs)
            self._bar.postfix = self._speed()
        self._bar.update(1)

    def refresh(self) -> None:
        """Show the time that has passed."""
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.refresh()  # the last update may have been too soon after the one before
            self._bar.close()

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"est. speed input: {self._num_in / seconds:.2f} toks/s, output: {self._num_out / seconds:.2f} toks/s"
