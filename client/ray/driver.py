"""The driver process: it starts the actors of an engine's cores on a Ray cluster, and tells the client what they do.

It ends, with all actors, when its standard input ends. Nothing of a request goes through it or through Ray.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Coroutine
from typing import IO, Any, NamedTuple

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import vllm_mp
from vllm_mp.client.ray.core_actor import CoreActor
from vllm_mp.client.ray.messages import Connected, Launch, Lost, Order, Serves, StartCore, State, Stopped, Waits
from vllm_mp.client.ray.rank_host_actor import RankHostActor
from vllm_mp.client.ray.resources import bundle_of, no_room
from vllm_mp.config import VllmConfig
from vllm_mp.config.nodes import is_missing_node
from vllm_mp.errors import EngineDeadError, EngineStartError
from vllm_mp.keys.curve_keys import make_client_key

_MAX_LINE_BYTES = 64 * 2**20
_LOCAL_STORE_BYTES = 80 * 2**20
"""Object store of a local cluster, near Ray's least: no object of an engine is larger than its configuration."""
_CONNECT_TIMEOUT_S = 60.0
"""Ray itself tries for minutes to reach a cluster that has ended."""
_ROOM_CHECK_S = 1.0
"""Time between two checks whether there is room."""
_PARENT_CHECK_S = 1.0
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
        self._placement_groups: dict[int, PlacementGroup] = {}
        """The placement group of each core slot; slots that `_sharing` returns together share it."""
        self._placed: set[PlacementGroup] = set()
        """The placement groups for which the cluster had room."""
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
                self._tasks[order.slot] = asyncio.create_task(self._keep(order.slot))
            else:
                await self._stop(order.slot)
        await asyncio.gather(*map(self._stop, list(self._tasks)))
        for group in set(self._placement_groups.values()):
            remove_placement_group(group)

    def _end_with_parent(self, orders: asyncio.StreamReader) -> None:
        """End the orders when the client has ended; a process that it forked may hold its end of the pipe open."""
        if os.getppid() != self._launch.parent_pid:
            orders.feed_eof()
        else:
            asyncio.get_running_loop().call_later(_PARENT_CHECK_S, self._end_with_parent, orders)

    def _tell(self, message: State | Connected) -> None:
        with contextlib.suppress(BrokenPipeError):  # the client has ended, and the end of its orders follows
            self._output.write(msgspec.json.encode(message) + b"\n")
            self._output.flush()

    async def _stop(self, slot: int) -> None:
        task = self._tasks.pop(slot, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if len(self._sharing(slot)) == 1 and (group := self._placement_groups.pop(slot, None)) is not None:
            remove_placement_group(group)
        self._tell(Stopped(slot))

    async def _keep(self, slot: int) -> None:
        """Start the core in a slot and watch it until it is lost or this task is cancelled."""
        members: list[_Member] = []
        try:
            group, first = await self._reserve(slot)
            for index in range(first, first + self._config.parallel_config.nnodes):
                members.append(self._start_actor(group, index, RankHostActor if members else CoreActor))
            await self._run_members(slot, members)
        except asyncio.CancelledError:
            await _end(members)
            raise
        except Exception as error:
            await _end(members)
            is_final = isinstance(error, _LostError) and error.is_final
            self._tell(Lost(slot, str(error), is_final))

    def _start_actor(self, group: PlacementGroup, index: int, kind: type) -> "_Member":
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        cpus, gpus = self._bundle["CPU"], self._bundle.get("GPU", 0)
        actor = ray.remote(kind).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy).remote()
        return _Member(actor, _node_of(group, index))

    def _sharing(self, slot: int) -> range:
        """Return the core slots whose bundles are spread in one placement group with those of `slot`.

        The cores that the engine starts with share a group if each has one node. Otherwise each core has a group of
        its own, so that its nodes differ.
        """
        is_shared = slot < self._num_cores and self._config.parallel_config.nnodes == 1
        return range(self._num_cores) if is_shared else range(slot, slot + 1)

    async def _reserve(self, slot: int) -> tuple[PlacementGroup, int]:
        """Return the placement group of a core slot and the index of its first bundle, once the cluster has room.

        Raises EngineStartError if there is no room for `start_timeout_s`, unless there was room before a node was lost;
        at once if a local cluster is too small.
        """
        sharing = self._sharing(slot)
        if slot not in self._placement_groups:
            num_bundles = len(sharing) * self._config.parallel_config.nnodes
            group = placement_group([self._bundle] * num_bundles, strategy="SPREAD")
            self._placement_groups |= dict.fromkeys(sharing, group)
        group = self._placement_groups[slot]
        is_first = group not in self._placed
        limit_s = self._config.liveness_config.start_timeout_s
        deadline = asyncio.get_running_loop().time() + limit_s
        while not await asyncio.to_thread(group.wait, _ROOM_CHECK_S):
            num_cores = self._num_cores if is_first and slot < self._num_cores else 1
            why = no_room(self._config, self._bundle, num_cores, ray.nodes())
            if is_first and self._is_local:
                raise EngineStartError(why)
            if is_first and asyncio.get_running_loop().time() > deadline:
                raise EngineStartError(f"{why} (waited start_timeout_s={limit_s:g} s)")
            self._tell(Waits(slot, why))
        self._placed.add(group)
        return group, (slot - sharing.start) * self._config.parallel_config.nnodes

    async def _run_members(self, slot: int, members: "list[_Member]") -> None:
        """Run the core of the first actor with the rank hosts of the others, until one of them is lost.

        Raises _LostError.
        """
        core, *hosts = members
        limit_s = self._config.liveness_config.start_timeout_s
        prepared = [core.call("prepare", limit_s=limit_s), *(host.call("version", limit_s=limit_s) for host in hosts)]
        (version, core_key), *versions = await asyncio.gather(*prepared)
        for member, found in zip(members, [version, *versions], strict=True):
            if found != vllm_mp.__version__:
                raise _LostError(_no_package(member.node, f"has vllm-mp {found}"), is_final=True)
        config, host_keys = _with_threads(self._config, self._bundle), []
        if hosts:
            address, port, nodes_key = await core.call("prepare_nodes")
            config = _with_parallel(config, master_addr=address, master_port=port)
            configs = [
                msgspec.json.encode(_with_parallel(config, node_rank=number)) for number in range(1, len(members))
            ]
            # Before the core, which does not wait for the model that a node fetches first.
            starts = [host.call("start", own, nodes_key) for host, own in zip(hosts, configs, strict=True)]
            host_keys = await asyncio.gather(*starts)
        serving = self._serve(slot, members, config, core_key, host_keys)
        await _until_first_ends(serving, *(host.keep() for host in hosts))

    async def _serve(
        self, slot: int, members: "list[_Member]", config: VllmConfig, core_key: bytes, host_keys: list[bytes]
    ) -> None:
        """Start the core of the first actor, tell the client when it serves, and watch it. Raises _LostError."""
        core = members[0]
        key_file = f"{self._launch.folder}/{os.getpid()}-{next(self._key_numbers)}.key"
        key = make_client_key(key_file, core_key)
        encoded = msgspec.json.encode(config)
        address = await core.call("start", encoded, key.public, self._launch.operator_key, host_keys)
        self._tell(Serves(slot, address, key_file, [member.node for member in members], self._bundle))
        await core.keep()


