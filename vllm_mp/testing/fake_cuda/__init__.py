"""A CUDA device without a GPU: tensors without values, and launches, captures and waits that are checked, not run.

`fake_cuda` replaces what the engine uses of `torch.cuda` and of Triton's driver, so that the real start and the real
steps of the CUDA path run on any machine. A `FakeDevice` notes what a device would refuse, or punish with time.

What it cannot tell: values. Numbers that the host reads from the device are zeros.
"""

from vllm_mp.testing.fake_cuda.device import fake_cuda
from vllm_mp.testing.fake_cuda.journal import FakeDevice
from vllm_mp.testing.fake_cuda.steps import watch_steps

__all__ = ["FakeDevice", "fake_cuda", "watch_steps"]
