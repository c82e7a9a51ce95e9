"""A Ray cluster of several nodes on this machine, as Ray's own tests have them, and engines on it.

Only `tools/setup-venv test-all` installs Ray.
"""

import asyncio
import contextlib

import psutil
import pytest

from support.engine_fixtures import SLOW_STEPS
from vllm_mp import SamplingParams
from vllm_mp.testing.engines import running_engine

STORE_BYTES = 80 * 2**20
PROMPTS = [f"{subject} is known for" for subject in ("The river", "A castle", "This song", "Her garden")]


@contextlib.contextmanager
def default_cluster(num_nodes):
    """Run a cluster as `running_cluster` does, which engines on Ray use."""
    with pytest.MonkeyPatch.context() as patch, running_cluster(num_nodes) as cluster:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


@contextlib.contextmanager
def running_cluster(num_nodes):
    """Run a cluster of a head without CPUs and nodes with one CPU each, which notices a lost node soon."""
    from ray.cluster_utils import Cluster

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


def on_ray(model, **options):
    """Return a context manager that runs an engine with slow steps on Ray."""
    return running_engine(model, **{"data_parallel_backend": "ray", "fault_injection": SLOW_STEPS, **options})


def driver_of(engine):
    """Return the pid of the driver process of an engine on Ray."""
    return engine.cores.first.supervisor._source._driver._popen.pid


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
    return all(client.has_core for client in engine.cores.clients)
