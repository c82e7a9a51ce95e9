"""Cores with ranks on several nodes of a Ray cluster."""

import asyncio
import functools

import psutil
import pytest
from support.ray_cluster import (
    PROMPTS,
    add_nodes,
    all_tokens,
    default_cluster,
    driver_of,
    have_ended,
    is_serving,
    nodes_of,
    on_ray,
    pids_of,
    rank_hosts,
    start_streams,
    tokens_of,
)

from vllm_mp.testing.engines import eventually, greedy, running_engine

pytestmark = pytest.mark.extended  # needs Ray


@pytest.fixture(scope="module")
def cluster():
    with default_cluster(3) as cluster:
        yield cluster


async def tokens_after(engine, strike, max_tokens):
    """Return the tokens of streams in the midst of which `strike` is called."""
    streams = start_streams(engine, max_tokens)

    async def has_begun():
        return any(stream.awaited[0].num_tokens for stream in engine.cores.first.requests.streams())

    await eventually(has_begun)
    strike()
    return await asyncio.gather(*streams)


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


@pytest.mark.slow
def test_streams_go_on_when_either_node_of_a_core_with_two_is_killed(cluster, small_model):
    async def run():
        client = engine.cores.first
        expected = await all_tokens(engine, 100)
        for index in (1, 0):
            add_nodes(cluster, up_to=3)
            before = nodes_of(client)
            [victim] = [node for node in cluster.nodes if node.node_id[:8] in before[index]]
            cluster.nodes.remove(victim)
            kill = functools.partial(cluster.remove_node, victim, allow_graceful=False)
            assert await tokens_after(engine, kill, 100) == expected

            async def is_replaced(gone=before[index]):
                return client.has_core and gone not in nodes_of(client)

            await eventually(is_replaced, timeout=60)
            assert len(set(nodes_of(client))) == 2
        pids.extend(await pids_of(engine))
        pids.extend((await engine.core_status())["rank_pids"])

    pids = []
    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2) as engine:
        asyncio.run(run())
    asyncio.run(eventually(lambda: have_ended(pids)))


@pytest.mark.slow
def test_killed_process_is_replaced_and_so_are_those_that_depend_on_it(cluster, small_model):
    async def run():
        expected = await all_tokens(engine, 60)
        for what in ("rank", "rank host", "actor", "driver"):
            rank = psutil.Process((await engine.core_status())["rank_pids"][1])
            victims = dict(zip(("rank", "rank host", "actor"), (rank, *rank.parents()), strict=False))
            victims["driver"] = psutil.Process(driver_of(engine))
            pids = [process.pid for process in victims.values()][: 1 + list(victims).index(what)]
            supervisor = engine.cores.first.supervisor
            before = supervisor.num_restarts
            assert await tokens_after(engine, victims[what].kill, 60) == expected, what
            await eventually(functools.partial(have_ended, pids))
            # A new actor or driver starts a core of its own, with no restarts.
            assert supervisor.num_restarts == (before + 1 if what in ("rank", "rank host") else 0), what

    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2) as engine:
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

    limits = {"engine_iteration_timeout_s": 3.0, "start_timeout_s": 60.0}
    with on_ray(small_model, worker_use_ray=True, nnodes=2, tensor_parallel_size=2, **limits) as engine:
        asyncio.run(run())


@pytest.mark.slow
def test_each_of_several_cores_has_two_nodes_and_a_removed_core_frees_them(cluster, small_model):
    async def run():
        for added in (None, 2):
            if added:
                await engine.remove_core(0)
                assert await engine.add_core() == added
            for client in engine.cores.clients:
                assert len(set(nodes_of(client))) == 2
            assert len({node for client in engine.cores.clients for node in nodes_of(client)}) == 4
            tokens = [await tokens_of(engine, PROMPTS[0], greedy(9), data_parallel_rank=i) for i in (1, added or 0)]
            assert tokens[0] == tokens[1]
            assert len(tokens[0]) == 9

    add_nodes(cluster, up_to=4)
    with on_ray(small_model, data_parallel_size=2, nnodes=2, tensor_parallel_size=2) as engine:
        asyncio.run(run())
