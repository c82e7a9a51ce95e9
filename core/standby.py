"""A core that has everything imported and waits for its launch."""

import contextlib
import os
import select

_LOOK_MS = 2000


def wait_for_launch() -> bool:
    """Import what takes a core long, then wait; True when there is something to read on standard input.

    False when standard input ends or the parent dies: nobody will launch this core. What cannot be imported is left
    to the launch, which fails with its message.
    """
    parent = os.getppid()
    with contextlib.suppress(Exception):
        _import_all()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # A child that the parent forked may hold the other end of the pipe open after the parent's death.
    while not (events := poll.poll(_LOOK_MS)) and os.getppid() == parent:
        pass
    return any(event & select.POLLIN for _, event in events)


def _import_all() -> None:
    import torch

    import vllm_mp.core.engine_core
    import vllm_mp.core.worker.model_runner  # noqa: F401

    # The first operation on each path takes as long as some imports.
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            torch.nn.functional.linear(torch.ones(32, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)).sum().item()
