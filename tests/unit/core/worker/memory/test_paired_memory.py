"""A model and its draft model sleep together, or not at all."""

import pytest

from vllm_mp.core.worker.memory.paired_memory import PairedMemory
from vllm_mp.core.worker.memory.sleep import MemoryLostError


class Weights:
    """The memory of a model whose operations in `refused` fail."""

    def __init__(self, *refused):
        self._refused = refused
        self.is_on_device = True

    def offload_weights(self):
        self._fail("offload")
        self.is_on_device = False

    def restore_weights(self):
        self._fail("restore")
        self.is_on_device = True

    def _fail(self, operation):
        if operation in self._refused:
            raise RuntimeError(f"no memory to {operation}")


def offload(target, draft):
    PairedMemory(target, draft, "draft model").offload_weights()


def test_both_models_move_to_host_memory():
    target, draft = Weights(), Weights()
    offload(target, draft)
    assert not target.is_on_device
    assert not draft.is_on_device


def test_model_comes_back_if_its_draft_model_cannot_move():
    target, draft = Weights(), Weights("offload")
    with pytest.raises(RuntimeError, match="no memory to offload"):
        offload(target, draft)
    assert target.is_on_device
    assert draft.is_on_device


def test_model_that_cannot_move_leaves_its_draft_model_where_it_is():
    target, draft = Weights("offload"), Weights()
    with pytest.raises(RuntimeError, match="no memory to offload"):
        offload(target, draft)
    assert draft.is_on_device


def test_model_that_cannot_come_back_is_lost():
    target, draft = Weights("restore"), Weights("offload")
    with pytest.raises(MemoryLostError, match=r"\(no memory to offload\).* restored: no memory to restore"):
        offload(target, draft)
