"""The choice between the implementations of the operations."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.torch_version import TorchVersion

from vllm_mp.kernels import ops, reference
from vllm_mp.kernels.cpu.library import TRITON, library
from vllm_mp.kernels.triton import available
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE


@pytest.fixture(autouse=True)
def _fresh():
    caches = (available.operations, library)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_environment_can_send_cpu_tensors_to_triton(monkeypatch):
    pytest.importorskip("triton")
    assert available.operations("cpu") is None
    available.operations.cache_clear()
    monkeypatch.setenv(KERNELS_VARIABLE, TRITON)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    operations = available.operations("cpu")
    assert operations is not None
    called = []
    for name in operations.__all__:
        monkeypatch.setattr(operations, name, lambda *_, name=name: called.append(name))
    x = torch.ones(2, 4, 8)
    for name in operations.__all__:
        arguments = [x] * getattr(ops, name).__code__.co_argcount
        if name == "copy_step":
            arguments[0] = ops.StepColumns(x, x, x, x, x, x, None)
        getattr(ops, name)(*arguments)
    assert called == operations.__all__
    assert set(operations.__all__) <= set(ops.__all__)
    assert library() is None


def test_triton_on_the_cpu_without_its_interpreter_is_refused(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv(KERNELS_VARIABLE, TRITON)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for choose in (lambda: available.operations("cpu"), library, lambda: ops.pack_linear(torch.zeros(4, 4), None)):
        with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 too"):
            choose()


def test_gpu_without_triton_uses_torch_and_warns_once(monkeypatch, caplog):
    monkeypatch.setattr(available.importlib.util, "find_spec", lambda _: None)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert available.operations("cuda") is None
    assert [record.message for record in caplog.records] == [
        "triton is not installed, so torch computes, several times slower; run `pip install triton`"
    ]


def test_cpu_uses_torch_for_single_operations():
    assert available.operations("cpu") is None
    x = torch.randn(3, 8)
    assert torch.equal(ops.rms_norm(x, x[0], 1e-5), reference.rms_norm(x, x[0], 1e-5))


@pytest.mark.parametrize(
    ("version", "capability", "expected"),
    [("2.11.0", (8, 9), False), ("2.11.0", (9, 0), True), ("2.12.0", (8, 9), True)],
)
def test_torch_multiplies_8_bit_floats_only_where_it_stays_on_the_stream(monkeypatch, version, capability, expected):
    products = pytest.importorskip("vllm_mp.kernels.triton.linear")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = SimpleNamespace(device=torch.device("cuda", 0), shape=(64, 32))
    assert products._library_multiplies(torch.bfloat16, weight, torch.empty(64, 1)) == expected
