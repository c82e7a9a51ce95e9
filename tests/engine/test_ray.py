"""Cores on the nodes of a Ray cluster: several nodes on this machine, as Ray's own tests have them."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file, save_file
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, EngineStartError, SamplingParams
from vllm_mp.testing.engines import eventually, greedy, running_engine

pytest.importorskip("ray", reason="needs Ray: pip install 'vllm-mp[ray]'")
from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
PROMPTS = [f"{subject} is known for" for subject in ("The river", "A castle", "This song", "Her garden")]
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


@contextlib.contextmanager
def running_cluster(num_nodes):
    """Run a cluster of a head without CPUs and nodes with one CPU each, which notices a lost node soon."""
    settings = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 0, "health_check_failure_threshold": 3}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "_system_config": settings}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.nodes = []
        add_nodes(cluster, up_to=num_nodes)
        yield cluster
    finally:
        cluster.shutdown()


def add_nodes(cluster, up_to):
    """Add nodes with one CPU each until there are `up_to`."""
    while len(cluster.nodes) < up_to:
        cluster.nodes.append(cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES))


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch, running_cluster(3) as cluster:
        patch.setenv("RAY_ADDRESS", cluster.address)
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


def on_ray(model, **options):
    """Return a context manager that runs an engine with slow steps on Ray."""
    return running_engine(model, **{"data_parallel_backend": "ray", "fault_injection": SLOW_STEPS, **options})


def driver_of(engine):
    """Return the pid of the driver process of an engine on Ray."""
    return engine._supervisor._source._driver._popen.pid


async def pids_of(engine):
    """Return the pids of the cores and of the driver process."""
    status = await engine.core_status()
    return [core["pid"] for core in status.get("cores", [status])] + [driver_of(engine)]


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def have_ended(pids):
    return not any(map(is_running, pids))


def rank_hosts():
    """Return the rank hosts that run on the nodes, all of which are children of this process."""
    processes = psutil.Process().children(recursive=True)
    return [process for process in processes if is_running(process.pid) and "--rank-host" in process.cmdline()]


def nodes_of(client):
    """Return the names of the nodes of a core."""
    return client.supervisor.node.partition(": ")[0].split(" and ")


async def tokens_of(engine, prompt, params, **options):
    async for output in engine.generate(prompt, params, **options):
        last = output
    return last.outputs[0].token_ids


def start_streams(engine, max_tokens):
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=max_tokens, ignore_eos=True) for i in range(4)]
    return [asyncio.ensure_future(tokens_of(engine, *case)) for case in zip(PROMPTS, params, strict=True)]


async def all_tokens(engine, max_tokens):
    return await asyncio.gather(*start_streams(engine, max_tokens))


async def is_serving(engine):
    return all(client.has_core for client in engine._cores.clients)


def kill_node_of(cluster, engine, rank):
    """Kill the node of a core, and return the names of the nodes of all cores before."""
    nodes = [client.supervisor.node for client in engine._cores.clients]
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
        client = engine._cores.client(0)

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


@pytest.mark.parametrize(
    "size", ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)]
)
def test_ranks_on_two_nodes_stream_the_tokens_of_one_process(cluster, small_model, size):
    async def run():
        status = await engine.core_status()
        assert status["rank_nodes"] == [0, 1]
        assert status["node"].count("node ") == 2
        assert status["node"].endswith(": 1 CPU each")
        assert await asyncio.gather(*start_streams(engine, 40)) == expected
        return [status["pid"], driver_of(engine), *status["rank_pids"]]

    with running_engine(small_model, num_threads=1) as engine:
        expected = asyncio.run(all_tokens(engine, 40))
    with running_engine(small_model, worker_use_ray=True, nnodes=2, **{size: 2}) as engine:
        pids = asyncio.run(run())
    asyncio.run(eventually(lambda: have_ended(pids)))


async def tokens_after(engine, strike, max_tokens):
    """Return the tokens of streams in the midst of which `strike` is called."""
    streams = start_streams(engine, max_tokens)

    async def has_begun():
        return any(stream.awaited[0].num_tokens for stream in engine._cores.first.requests.streams())

    await eventually(has_begun)
    strike()
    return await asyncio.gather(*streams)


@pytest.mark.parametrize("index", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_streams_go_on_when_a_node_of_a_core_with_two_is_killed(cluster, small_model, index):
    async def run():
        expected = await all_tokens(engine, 60)
        before = nodes_of(engine._cores.first)
        [victim] = [node for node in cluster.nodes if node.node_id[:8] in before[index]]
        cluster.nodes.remove(victim)
        assert await tokens_after(engine, lambda: cluster.remove_node(victim, allow_graceful=False), 60) == expected
        after = nodes_of(engine._cores.first)
        assert len(set(after)) == 2
        assert before[index] not in after
        pids.extend(await pids_of(engine))
        pids.extend((await engine.core_status())["rank_pids"])

    pids = []
    add_nodes(cluster, up_to=3)
    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2) as engine:
        asyncio.run(run())
    asyncio.run(eventually(lambda: have_ended(pids)))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "rank host", "actor"])
def test_killed_process_of_the_second_node_is_replaced(cluster, small_model, what):
    async def run():
        expected = await all_tokens(engine, 60)
        rank = psutil.Process((await engine.core_status())["rank_pids"][1])
        victims = dict(zip(("rank", "rank host", "actor"), (rank, *rank.parents()), strict=False))
        pids = [process.pid for process in victims.values()][: 1 + list(victims).index(what)]
        assert await tokens_after(engine, victims[what].kill, 60) == expected
        assert await have_ended(pids)
        assert engine._supervisor.num_restarts == (what != "actor")

    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2) as engine:
        asyncio.run(run())


@pytest.mark.slow
def test_killed_core_is_restarted_on_its_node_and_a_killed_driver_gets_a_successor(cluster, small_model):
    async def run():
        [expected] = await asyncio.gather(*start_streams(engine, 60)[:1])
        await engine.pause_generation(mode="keep")
        client = engine._cores.first
        for num_restarts in (1, 0):  # the core is killed, then the driver, with which Ray ends the actor
            paused = start_streams(engine, 60)[0]
            (core, driver), incarnation = await pids_of(engine), client.incarnation
            os.kill(core if num_restarts else driver, signal.SIGKILL)

            async def is_another_core(before=incarnation):
                return client.has_core and client.incarnation != before

            await eventually(is_another_core)
            assert engine._supervisor.num_restarts == num_restarts
            assert await engine.is_paused()
            await engine.resume_generation()
            assert await paused == expected
            await engine.pause_generation(mode="keep")

    with on_ray(small_model, engine_use_ray=True) as engine:
        asyncio.run(run())


@pytest.mark.slow
def test_core_whose_rank_host_hangs_is_placed_again(cluster, small_model):
    async def run():
        expected = await all_tokens(engine, 20)
        [host] = rank_hosts()
        rank = psutil.Process((await engine.core_status())["rank_pids"][1])
        host.suspend()

        async def is_replaced():
            return await have_ended([host.pid, rank.pid]) and await is_serving(engine)

        await eventually(is_replaced, timeout=120)
        assert await all_tokens(engine, 20) == expected

    limits = {"engine_iteration_timeout_s": 3.0, "start_timeout_s": 25.0}
    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2, **limits) as engine:
        asyncio.run(run())


@pytest.mark.slow
def test_each_of_several_cores_has_two_nodes_and_a_removed_core_frees_them(cluster, small_model):
    async def run():
        for added in (None, 2):
            if added:
                await engine.remove_core(0)
                assert await engine.add_core() == added
            for client in engine._cores.clients:
                assert len(set(nodes_of(client))) == 2
            assert len({node for client in engine._cores.clients for node in nodes_of(client)}) == 4
            tokens = [await tokens_of(engine, PROMPTS[0], greedy(9), data_parallel_rank=i) for i in (1, added or 0)]
            assert tokens[0] == tokens[1]
            assert len(tokens[0]) == 9

    add_nodes(cluster, up_to=4)
    with on_ray(small_model, data_parallel_size=2, nnodes=2, tensor_parallel_size=2) as engine:
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
        client = engine._cores.first
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


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_core_that_cannot_start_is_an_error_with_its_node_and_cause(cluster, small_model, ranks):
    options = {"engine_use_ray": True, "kv_cache_memory_bytes": 1, "device": "cpu"}
    add_nodes(cluster, up_to=ranks)
    with pytest.raises(EngineStartError, match=r"core on node \S+ \(\w{8}\) did not start: .*kv_cache_memory_bytes"):
        AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(small_model), tensor_parallel_size=ranks, nnodes=ranks, **options)
        )
    assert not rank_hosts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "what"), [(HIDES_PACKAGE, "cannot import vllm-mp"), (CHANGES_VERSION, r"has vllm-mp 0\.0\.9")]
)
@pytest.mark.parametrize("ranks", [1, 2])
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
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_of_a_client_that_is_killed(cluster, small_model, ranks):
    script = (
        "import asyncio, sys\n"
        "from vllm_mp import AsyncEngineArgs, AsyncLLM\n"
        "from test_ray import pids_of\n"
        "options = dict(tensor_parallel_size=int(sys.argv[2]), nnodes=int(sys.argv[2]), worker_use_ray=True)\n"
        "engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=sys.argv[1], **options))\n"
        "print(*asyncio.run(pids_of(engine)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(small_model), str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        hosts = [host.pid for host in rank_hosts()]
        process.kill()
    assert len(pids) == 2
    assert len(hosts) == ranks - 1
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
        with on_ray(small_model, engine_use_ray=True) as engine:
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
