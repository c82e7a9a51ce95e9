"""Cores on the nodes of a Ray cluster."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.ray_cluster import (
    PROMPTS,
    STORE_BYTES,
    add_nodes,
    default_cluster,
    driver_of,
    have_ended,
    is_serving,
    on_ray,
    pids_of,
    rank_hosts,
    running_cluster,
    start_streams,
    tokens_of,
)

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, EngineStartError
from vllm_mp.testing.engines import eventually, greedy, running_engine

pytestmark = pytest.mark.extended  # needs Ray

HIDES_PACKAGE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm_mp":
            raise ModuleNotFoundError("No module named 'vllm_mp'")
sys.meta_path.insert(0, Hidden())
"""
CHANGES_VERSION = """
import vllm_mp
vllm_mp.__version__ = "0.0.9"
"""


@pytest.fixture(scope="module")
def cluster():
    with default_cluster(3) as cluster:
        yield cluster


@pytest.fixture
def add_node(cluster, tmp_path):
    """A function that adds a node on which Python first runs some lines, and which is removed at the end."""
    added = []

    def add(lines, num_cpus):
        folder = tmp_path / str(len(added))
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(lines)
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        added.append(
            cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES, env_vars={"PYTHONPATH": path})
        )

    yield add
    for node in added:
        cluster.remove_node(node)


def kill_node_of(cluster, engine, rank):
    """Kill the node of a core, and return the names of the nodes of all cores before."""
    nodes = [client.supervisor.node for client in engine.cores.clients]
    victim = next(node for node in cluster.nodes if node.node_id[:8] in nodes[rank])
    cluster.nodes.remove(victim)
    cluster.remove_node(victim, allow_graceful=False)
    return nodes


def test_streams_go_on_when_a_node_is_killed_and_another_node_replaces_it(cluster, small_model):
    async def run():
        expected = await asyncio.gather(*start_streams(engine, 100))
        before = (await engine.core_status())["cores"]
        assert len({core["node"] for core in before}) == 2
        streams = start_streams(engine, 100)
        client = engine.cores.client(0)

        async def has_begun():
            return any(stream.awaited[0].num_tokens for stream in client.requests.streams())

        async def is_dead():
            return not client.has_core

        await eventually(has_begun)
        nodes = kill_node_of(cluster, engine, 0)
        await eventually(is_dead)
        assert await asyncio.gather(*streams) == expected
        await eventually(lambda: is_serving(engine), timeout=60)
        after = [core["node"] for core in (await engine.core_status())["cores"]]
        assert after[0] not in nodes
        assert after[1] == nodes[1]
        assert len(await tokens_of(engine, PROMPTS[0], greedy(3), data_parallel_rank=0)) == 3
        pids.extend(await pids_of(engine))

    pids = []
    with on_ray(small_model, data_parallel_size=2) as engine:
        asyncio.run(run())
    asyncio.run(eventually(lambda: have_ended(pids)))


@pytest.mark.slow
def test_killed_core_is_restarted_on_its_node_and_a_killed_driver_gets_a_successor(cluster, small_model):
    async def run():
        [expected] = await asyncio.gather(*start_streams(engine, 60)[:1])
        await engine.pause_generation(mode="keep")
        client = engine.cores.first
        for num_restarts in (1, 0):  # the core is killed, then the driver, with which Ray ends the actor
            paused = start_streams(engine, 60)[0]
            (core, driver), incarnation = await pids_of(engine), client.incarnation
            os.kill(core if num_restarts else driver, signal.SIGKILL)

            async def is_another_core(before=incarnation):
                return client.has_core and client.incarnation != before

            await eventually(is_another_core)
            assert engine.cores.first.supervisor.num_restarts == num_restarts
            assert await engine.is_paused()
            await engine.resume_generation()
            assert await paused == expected
            await engine.pause_generation(mode="keep")

    with on_ray(small_model, engine_use_ray=True) as engine:
        asyncio.run(run())


@pytest.mark.slow
def test_added_core_gets_a_node_and_a_removed_core_frees_it(cluster, small_model):
    async def run():
        assert await engine.add_core() == 1
        assert len({core["node"] for core in (await engine.core_status())["cores"]}) == 2
        await engine.remove_core(1)
        assert await engine.add_core() == 2

    with on_ray(small_model, engine_use_ray=True) as engine:
        asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_threads": 8}, r"no room for 1 x \{8 CPU\}, one for each core.*no node has that: lower num_threads"),
        ({"tensor_parallel_size": 2}, r"no room for 1 x \{2 CPU\}.*no node has that for 2 .*give nnodes=2, which"),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "num_threads": 2},
            r"no room for 2 x \{2 CPU\}, nnodes=2 for each core.*no node has that: lower num_threads",
        ),
    ],
    ids=["one rank", "ranks of one node", "ranks of several nodes"],
)
def test_cluster_without_room_is_an_error_that_says_what_was_asked_and_what_there_is(
    cluster, small_model, options, words
):
    started = time.monotonic()
    with pytest.raises(EngineStartError, match=words) as info:
        AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(small_model), engine_use_ray=True, start_timeout_s=1.0, **options)
        )
    assert "1 CPU; 1 CPU; 0 CPU" in str(info.value)
    assert time.monotonic() - started < 30


