"""The host prepares a step with one copy to the device, and with one kernel if it needs any."""

import contextlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.local_engine import LocalEngine
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker.sampling import sampler
from vllm_mp.core.worker.sampling.host_copies import all_to_device, pack, unpack
from vllm_mp.kernels import ops
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

KERNELS = ("copy_step", "fill_awaited", "argmax", "sample")
"""The operations that are one launch, or a few of their own, on a device."""


class DeviceWork(TorchDispatchMode):
    """Counts copies from the host, kernels, and operations of torch except views.

    The device is the CPU. Arrays are packed for their copy, as for a GPU.
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


PROMPTS = random_prompts((9, 3, 30, 1, 12))
RANDOM = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_random_model(CONFIGS["llama"], folder)
    return folder


def stand_in(device):
    """Return a `Capture` for the CPU, whose replays call the computation again."""
    return lambda compute: compute


def test_packed_arrays_come_out_as_they_were_and_begin_where_triton_expects_them():
    arrays = [
        np.arange(3),
        np.arange(7, dtype=np.int32),
        np.zeros(0, np.float32),
        np.arange(12, dtype=np.int32).reshape(3, 4)[:, 1:3],
        np.array([0.5, 1.5, 2.5]),
        np.array([True, False, True]),
    ]
    packed = pack(arrays)
    tensors = unpack(packed, arrays)
    for array, tensor, from_host in zip(arrays, tensors, all_to_device(arrays, torch.device("cpu")), strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert torch.equal(tensor, from_host)
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - packed.data_ptr()) % 16 == 0


def counted(engine, steps, prompts=PROMPTS, **params):
    """Start `prompts`, then count the device work of one more step after `steps`; return the step and the counts."""
    engine.runner._nan_check_required = False  # as with Triton's attention
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, max_tokens=20, **params)
    for _ in range(steps):
        engine.step()
    step, work = engine.scheduler.schedule(), DeviceWork()
    with work.installed(engine):
        output = engine.runner.launch(step, engine.batch, engine.sampler)
        launched = work.copies, list(work.counted)
        output.sample()
    sampled = work.copies - launched[0], work.counted[len(launched[1]) :]
    return step, launched, sampled


def test_decode_step_takes_one_copy_and_one_kernel_before_its_graph(folder):
    engine = LocalEngine(folder, make_capture=stand_in, async_scheduling=True)
    step, launched, sampled = counted(engine, steps=6, num_logprobs=-1)
    assert step.num_decodes == len(step.rows) == len(step.awaits) == 5
    assert launched == (1, ["copy_step"])
    assert sampled[0] == 0
    assert not {"index", "index_copy_", "clamp"} & set(sampled[1]), "the next step reads the tokens where they are"


def test_draw_takes_one_copy_of_all_sampling_parameters(folder):
    engine = LocalEngine(folder, make_capture=stand_in, async_scheduling=True)
    _, launched, sampled = counted(engine, steps=6, num_logprobs=-1, **RANDOM)
    assert launched == (1, ["copy_step"])
    assert sampled[0] == 1, "the parameters"
    assert "sample" in sampled[1]


def test_prefill_takes_one_copy_and_a_kernel_only_for_awaited_tokens(folder):
    engine = LocalEngine(folder, async_scheduling=True, max_num_batched_tokens=16)
    step, launched, _ = counted(engine, steps=0)
    assert not len(step.awaits)
    assert launched == (1, [])
    engine = LocalEngine(folder, async_scheduling=True, max_num_batched_tokens=16)
    step, launched, _ = counted(engine, steps=3)
    assert 0 < len(step.awaits) < len(step.rows)
    assert launched == (1, ["fill_awaited"])
