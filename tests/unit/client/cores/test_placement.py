"""Which CPUs and which GPU each rank of each core gets, as `vllm-mp env` and the log of each rank say it."""

import os
from types import SimpleNamespace

import msgspec
import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.cli import env
from vllm_mp.client.cores import placement
from vllm_mp.client.cores.placement import config_of_place
from vllm_mp.core.worker.device import choose_device, choose_threads
from vllm_mp.machine import host_cpus


@pytest.fixture
def config(default_model, monkeypatch, tmp_path):
    """A function that makes a configuration, on a machine with two NUMA nodes of four CPUs and two GPUs at each."""
    usable = frozenset(range(8))
    nodes = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    for number in range(4):
        folder = tmp_path / f"0000:{number + 1:02x}:00.0"
        folder.mkdir()
        (folder / "numa_node").write_text(f"{number // 2}\n")
    monkeypatch.setattr(host_cpus, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(host_cpus, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def make(device, num_cores, num_ranks):
        made = AsyncEngineArgs(str(default_model), device="cpu").create_engine_config()
        made.parallel_config.data_parallel_size = num_cores
        made.parallel_config.tensor_parallel_size = num_ranks
        return msgspec.structs.replace(made, device_config=msgspec.structs.replace(made.device_config, device=device))

    return make


def logged(config, caplog, num_cores, num_ranks):
    """Return the lines that the ranks of all cores log."""
    with caplog.at_level("INFO"):
        for core in range(num_cores):
            of_core = config_of_place(config, core)
            for rank in range(num_ranks):
                choose_device(of_core, rank)
                choose_threads(of_core, rank)
    return caplog.messages


def told(gpus, num_cores, num_ranks):
    """Return what `vllm-mp env` says of each core."""
    (line,) = [
        line.partition(": ")[2].split("; ")
        for line in env._placement(gpus)
        if line.startswith(
            f"data_parallel_size={num_cores}, pipeline_parallel_size * tensor_parallel_size={num_ranks}: "
        )
    ]
    return line


@pytest.mark.parametrize(("num_cores", "num_ranks"), [(1, 2), (2, 1), (2, 2), (4, 2), (1, 8)])
def test_ranks_get_the_cpus_that_env_shows_and_the_log_says(config, caplog, num_cores, num_ranks):
    shown = told([], num_cores, num_ranks)
    places = [
        line.partition(" on ")[2] for line in logged(config("cpu", num_cores, num_ranks), caplog, num_cores, num_ranks)
    ]
    for core in range(num_cores):
        of_core = places[core * num_ranks : (core + 1) * num_ranks]
        assert shown[core] == f"core {core}: {' | '.join(of_core)}"
    assert len(set(places)) == num_cores * num_ranks
    assert all("(NUMA nodes 0 of 2)" in place or "(NUMA nodes 1 of 2)" in place for place in places)


@pytest.mark.parametrize(("num_cores", "num_ranks"), [(1, 4), (2, 2), (4, 1)])
def test_ranks_get_the_gpus_that_env_shows_and_the_log_says(config, caplog, monkeypatch, num_cores, num_ranks):
    current = []
    properties = {"name": "A GPU", "pci_domain_id": 0, "pci_device_id": 0}
    for name, stand_in in {
        "is_available": lambda: True,
        "device_count": lambda: 4,
        "set_device": current.append,
        "current_device": lambda: current[-1],
        "get_device_properties": lambda index: SimpleNamespace(**properties, pci_bus_id=index + 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    lines = logged(config("cuda", num_cores, num_ranks), caplog, num_cores, num_ranks)
    for place, line in enumerate(lines):
        core, rank = divmod(place, num_ranks)
        assert line.startswith(
            f"core {core}, rank {rank}: computing on GPU {place} (A GPU, NUMA node {place // 2}) with "
        )
        assert line.endswith(" threads on CPUs 0-7 (NUMA nodes 0-1 of 2)")
        assert (
            told(["0", "1", "2", "3"], num_cores, num_ranks)[core].split(": ")[1].split(" | ")[rank] == f"GPU {place}"
        )


def test_ranks_of_all_stages_need_gpus_of_their_own(config, monkeypatch):
    made = config("cuda", 1, 2)
    made.parallel_config.pipeline_parallel_size = 3
    used = []
    for name, stand_in in {"is_available": lambda: True, "device_count": lambda: 4, "set_device": used.append}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    assert [choose_device(made, rank).index for rank in range(4)] == [0, 1, 2, 3] == used
    refusal = "pipeline_parallel_size=3, tensor_parallel_size=2, nnodes=1: rank 4 of core 0 has no GPU of its own"
    with pytest.raises(ValueError, match=refusal):
        choose_device(made, 4)


@pytest.mark.parametrize(("visible", "expected"), [(None, ""), ("1", ""), ("", "0-3"), ("-1", "0-3")])
def test_cores_divide_the_cpus_if_all_gpus_are_hidden(config, monkeypatch, tmp_path, visible, expected):
    monkeypatch.setattr(placement, "_NVIDIA_DRIVER", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert config_of_place(config("auto", 2, 1), 0).device_config.cpus == expected


def test_env_names_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert env._visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert told(env._visible_gpus(4), 2, 1) == ["core 0: GPU 3", "core 1: GPU GPU-5a"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert env._visible_gpus(4) == []