@pytest.mark.slow
def test_core_on_another_node_with_other_weights_is_refused(cluster, small_model, tmp_path):
    async def run():
        client = engine.cores.first
        weights = load_file(folder / "model.safetensors")
        save_file({name: 2 * weight for name, weight in weights.items()}, folder / "other", {"format": "pt"})
        os.replace(folder / "other", folder / "model.safetensors")
        os.kill(driver_of(engine), signal.SIGKILL)

        async def has_failed():
            return client.dead_error is not None

        await eventually(has_failed, timeout=60)
        assert "has another model: other weights; copy the same files to all nodes" in str(client.dead_error)

    folder = shutil.copytree(small_model, tmp_path / "model")
    with on_ray(folder, engine_use_ray=True) as engine:
        asyncio.run(run())


def test_address_without_a_cluster_is_an_error(small_model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(EngineStartError, match=r"no Ray cluster answers at 127\.0\.0\.1:1; check it"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(small_model), engine_use_ray=True, start_timeout_s=1.0))


def test_core_that_cannot_start_is_an_error_with_its_node_and_cause(cluster, small_model):
    options = {"engine_use_ray": True, "kv_cache_memory_bytes": 1, "device": "cpu"}
    add_nodes(cluster, up_to=2)
    with pytest.raises(EngineStartError, match=r"core on node \S+ \(\w{8}\) did not start: .*kv_cache_memory_bytes"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(small_model), tensor_parallel_size=2, nnodes=2, **options))
    assert not rank_hosts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "what", "ranks"),
    [(HIDES_PACKAGE, "cannot import vllm-mp", 1), (CHANGES_VERSION, r"has vllm-mp 0\.0\.9", 2)],
    ids=["none", "another version"],
)
def test_node_without_the_package_or_with_another_version_is_an_error(
    cluster, add_node, small_model, lines, what, ranks
):
    add_node(lines, num_cpus=4)
    if ranks == 2:
        add_node("", num_cpus=4)
    options = {"engine_use_ray": True, "num_threads": 4, "tensor_parallel_size": ranks, "nnodes": ranks}
    with pytest.raises(EngineStartError, match=rf"node \S+ \(\w{{8}}\) {what}.*this machine has vllm-mp \d"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(small_model), **options))


@pytest.mark.slow
def test_nothing_is_left_of_a_client_that_is_killed(cluster, small_model):
    script = (
        "import asyncio, sys\n"
        "from vllm_mp import AsyncEngineArgs, AsyncLLM\n"
        "from support.ray_cluster import pids_of\n"
        "options = dict(tensor_parallel_size=2, nnodes=2, worker_use_ray=True)\n"
        "engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], **options))\n"
        "print(*asyncio.run(pids_of(engine)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(small_model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        hosts = [host.pid for host in rank_hosts()]
        process.kill()
    assert len(pids) == 2
    assert len(hosts) == 1
    asyncio.run(eventually(lambda: have_ended([*pids, *hosts])))


@pytest.mark.slow
def test_cluster_that_goes_away_ends_the_engine_with_an_error(small_model, monkeypatch):
    async def run():
        streams = start_streams(engine, 900)
        pids = await pids_of(engine)
        cluster.head_node.kill_all_processes(check_alive=False)
        for error in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(error, EngineDeadError)
            assert f"no Ray cluster answers at {cluster.address}; check it" in str(error)
        await eventually(lambda: have_ended(pids))

    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    with running_cluster(1) as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        # Ray takes up to a minute to end the core, and the streams must last longer.
        with on_ray(small_model, engine_use_ray=True, fault_injection="slow@step=*,seconds=0.1") as engine:
            asyncio.run(run())


@pytest.mark.slow
def test_local_cluster_holds_all_ranks_of_a_core_and_ends_with_the_engine(small_model, monkeypatch):
    async def run():
        status = await engine.core_status()
        assert status["node"].endswith(": 2 CPU")
        assert len(status["rank_pids"]) == 2
        assert len(await tokens_of(engine, PROMPTS[0], greedy(3))) == 3
        return psutil.Process(driver_of(engine)).children(recursive=True)

    monkeypatch.setenv("RAY_ADDRESS", "local")
    with running_engine(small_model, worker_use_ray=True, tensor_parallel_size=2) as engine:
        processes = asyncio.run(run())
    assert processes
    asyncio.run(eventually(lambda: have_ended([process.pid for process in processes])))
