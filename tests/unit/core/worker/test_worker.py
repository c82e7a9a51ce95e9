"""Calls of a worker's methods by name: a method that fails, or returns what no message can carry, harms no core."""

from types import SimpleNamespace

import pytest
import torch

from vllm_mp.arguments.worker_arguments import pack_arguments
from vllm_mp.core.worker.worker import Worker


class Methods(Worker):
    METHODS = ("fails", "returns_tensor", "returns_itself", "adds")

    def fails(self):
        raise MemoryError("none is left")

    def returns_tensor(self):
        return {"weights": torch.zeros(3)}

    def returns_itself(self):
        return [self]

    def adds(self, first, *, second=1):
        return first + second

    def hidden(self):
        raise AssertionError("it is not in METHODS")


@pytest.fixture
def worker():
    return Methods(SimpleNamespace(), torch.device("cpu"), SimpleNamespace())


def test_listed_method_gets_its_arguments(worker):
    assert worker.call("adds", pack_arguments((3,), {"second": 4})) == 7
    assert worker.call("adds", pack_arguments([3], None)) == 4


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("fails", ((), {}), "fails failed: none is left"),
        ("returns_tensor", ((), {}), "returns_tensor failed: .*Tensor"),
        ("returns_itself", ((), {}), "returns_itself failed"),
        ("adds", ((), {}), "adds: missing a required argument: 'first'"),
        ("adds", ((1, 2), {}), "adds: too many positional arguments"),
        ("adds", ((1,), {"third": 1}), "adds: got an unexpected keyword argument 'third'"),
        ("adds", (("a",), {}), "adds failed"),
        ("hidden", ((), {}), "no public method 'hidden'"),
        ("call", ((), {}), "no public method 'call'"),
        ("reload_weights", ((), {}), r"no public method 'reload_weights'; wake_up\(\) reads the weights again"),
        ("update_weights", ((), {}), "no public method 'update_weights'; weights come from files"),
        ("__init__", ((), {}), "no public method '__init__'"),
        (3, ((), {}), "no public method 3"),
    ],
)
def test_call_that_cannot_work_is_a_value_error(worker, method, arguments, words):
    with pytest.raises(ValueError, match=words):
        worker.call(method, pack_arguments(*arguments))


def test_every_listed_method_of_the_worker_exists_and_is_documented():
    assert all(getattr(Worker, name).__doc__ for name in Worker.METHODS)
