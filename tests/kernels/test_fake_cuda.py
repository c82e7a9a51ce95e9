"""The fake CUDA device finds what a real one would refuse, or punish with time."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from vllm_mp.core.worker.cuda_graphs import cuda_capture
from vllm_mp.core.worker.sampling.host_copies import HostCopies, all_to_device, to_device
from vllm_mp.kernels import ops
from vllm_mp.testing.fake_cuda import fake_cuda
from vllm_mp.testing.fake_cuda.launches import copy_of

CUDA = torch.device("cuda")


@pytest.fixture
def device():
    with fake_cuda() as device, torch.inference_mode():
        yield device


def only_fault(device):
    (fault,) = device.faults
    return fault


def rows(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=CUDA)


def capture_of(compute):
    """Capture `compute` without the trials before, which `cuda_capture` makes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph


def test_replay_of_a_capture_without_fault_launches_nothing(device):
    x = rows(4, 64)
    replay = cuda_capture(CUDA)(lambda: ops.silu_and_mul(x))
    launched = dict(device.kernels)
    assert replay().shape == (4, 32)
    assert (device.num_captures, device.num_replays, device.kernels) == (1, 1, launched)
    assert not device.faults


@pytest.mark.parametrize(
    ("wait", "named"),
    [
        (lambda x: x.sum().item(), "item waits"),
        (lambda x: bool(x.sum() > 0), "item waits"),
        (lambda x: x.tolist(), "item waits"),
        (lambda x: x.cpu(), "a copy to the host waits"),
        (lambda x: x.nonzero(), "nonzero waits"),
        (lambda x: x[x > 0], "nonzero waits"),
        (lambda x: x[torch.arange(2)], "a tensor on the host waits"),
        (lambda x: torch.zeros(2).copy_(x[0, :2]), "a copy to the host waits"),
        (lambda x: torch.cuda.synchronize(), "synchronize waits"),
    ],
)
def test_wait_in_a_capture_raises_as_in_cuda_and_is_a_fault(device, wait, named):
    x = rows(4, 64)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        capture_of(lambda: wait(x))
    assert f"{named} for the device during a capture at test_fake_cuda.py:" in only_fault(device)
    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda_capture(CUDA)(lambda: wait(x))


def test_specialization_that_is_new_in_a_capture_is_a_fault(device):
    ops.silu_and_mul(rows(4, 64))
    capture_of(lambda: ops.silu_and_mul(rows(8, 64)))
    assert not device.faults, "another number of rows is the same kernel"
    capture_of(lambda: ops.silu_and_mul(rows(4, 128)))
    assert only_fault(device).startswith("_activation_kernel is compiled during a capture at activations.py:")


def test_tensor_that_is_not_aligned_takes_another_specialization(device):
    x = rows(5, 64)
    ops.silu_and_mul(x)
    ops.silu_and_mul(x[1:])
    assert len(device.compilations) == 1
    ops.silu_and_mul(rows(5 * 64 + 1)[1:].view(5, 64))
    assert len(device.compilations) == 2


def test_grid_that_cuda_refuses_is_a_fault(device):
    masks, at = rows(1, 2**22, dtype=torch.int32), rows(1, dtype=torch.int64)
    ops.apply_token_masks(rows(1, 2**26 - 1024), masks, at)
    assert not device.faults
    ops.apply_token_masks(rows(1, 2**26), masks, at)
    assert "_token_mask_kernel is launched with 65536 programs along y; there may be 1 to 65535" in only_fault(device)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits": lambda: rows(2, 200)[:, :96]}, "has strides (200, 1) for [2, 96], of which the kernel is not told"),
        ({"masks": lambda: rows(2, 3, dtype=torch.int64)}, "masks of _token_mask_kernel is torch.int64, and declared"),
        ({"rows": lambda: torch.zeros(2, dtype=torch.int64)}, "rows of _token_mask_kernel is on the host"),
    ],
)
def test_tensor_that_a_kernel_would_read_wrongly_is_a_fault(device, change, named):
    arguments = {
        "logits": lambda: rows(2, 96),
        "masks": lambda: rows(2, 3, dtype=torch.int32),
        "rows": lambda: rows(2, dtype=torch.int64),
    }
    ops.apply_token_masks(**{name: make() for name, make in (arguments | change).items()})
    assert named in only_fault(device)


def test_program_that_takes_too_much_shared_memory_is_a_fault(device, monkeypatch):
    launch, weight = copy_of("launch"), rows(4096, 4096)
    options = launch.linear_options(4096, 4096, "16", weight.device)
    ops.linear(rows(1, 4096), weight)
    assert not device.faults
    key = launch.linear_key(4096, 4096, "16")
    monkeypatch.setitem(launch.table(weight.device), key, {**options, "num_stages": 9})
    ops.linear(rows(1, 4096), weight)
    assert "_few_rows_kernel takes 393,216 bytes of shared memory or more" in only_fault(device)


def test_copies_from_pinned_memory_do_not_wait_and_others_do(device):
    array = np.arange(5)
    with device.without_waits("a step"):
        to_device(array, CUDA)
        all_to_device([array, array], CUDA)
        assert not device.faults
        torch.from_numpy(array).to(CUDA, non_blocking=True)
    assert "a copy from memory that is not pinned waits for the device in a step" in only_fault(device)


def test_host_reads_the_results_only_after_it_has_waited(device):
    stream = torch.cuda.Stream()
    early, late = HostCopies(stream), HostCopies(stream)
    before, after = early.take(rows(3, dtype=torch.int64)), late.take(rows(3, dtype=torch.int64))
    early.end()
    late.end()
    assert before.tolist() != [0, 0, 0]
    early.wait()
    assert before.tolist() == [0, 0, 0]
    assert after.tolist() != [0, 0, 0], "its copy was begun after that for which the host has waited"


def test_replay_that_uses_released_memory_is_a_fault(device):
    inputs = [rows(4, 64)]
    ops.silu_and_mul(inputs[0])
    graph = capture_of(lambda: ops.silu_and_mul(inputs[0]) + ops.silu_and_mul(rows(4, 64)))
    graph.replay()
    assert not device.faults
    inputs.clear()
    graph.replay()
    assert "a replay uses 1 tensors whose memory was released" in only_fault(device)
