"""A call that fails on one of the ranks leaves all ranks in the same state."""

import contextlib
from pathlib import Path

import pytest
import torch

from vllm_mp.core.parallel.followers import Followers, GroupMemory, GroupProfiler
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.worker import profiler
from vllm_mp.core.worker.memory import model_memory
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.memory.sleep import MemoryLostError
from vllm_mp.core.worker.profiler import Profiler

CPU = torch.device("cpu")


class OneFollower(Followers):
    """One follower, rank 1, in this process; its methods are given by name."""

    def __init__(self, **methods):
        self._methods = methods
        self._error = None

    def call(self, method, *arguments):
        self._error = None
        try:
            self._methods[method](*arguments)
        except (ValueError, RuntimeError) as error:
            self._error = error
        return 1

    def results(self, number):
        if isinstance(self._error, WorkerFailedError):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"rank 1: {self._error}")
        return [None]


class Weights:
    """Weights of one rank, which may be unable to move in either direction."""

    def __init__(self, offload_error=None, restore_error=None):
        self._offload_error, self._restore_error = offload_error, restore_error
        self.are_on_device = True

    def offload_weights(self):
        if self._offload_error is not None:
            raise self._offload_error
        self.are_on_device = False

    def restore_weights(self):
        if self._restore_error is not None:
            raise self._restore_error
        self.are_on_device = True


def memory_of(own, other):
    methods = {"offload_weights": other.offload_weights, "restore_weights": other.restore_weights}
    return GroupMemory(own, OneFollower(**methods))


@pytest.mark.parametrize("failing", [0, 1])
def test_weights_stay_on_all_devices_when_one_rank_finds_no_host_memory(failing):
    ranks = [Weights(RuntimeError("no memory") if rank == failing else None) for rank in range(2)]
    with pytest.raises(RuntimeError, match="no memory"):
        memory_of(*ranks).offload_weights()
    assert [rank.are_on_device for rank in ranks] == [True, True]


def test_weights_that_cannot_be_restored_after_a_refusal_are_lost():
    ranks = Weights(restore_error=RuntimeError("device is full")), Weights(RuntimeError("no memory"))
    with pytest.raises(MemoryLostError, match=r"rank 1: no memory.*device is full"):
        memory_of(*ranks).offload_weights()


def test_rank_that_ends_while_weights_move_is_no_refusal():
    ranks = Weights(), Weights(WorkerFailedError("rank 1 ended"))
    with pytest.raises(WorkerFailedError, match="rank 1 ended"):
        memory_of(*ranks).offload_weights()


def test_restore_changes_nothing_on_a_rank_whose_weights_have_not_moved(monkeypatch):
    monkeypatch.setattr(model_memory, "release_memory", lambda device: None)
    memory = object.__new__(ModelMemory)
    memory.model, memory._offloaded, memory._device = torch.nn.Linear(2, 2), None, CPU
    before = dict(vars(memory))
    memory.restore_weights()
    assert vars(memory) == before


class Recording:
    """Stands in for PyTorch's `profile`, of which a process has one."""

    def __init__(self, activities):
        pass

    def start(self):
        pass

    def stop(self):
        pass

    def export_chrome_trace(self, path):
        Path(path).touch()


@pytest.fixture
def profilers(monkeypatch, tmp_path):
    """The profilers of both ranks, and the folder of their traces."""
    monkeypatch.setattr(profiler, "profile", Recording)
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    other = Profiler(CPU)
    follower = OneFollower(start_profile=other.start, stop_profile=other.stop, discard_profile=other.discard)
    return GroupProfiler(CPU, follower), other, tmp_path / "traces"


def is_on(of_rank):
    with contextlib.suppress(ValueError):
        of_rank.start()
        of_rank.discard()
        return False
    return True


def test_profilers_of_all_ranks_can_start_again_when_rank_0_cannot_write_its_trace(profilers):
    own, other, folder = profilers
    own.start()
    folder.touch()
    with pytest.raises(ValueError, match="cannot be written"):
        own.stop()
    assert not is_on(other)
    folder.unlink()
    own.start()
    assert own.stop() == str(folder)


def test_no_profiler_is_on_when_one_of_another_rank_cannot_start(profilers, monkeypatch):
    own, other, _ = profilers
    other.start()
    with pytest.raises(ValueError, match="rank 1: the profiler is on already"):
        own.start()
    assert not is_on(other)
    own.start()