class _LostError(Exception):
    """Why there is no core."""

    def __init__(self, cause: str, is_final: bool) -> None:
        super().__init__(cause)
        self.is_final = is_final
        """Another attempt would fail too."""

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (str(self), self.is_final), self.__dict__


class _Member(NamedTuple):
    """An actor that is the parent of a core, or of one of its rank hosts."""

    actor: Any
    node: str
    """The name of its node."""

    async def call(self, method: str, *args: object, limit_s: float | None = None) -> Any:
        """Return the result of a method of the actor. Raises _LostError, and ActorUnavailableError.

        `limit_s`: seconds that the actor has to start.
        """
        try:
            return await asyncio.wait_for(_as_future(getattr(self.actor, method).remote(*args)), limit_s)
        except ActorUnavailableError:
            raise
        except TimeoutError as error:
            cause = f"{self.node} did not start the actor within start_timeout_s={limit_s:g} s"
            raise _LostError(cause, is_final=False) from error
        except Exception as error:
            raise _LostError(*_explain(error, self.node)) from error

    async def keep(self) -> None:
        """Raise the error with which the actor ends; an actor that cannot be reached for a while may go on."""
        while True:
            try:
                await self.call("keep")
                return
            except ActorUnavailableError:
                await asyncio.sleep(_ACTOR_RETRY_S)

    async def close(self) -> None:
        """Let the actor end its core or rank host and remove its files, if it can; end the actor."""
        try:
            await asyncio.wait_for(_as_future(self.actor.close.remote()), _CLOSE_TIMEOUT_S)
        except (RayError, TimeoutError):
            pass
        finally:
            ray.kill(self.actor)


async def _end(members: list[_Member]) -> None:
    await asyncio.gather(*(member.close() for member in members))


async def _until_first_ends(*calls: Coroutine[Any, Any, None]) -> None:
    """Return or raise as the first of `calls` that ends, and cancel the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(iter(done)).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_future(reference: Any) -> "asyncio.Future[Any]":
    future: asyncio.Future[Any] = asyncio.wrap_future(reference.future())
    return future


def _explain(error: Exception, node: str) -> tuple[str, bool]:
    """Return why a node has no core or rank host, and whether another attempt would fail too."""
    text = str(error)
    if "ModuleNotFoundError" in text or "ImportError" in text:
        return _no_package(node, f"cannot import vllm-mp ({_last_line(text)})"), True
    if isinstance(error, RayTaskError):
        inner = error.cause
        if isinstance(inner, EngineStartError):
            return f"the core on {node} did not start: {inner}", False
        if isinstance(inner, EngineDeadError):
            # Other actors may have a rank host that joins.
            return f"the core on {node} is gone for good: {inner}", not is_missing_node(str(inner))
        return f"the actor of the core on {node} failed: {_last_line(text)}", False
    if isinstance(error, RayActorError):
        return f"the actor of the core on {node} died, or its node was lost: {_last_line(text)}", False
    return text, False


def _no_package(node: str, lack: str) -> str:
    here = f"this machine has vllm-mp {vllm_mp.__version__}"
    return f"{node} {lack}, and {here}; install the same version on all nodes"


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


def _with_parallel(config: VllmConfig, **changes: object) -> VllmConfig:
    return msgspec.structs.replace(config, parallel_config=msgspec.structs.replace(config.parallel_config, **changes))


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
    """Run the cores of the client that is this process's parent; return the exit code."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # what Ray prints must not get between the messages
        return asyncio.run(_run(output))


if __name__ == "__main__":
    sys.exit(main())
