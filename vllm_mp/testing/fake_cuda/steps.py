"""Steps of a core on the fake device, and what they must not do."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from vllm_mp.core.worker.late_captures import LateCaptures
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.pending_output import PendingOutput
from vllm_mp.testing.fake_cuda.journal import FakeDevice


@contextlib.contextmanager
def watch_steps(device: FakeDevice, *, may_wait: bool = False) -> Iterator[None]:
    """Note a fault for each step in the block whose launch or sampling waits for the device or compiles a kernel.

    Captures between steps wait, but must not compile either. With `may_wait`, steps may wait: the host reads which
    experts of a mixture a step needs.
    """

    def watched(what: str, call: Callable[..., Any], waits: bool) -> Callable[..., Any]:
        def watch(*args: Any) -> Any:
            before = len(device.compilations)
            with contextlib.nullcontext() if waits else device.without_waits(what):
                result = call(*args)
            device.faults += [f"{kernel} is compiled in {what}" for kernel in device.compilations[before:]]
            return result

        return watch

    steps = (
        (ModelRunner, "launch", "the launch of a step", may_wait),
        (PendingOutput, "sample", "the sampling of a step", may_wait),
        (LateCaptures, "capture_next", "a capture between steps", True),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, what, waits in steps:
            stack.enter_context(patch.object(owner, name, watched(what, getattr(owner, name), waits)))
        yield
