"""The driver process: it places the actors of an engine's cores on a Ray cluster, and tells the client what they do.

It ends, with all actors, when its standard input ends. Nothing of a request goes through it or through Ray.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import threading
from typing import IO, Any

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vllm_mp
from vllm_mp.client.ray.core_actor import CoreActor
from vllm_mp.client.ray.messages import Connected, Launch, Lost, Order, Serves, StartCore, State, Stopped, Waits
from vllm_mp.client.ray.resources import bundle_of, no_room
from vllm_mp.config import VllmConfig
from vllm_mp.curve_keys import make_client_key
from vllm_mp.errors import EngineDeadError, EngineStartError

_MAX_LINE_BYTES = 64 * 2**20
_LOCAL_STORE_BYTES = 80 * 2**20
"""Object store of a local cluster, near Ray's least: no object of an engine is larger than its configuration."""
_CONNECT_TIMEOUT_S = 60.0
"""Ray itself tries for minutes to reach a cluster that has ended."""
_ROOM_LOOK_S = 1.0
"""Time between two looks whether there is room."""
_PARENT_LOOK_S = 1.0
_ACTOR_RETRY_S = 1.0
_CLOSE_TIMEOUT_S = 15.0
"""Time that an actor gets to end its core before it is killed."""


class Driver:
    """The cores of one engine on a Ray cluster."""

    def __init__(self, launch: Launch, output: IO[bytes]) -> None:
        self._launch = launch
        self._config = launch.config
        self._output = output
        self._is_local = False
        self._num_cores = launch.config.parallel_config.data_parallel_size
        self._bundle: dict[str, float] = {}
        self._groups: dict[int, PlacementGroup] = {}
        """The placement group of each place; places below `_num_cores` share one."""
        self._placed: set[PlacementGroup] = set()
        """The groups for which there was room."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._key_numbers = itertools.count(1)

    def connect(self) -> None:
        """Connect to a cluster, or start a local one, and end the process after 60 s, or `start_timeout_s` if less.

        Raises ConnectionError or another error of Ray's.
        """
        limit_s = min(_CONNECT_TIMEOUT_S, self._config.liveness_config.start_timeout_s)
        limit = threading.Timer(limit_s, _give_up, (limit_s,))
        limit.daemon = True
        limit.start()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}
        address = self._launch.address or os.environ.get("RAY_ADDRESS")
        try:
            if address != "local":
                ray.init(address=address or "auto", **options)
        except ConnectionError:
            if address is not None:
                raise
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False, object_store_memory=_LOCAL_STORE_BYTES, **options)
            self._is_local = True
        limit.cancel()
        self._bundle = bundle_of(self._config, "GPU" in ray.cluster_resources())
        self._tell(Connected(None if self._is_local else ray.get_runtime_context().gcs_address))

    async def run(self, orders: asyncio.StreamReader) -> None:
        """Carry out the client's orders until there are no more, and end all cores."""
        self._end_with_parent(orders)
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=Order)
            if isinstance(order, StartCore):
                self._tasks[order.place] = asyncio.create_task(self._keep(order.place))
            else:
                await self._stop(order.place)
        await asyncio.gather(*map(self._stop, list(self._tasks)))
        for group in set(self._groups.values()):
            remove_placement_group(group)

    def _end_with_parent(self, orders: asyncio.StreamReader) -> None:
        """End the orders when the client has ended; a process that it forked may hold its end of the pipe open."""
        if os.getppid() != self._launch.parent_pid:
            orders.feed_eof()
        else:
            asyncio.get_running_loop().call_later(_PARENT_LOOK_S, self._end_with_parent, orders)

    def _tell(self, message: State | Connected) -> None:
        with contextlib.suppress(BrokenPipeError):  # the client has ended, and the end of its orders follows
            self._output.write(msgspec.json.encode(message) + b"\n")
            self._output.flush()

    async def _stop(self, place: int) -> None:
        task = self._tasks.pop(place, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if place >= self._num_cores and (group := self._groups.pop(place, None)) is not None:
            remove_placement_group(group)
        self._tell(Stopped(place))

    async def _keep(self, place: int) -> None:
        """Start the core of a place and watch it until it is lost or this task is cancelled."""
        node, actor = "", None
        try:
            group, index = await self._reserve(place)
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor = (
                ray.remote(CoreActor)
                .options(
                    num_cpus=self._bundle["CPU"], num_gpus=self._bundle.get("GPU", 0), scheduling_strategy=strategy
                )
                .remote()
            )
            node = _node_of(group, index)
            await self._serve(place, actor, node)
            await _watch(actor)
        except asyncio.CancelledError:
            await _close(actor)
            raise
        except Exception as error:
            if not isinstance(error, RayActorError):
                await _close(actor)
            cause, is_final = _explain(error, node)
            self._tell(Lost(place, cause, is_final))
        finally:
            if actor is not None:
                ray.kill(actor)

    async def _reserve(self, place: int) -> tuple[PlacementGroup, int]:
        """Return the placement group and the index of the bundle of a place, once the cluster has room for it.

        Raises EngineStartError if there is none for `start_timeout_s`, unless there was room before a node was lost; at
        once if a local cluster is too small.
        """
        members = range(self._num_cores) if place < self._num_cores else range(place, place + 1)
        if place not in self._groups:
            group = placement_group([self._bundle] * len(members), strategy="SPREAD")
            self._groups |= dict.fromkeys(members, group)
        group = self._groups[place]
        is_first = group not in self._placed
        limit_s = self._config.liveness_config.start_timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        while not await asyncio.to_thread(group.wait, _ROOM_LOOK_S):
            why = no_room(self._config, self._bundle, len(members) if is_first else 1, ray.nodes())
            if is_first and self._is_local:
                raise EngineStartError(why)
            if is_first and asyncio.get_running_loop().time() > deadline:
                raise EngineStartError(f"{why} (waited start_timeout_s={limit_s:g} s)")
            self._tell(Waits(place, why))
        self._placed.add(group)
        return group, place - members.start

    async def _serve(self, place: int, actor: Any, node: str) -> None:
        """Start the core of an actor, and tell the client when it serves.

        Raises EngineStartError if the node has another version or the core does not start, and errors of Ray's.
        """
        limit_s = self._config.liveness_config.start_timeout_s
        try:
            version, server_key = await asyncio.wait_for(_as_future(actor.prepare.remote()), limit_s)
        except TimeoutError as error:
            raise EngineStartError(f"{node} did not start the actor within start_timeout_s={limit_s:g} s") from error
        if version != vllm_mp.__version__:
            raise _NoPackage(f"has vllm-mp {version}")
        key_file = f"{self._launch.folder}/{os.getpid()}-{next(self._key_numbers)}.key"
        key = make_client_key(key_file, server_key)
        config = msgspec.json.encode(_with_threads(self._config, self._bundle))
        address = await actor.start.remote(config, key.public, self._launch.operator_key)
        self._tell(Serves(place, address, key_file, node, self._bundle))


async def _close(actor: Any) -> None:
    """Let an actor end its core and remove its files, if there is one and it can."""
    if actor is not None:
        with contextlib.suppress(RayError, TimeoutError):
            await asyncio.wait_for(_as_future(actor.close.remote()), _CLOSE_TIMEOUT_S)


async def _watch(actor: Any) -> None:
    """Raise the error with which the actor ends; an actor that cannot be reached for a while may go on."""
    while True:
        try:
            await actor.keep.remote()
            return
        except ActorUnavailableError:
            await asyncio.sleep(_ACTOR_RETRY_S)


class _NoPackage(Exception):
    """A node has another version of the package."""


def _as_future(reference: Any) -> "asyncio.Future[Any]":
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    return future


def _explain(error: Exception, node: str) -> tuple[str, bool]:
    """Return why a place has no core, and whether another attempt would fail too."""
    text = str(error)
    lacks = str(error) if isinstance(error, _NoPackage) else ""
    if "ModuleNotFoundError" in text or "ImportError" in text:
        lacks = f"cannot import vllm-mp ({_last_line(text)})"
    if lacks:
        here = f"this machine has vllm-mp {vllm_mp.__version__}"
        return f"{node} {lacks}, and {here}; install the same version on all nodes", True
    if isinstance(error, RayTaskError):
        inner = error.cause
        if isinstance(inner, EngineStartError):
            return f"the core on {node} did not start: {inner}", False
        if isinstance(inner, EngineDeadError):
            return f"the core on {node} is gone for good: {inner}", True
    if isinstance(error, RayActorError):
        return f"the actor of the core on {node} died, or its node was lost: {_last_line(text)}", False
    return text, False


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip()


def _node_of(group: PlacementGroup, index: int) -> str:
    """Return the name of the node that has a bundle."""
    node_id = placement_group_table(group)["bundles_to_node_id"][index]
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return f"node {node['NodeManagerHostname']} ({node_id[:8]})"
    return f"node {node_id[:8]}"


def _with_threads(config: VllmConfig, bundle: dict[str, float]) -> VllmConfig:
    """Return `config` with a thread for each reserved CPU, if the core runs on CPUs."""
    if "GPU" in bundle:
        return config
    device = msgspec.structs.replace(config.device_config, device="cpu", num_threads=int(bundle["CPU"]))
    return msgspec.structs.replace(config, device_config=device)


def _give_up(limit_s: float) -> None:
    """End the process, whose main thread cannot be interrupted while it connects."""
    print(f"no connection within {limit_s:g} s", file=sys.stderr, flush=True)
    os._exit(1)


async def _run(output: IO[bytes]) -> int:
    orders = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    line = await orders.readline()
    if not line:
        return 0
    launch = msgspec.json.decode(line, type=Launch)
    driver = Driver(launch, output)
    try:
        driver.connect()
    except Exception as error:
        print(f"cannot connect to Ray: {error}", file=sys.stderr)
        return 1
    try:
        await driver.run(orders)
    finally:
        ray.shutdown()
        if os.getppid() != launch.parent_pid:
            shutil.rmtree(launch.folder, ignore_errors=True)
    return 0


def main() -> int:
    """Place the cores of the client that is this process's parent; return the exit code."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what Ray prints must not get between the messages
        return asyncio.run(_run(output))


if __name__ == "__main__":
    sys.exit(main())
