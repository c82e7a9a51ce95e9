"""What cores reserve on a Ray cluster, and what a cluster without room lacks."""

import msgspec
import pytest

from vllm_mp.client.cores.lasting_calls import LastingCalls
from vllm_mp.client.ray.resources import bundle_of, no_room
from vllm_mp.config import DeviceConfig, ParallelConfig


class Config(msgspec.Struct):
    """The sections of the configuration that matter here."""

    device_config: DeviceConfig
    parallel_config: ParallelConfig


def config_of(device, num_threads=0, ranks=1, nnodes=1):
    parallel = ParallelConfig(tensor_parallel_size=ranks, nnodes=nnodes)
    return Config(DeviceConfig(device=device, num_threads=num_threads), parallel)


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("config", "has_gpus", "bundle"),
    [
        (config_of("auto", ranks=2), True, {"CPU": 2, "GPU": 2}),
        (config_of("auto", ranks=2), False, {"CPU": 2}),
        (config_of("cuda"), False, {"CPU": 1, "GPU": 1}),
        (config_of("cpu", num_threads=8, ranks=2), True, {"CPU": 8}),
        (config_of("cpu"), True, {"CPU": 1}),
        (config_of("auto", ranks=8, nnodes=2), True, {"CPU": 4, "GPU": 4}),
        (config_of("cpu", num_threads=3, ranks=4, nnodes=2), True, {"CPU": 3}),
        (config_of("cpu", ranks=4, nnodes=2), True, {"CPU": 2}),
    ],
)
def test_core_reserves_a_gpu_for_each_rank_of_a_node_or_a_cpu_for_each_thread(config, has_gpus, bundle):
    assert bundle_of(config, has_gpus) == bundle


@pytest.mark.parametrize(
    ("ranks", "nodes", "words"),
    [
        (4, [node(CPU=8.0, GPU=3.0)] * 4, "for 4 of the 4 ranks of a core: give nnodes=2, "),
        (4, [node(CPU=8.0, GPU=1.0)] * 8, "for 4 of the 4 ranks of a core: give nnodes=4, "),
        (4, [node(CPU=8.0, GPU=2.0)] * 3, "for 4 of the 4 ranks of a core: lower tensor_parallel_size"),
        (1, [node(CPU=8.0), node(alive=False, CPU=8.0, GPU=1.0)], "no node has that: lower num_threads"),
        (1, [node(CPU=8.0, GPU=1.0)], "lower data_parallel_size"),
        (1, [], "its nodes have in all, used or not: no node"),
    ],
)
def test_lack_of_room_is_told_with_its_remedy(ranks, nodes, words):
    config = config_of("cuda", ranks=ranks)
    assert words in no_room(config, bundle_of(config, True), 2, nodes)


@pytest.mark.parametrize(
    ("nnodes", "words"),
    [
        (2, "no room for 4 x {4 CPU, 4 GPU}, nnodes=2 for each core"),
        (2, "no node has that for 4 of the 8 ranks of a core: lower tensor_parallel_size"),
        (4, "lower data_parallel_size, add nodes"),
    ],
)
def test_lack_of_room_for_cores_on_several_nodes_is_told_with_its_remedy(nnodes, words):
    config = config_of("cuda", ranks=8, nnodes=nnodes)
    assert words in no_room(config, bundle_of(config, True), 2, [node(CPU=8.0, GPU=2.0)] * 2)


def test_lasting_calls_bring_a_new_core_into_the_state_of_the_others():
    calls = LastingCalls()
    for name, *args in [
        ("add_lora", "a", 1, "/a", False),
        ("add_lora", "b", 2, "/b", False),
        ("pin_lora", 2),
        ("remove_lora", 1),
        ("pause", "keep", True),
        ("pause", "keep", True),  # a second core reports the same call
        ("sleep", 1, "keep"),
        ("wake_up", "weights"),
        ("ping",),
    ]:
        calls.note(name, tuple(args))
    adapters = [("add_lora", ("b", 2, "/b", False)), ("pin_lora", (2,))]
    assert calls.calls() == [*adapters, ("sleep", (1, "keep")), ("wake_up", ("weights",)), ("pause", ("keep", True))]
    calls.note("wake_up", ("kv_cache",))
    calls.note("resume", ())
    assert calls.calls() == adapters
