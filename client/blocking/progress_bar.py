"""The progress bar of a batch of prompts."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_mp.outputs import PoolingRequestOutput, RequestFailure, RequestOutput

UseTqdm = bool | Callable[..., Any]
"""True: a bar on stderr if it is a terminal; a callable, such as `functools.partial(tqdm, leave=False)`, makes the bar,
also where there is no terminal; False: no bar."""

_FORMS = (
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {speed}]",
    "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {speed}]",
    "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
    "{percentage:3.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
    "{percentage:3.0f}% {n_fmt}/{total_fmt}",
)
_UNCOUNTED_FORMS = (
    "{desc}: {n_fmt} [{elapsed}, {rate_fmt}{postfix}]",
    "{desc}: {n_fmt} [{elapsed}, {speed}]",
    "{n_fmt} [{elapsed}, {speed}]",
    "{n_fmt} [{elapsed}]",
)
"""What the bar shows, from much to little; without the number of prompts it has no bar. See `FittedBar`."""


class ProgressBar:
    """Counts the prompts that have ended, with the speed in tokens per second, as vLLM's bar does."""

    def __init__(self, use_tqdm: UseTqdm, total: int | None) -> None:
        """`total` is the number of prompts, None if it is not known."""
        self._bar: Any = None
        self._fields: dict[str, str] = {}
        self._start = time.monotonic()
        self._num_in = self._num_out = 0
        if use_tqdm is True and sys.stderr.isatty():
            from vllm_mp.machine.fitted_bar import FittedBar

            self._fields = {"speed": self._short_speed()}
            forms = _UNCOUNTED_FORMS if total is None else _FORMS
            use_tqdm = functools.partial(FittedBar, forms=forms, fields=self._fields)
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
            self._fields["speed"] = self._short_speed()
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
        """Return the speeds as vLLM's bar shows them."""
        seconds = self._seconds()
        return f"est. speed input: {self._num_in / seconds:.2f} toks/s, output: {self._num_out / seconds:.2f} toks/s"

    def _short_speed(self) -> str:
        return f"output: {self._num_out / self._seconds():.0f} toks/s"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._start, 1e-9)
