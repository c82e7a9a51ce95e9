"""Counts what the host gives the device to do, with a CPU in the place of the device."""

import contextlib
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode

from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker.sampling import sampler
from vllm_mp.core.worker.sampling.host_copies import pack, unpack
from vllm_mp.kernels import ops

KERNELS = ("copy_step", "fill_awaited", "argmax", "sample")
"""The operations that are one launch, or a few of their own, on a device."""


class DeviceWork(TorchDispatchMode):
    """Counts copies from the host, kernels, and operations of torch except views.

    Arrays are packed for their copy, as for a GPU.
    """

    def __init__(self):
        super().__init__()
        self.copies = 0
        self.counted = []
        """Names of kernels and operations, in order."""
        self._is_paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self._is_paused and not func.is_view:
            self.counted.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def paused(self):
        """Do not count what this thread does."""
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    @contextlib.contextmanager
    def installed(self, engine):
        """Count the work of `engine` except that of its model and its graphs."""
        with contextlib.ExitStack() as stack:

            def replaced(place, name, make):
                stack.enter_context(patch.object(place, name, make(getattr(place, name))))

            def uncounted(function):
                def call(*args):
                    with self.paused():
                        return function(*args)

                return call

            def kernel(function):
                def call(*args):
                    self.counted.append(function.__name__)
                    with self.paused():
                        return function(*args)

                return call

            def together(_):
                def copy(arrays, device):
                    with self.paused():
                        self.copies += 1
                        return unpack(pack(arrays), arrays)

                return copy

            def alone(to_device):
                def copy(array, device):
                    self.copies += 1
                    return to_device(array, device)

                return copy

            for place in (model_runner, sampler):
                replaced(place, "all_to_device", together)
                replaced(place, "to_device", alone)
            for name in KERNELS:
                replaced(ops, name, kernel)
            graphs = engine.runner.memory.graphs
            if graphs is not None:
                graphs._replays = {key: uncounted(replay) for key, replay in graphs._replays.items()}
            replaced(engine.runner, "_forward", uncounted)
            stack.enter_context(self)
            yield
